package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const needsTLS = uint32(0x80000005)

// enough is time for what takes milliseconds on a machine that is not busy.
const enough = 30 * time.Second

// tlsRig has a TCP listener, too, whose address it returns.
func tlsRig(t *testing.T, c rigConfig, s plugin.TLS) (*rig, string) {
	t.Helper()
	r := newRig(t, c)
	if s.Certificate != nil {
		must(t, "set TLS", r.f.SetTLS(t.Context(), s))
	}
	return r, r.listenOn("tcp", "127.0.0.1:0")
}

// greeted connects and ends the greeting.
func greeted(t testing.TB, network, addr string) net.Conn {
	t.Helper()
	conn, err := net.DialTimeout(network, addr, enough)
	must(t, "connect", err)
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(enough))
	b := make([]byte, len(greeting))
	if _, err := io.ReadFull(conn, b); err != nil || !bytes.Equal(b, greeting) {
		t.Fatalf("greeting % x, error %v", b, err)
	}
	_, err = conn.Write([]byte{0, 0, 0, 3})
	must(t, "send flags", err)
	return conn
}

// ask sends an option and returns the kind of the first reply.
func ask(conn net.Conn, opt uint32, data []byte) (uint32, error) {
	if _, err := conn.Write(option(opt, data)); err != nil {
		return 0, err
	}
	var h [20]byte
	if _, err := io.ReadFull(conn, h[:]); err != nil {
		return 0, err
	}
	_, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(h[16:])))
	return binary.BigEndian.Uint32(h[12:]), err
}

func mustAsk(t testing.TB, conn net.Conn, opt uint32, data []byte, want uint32) {
	t.Helper()
	if kind, err := ask(conn, opt, data); err != nil || kind != want {
		t.Errorf("option %d: reply %#x, error %v, want %#x", opt, kind, err, want)
	}
}

// upgrade starts TLS on a greeted connection. The first answer in TLS shows that
// the server has accepted the client.
func upgrade(conn net.Conn, cfg *tls.Config) (*tls.Conn, error) {
	if kind, err := ask(conn, nbdwire.OptStartTLS, nil); err != nil || kind != nbdwire.RepAck {
		return nil, errors.Join(errors.New("STARTTLS is refused"), err)
	}
	c := tls.Client(conn, cfg)
	if err := c.Handshake(); err != nil {
		return nil, err
	}
	kind, err := ask(c, nbdwire.OptList, nil)
	if kind == nbdwire.RepAck {
		return c, err // there is no export for it
	}
	for err == nil { // the other replies to LIST
		var h [20]byte
		if _, err = io.ReadFull(c, h[:]); err == nil {
			_, err = io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(h[16:])))
			if binary.BigEndian.Uint32(h[12:]) == nbdwire.RepAck {
				return c, err
			}
		}
	}
	return nil, err
}

// secured is a client of disk0 with TLS; replies are read by nobody yet.
func secured(t testing.TB, addr string, cfg *tls.Config, structured bool) *client {
	t.Helper()
	conn := greeted(t, "tcp", addr)
	s, err := upgrade(conn, cfg)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{t: t, conn: s, pending: map[uint64]*call{}}
	c.choose("disk0", structured)
	conn.SetDeadline(time.Time{})
	return c
}

func running(c *client) *client {
	go c.run()
	return c
}

// Before TLS a listener that requires it answers STARTTLS and ABORT only.
func TestTLS_RequiredBeforeAllElse(t *testing.T) {
	a := newAuthority(t)
	_, addr := tlsRig(t, rigConfig{}, a.server(true, false))
	conn := greeted(t, "tcp", addr)
	for _, o := range []struct {
		opt  uint32
		data []byte
	}{{nbdwire.OptList, nil}, {nbdwire.OptInfo, goData("disk0")}, {nbdwire.OptGo, goData("disk0")}, {nbdwire.OptGo, []byte("?")}, {nbdwire.OptStructuredReply, nil}, {10, goData("disk0")}, {77, nil}} {
		mustAsk(t, conn, o.opt, o.data, needsTLS)
	}
	mustAsk(t, conn, nbdwire.OptAbort, nil, nbdwire.RepAck)

	conn = greeted(t, "tcp", addr)
	if _, err := conn.Write(option(nbdwire.OptExportName, []byte("disk0"))); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); err != nil || len(b) != 0 {
		t.Errorf("EXPORT_NAME without TLS: % x, %v", b, err)
	}
}

func TestTLS_Modes(t *testing.T) {
	a := newAuthority(t)
	for name, m := range map[string]struct {
		tls             plugin.TLS
		plain, tlsWorks bool
	}{
		"off":      {plugin.TLS{}, true, false},
		"allowed":  {a.server(false, false), true, true},
		"required": {a.server(true, false), false, true},
	} {
		t.Run(name, func(t *testing.T) {
			r, addr := tlsRig(t, rigConfig{}, m.tls)
			if kind, err := ask(greeted(t, "tcp", addr), nbdwire.OptGo, goData("disk0")); err != nil || (kind == nbdwire.RepInfo) != m.plain {
				t.Errorf("GO without TLS: reply %#x, error %v", kind, err)
			}
			if kind, err := ask(greeted(t, "unix", r.addr), nbdwire.OptGo, goData("disk0")); err != nil || (kind == nbdwire.RepInfo) != m.plain {
				t.Errorf("GO without TLS on a unix socket: reply %#x, error %v", kind, err)
			}
			if !m.tlsWorks {
				mustAsk(t, greeted(t, "tcp", addr), nbdwire.OptStartTLS, nil, unsup)
				return
			}
			if code := running(secured(t, addr, a.client(), true)).read(0, make([]byte, 4096)); code != 0 {
				t.Error(code)
			}
		})
	}
}

// A listener that the daemon names plain serves clients without TLS as well.
func TestTLS_PlainListener(t *testing.T) {
	a := newAuthority(t)
	s := a.server(true, false)
	s.Plain = []string{"test"}
	r, addr := tlsRig(t, rigConfig{}, s)
	if code := r.connect(true).read(0, make([]byte, 4096)); code != 0 {
		t.Error(code)
	}
	if code := running(secured(t, addr, a.client(), true)).read(0, make([]byte, 4096)); code != 0 {
		t.Error(code)
	}
	if l := r.f.Location(0); !strings.HasPrefix(l, "nbd+unix://") {
		t.Error(l)
	}
}

func TestTLS_Location(t *testing.T) {
	r, _ := tlsRig(t, rigConfig{}, newAuthority(t).server(true, false))
	if l := r.f.Location(0); !strings.HasPrefix(l, "nbds+unix:///disk0?socket=") {
		t.Error(l)
	}
	r.f.listeners = r.f.listeners[1:]
	if l, want := r.f.Location(0), "nbds://"+r.f.listeners[0].Addr().String()+"/disk0"; l != want {
		t.Errorf("%s, want %s", l, want)
	}
}

func TestTLS_CarriesData(t *testing.T) {
	a := newAuthority(t)
	bothReplies(t, func(t *testing.T, structured bool) {
		r, addr := tlsRig(t, rigConfig{queues: 2, seed: 3}, a.server(true, true))
		cfg := a.member("web")
		done := make(chan bool)
		for i := range 4 {
			c := running(secured(t, addr, cfg, structured))
			go func() {
				ok := true
				for j := range 20 {
					want := pattern(1+i*70001+j*3001, uint64(i*100+j))
					got, at := make([]byte, len(want)), uint64(i)<<20+uint64(j*7)
					ok = ok && c.write(at, want) == 0 && c.read(at, got) == 0 && bytes.Equal(got, want)
				}
				done <- ok && c.do(nbdwire.CmdFlush, 0, 0, 0, nil) == 0
			}()
		}
		for range 4 {
			if !<-done {
				t.Error("data differ")
			}
		}
		if n := r.f.tunnels.Load(); n != 4 {
			t.Errorf("%d tunnels", n)
		}
		if n, least := r.f.placedBytes(), uint64(2*4*20*70000); n < least {
			t.Errorf("%d bytes are counted, want %d at least", n, least)
		}
		for i := range r.pumps {
			r.onQueue(i, func(q *queue) {
				for _, c := range q.conns {
					c.closeSocket(errRemoved)
				}
			})
		}
		r.noTunnels()
	})
}

// What a man in the middle can add before the handshake has no effect after it.
func TestTLS_InjectionBeforeTheHandshake(t *testing.T) {
	a := newAuthority(t)
	r, addr := tlsRig(t, rigConfig{}, a.server(false, false))

	conn := greeted(t, "tcp", addr)
	mustAsk(t, conn, nbdwire.OptStructuredReply, nil, nbdwire.RepAck) // the attacker's
	s, err := upgrade(conn, a.client())
	must(t, "upgrade", err)
	mustAsk(t, s, nbdwire.OptStartTLS, nil, bad) // a second time
	c := &client{t: t, conn: s, pending: map[uint64]*call{}}
	c.choose("disk0", false)
	if _, err := c.conn.Write(command(nbdwire.CmdRead, 0, 1, 0, 512)); err != nil {
		t.Fatal(err)
	}
	var h [nbdwire.SimpleSize]byte
	if _, err := io.ReadFull(s, h[:]); err != nil || binary.BigEndian.Uint32(h[:]) != nbdwire.MagicSimple {
		t.Errorf("reply % x, error %v: structured replies outlive the start of TLS", h, err)
	}

	for _, behind := range [][]byte{option(nbdwire.OptList, nil), option(nbdwire.OptGo, goData("disk0")), option(nbdwire.OptExportName, []byte("disk0")), make([]byte, 100)} {
		conn := greeted(t, "tcp", addr)
		_, err := conn.Write(cat(option(nbdwire.OptStartTLS, nil), behind))
		must(t, "send", err)
		all, _ := io.ReadAll(conn)
		if !bytes.HasPrefix(all, optReply(nbdwire.OptStartTLS, nbdwire.RepAck)) || bytes.Contains(all[20:], cat(uint64(nbdwire.MagicOptionReply))) {
			t.Errorf("behind STARTTLS % x is answered: % x", behind, all)
		}
	}
	mustAsk(t, greeted(t, "tcp", addr), nbdwire.OptStartTLS, []byte("x"), bad)
	eventually(t, "one opener", func() bool { return r.f.Openers(0) == 1 })
}

// refusals are clients that a server with a CA for clients does not accept.
func refusals(t *testing.T, a *authority) map[string]*tls.Config {
	t.Helper()
	issued := func(by *authority, change func(*x509.Certificate)) *tls.Config {
		cert, key := by.issue("web", change)
		return with(t, a.client(), cert, key)
	}
	old := a.member("web")
	old.MaxVersion = tls.VersionTLS12
	return map[string]*tls.Config{
		"no certificate":           a.client(),
		"another CA":               issued(newAuthority(t), nil),
		"expired":                  issued(a, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }),
		"not valid yet":            issued(a, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }),
		"a certificate of servers": issued(a, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }),
		"TLS 1.2":                  old,
	}
}

func TestTLS_ClientsThatAreRefused(t *testing.T) {
	a := newAuthority(t)
	r, addr := tlsRig(t, rigConfig{}, a.server(true, true))
	good := running(secured(t, addr, a.member("web"), true))
	for name, cfg := range refusals(t, a) {
		t.Run(name, func(t *testing.T) {
			if _, err := upgrade(greeted(t, "tcp", addr), cfg); err == nil {
				t.Error("it is accepted")
			}
		})
	}
	t.Run("garbage", func(t *testing.T) {
		conn := greeted(t, "tcp", addr)
		mustAsk(t, conn, nbdwire.OptStartTLS, nil, nbdwire.RepAck)
		conn.Write(bytes.Repeat([]byte("garbage!"), 100))
		io.Copy(io.Discard, conn)
	})
	t.Run("a server of another CA", func(t *testing.T) {
		if _, err := upgrade(greeted(t, "tcp", addr), newAuthority(t).member("web")); err == nil {
			t.Error("the client accepts it")
		}
	})
	if code := good.read(0, make([]byte, 4096)); code != 0 || r.f.Openers(0) != 1 {
		t.Errorf("error %d, %d openers", code, r.f.Openers(0))
	}
}

// Connections that stop in the greeting, or in the handshake of TLS, give way.
func TestTLS_StalledHandshakesKeepNobodyOut(t *testing.T) {
	a := newAuthority(t)
	_, addr := tlsRig(t, rigConfig{}, a.server(true, true))
	for i := range 2 * maxHandshakes {
		conn := greeted(t, "tcp", addr)
		if i%2 == 0 {
			mustAsk(t, conn, nbdwire.OptStartTLS, nil, nbdwire.RepAck)
			conn.Write([]byte{22, 3, 1, 1, 0, 1}) // the beginning of a hello
		}
	}
	began := time.Now()
	if code := running(secured(t, addr, a.member("web"), true)).read(0, make([]byte, 512)); code != 0 {
		t.Error(code)
	}
	if took := time.Since(began); took > handshakeTime {
		t.Errorf("it took %v: as long as the others' deadline", took)
	}
}

// New files count for new connections.
func TestTLS_FilesChange(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	r, addr := tlsRig(t, rigConfig{}, a.server(true, true))
	before := running(secured(t, addr, a.member("web"), true))
	must(t, "set TLS", r.f.SetTLS(t.Context(), b.server(true, true)))
	if _, err := upgrade(greeted(t, "tcp", addr), a.member("web")); err == nil {
		t.Error("a client of the earlier CA is accepted")
	}
	after := running(secured(t, addr, b.member("web"), true))
	half := b.server(true, true)
	half.PrivateKey = a.server(true, true).PrivateKey
	noCA := b.server(true, true)
	noCA.ClientCA = []byte("garbage")
	for _, s := range []plugin.TLS{{}, half, noCA} {
		if err := r.f.SetTLS(t.Context(), s); blk.ToErrno(err) != blk.EINVAL {
			t.Errorf("it is accepted: %v", err)
		}
	}
	if !ends(before) {
		t.Error("a client of the earlier CA stays connected")
	}
	for _, c := range []*client{after, running(secured(t, addr, b.member("web"), true))} {
		if code := c.read(0, make([]byte, 512)); code != 0 {
			t.Error(code)
		}
	}
}

// FuzzNegotiationBeforeTLS: where TLS is required, no client without it opens an
// export or learns of one.
func FuzzNegotiationBeforeTLS(f *testing.F) {
	f.Add(cat(uint32(3), option(7, goData("a", 3, 1))))
	f.Add(cat(uint32(1), option(1, []byte("b"))))
	f.Add(cat(uint32(3), option(3, nil), option(8, nil), option(6, goData("a")), option(2, nil)))
	f.Add(cat(uint32(3), option(5, []byte("?")), option(5, nil), option(7, goData("b"))))
	front := twoExports(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		s := &script{in: bytes.NewReader(in)}
		n, err := runHandshake(s, front, &listenerSecurity{by: &tlsProtection{}, required: true})
		if err == nil || n.exp != nil || front.Openers(0)+front.Openers(1) != 0 {
			t.Fatalf("error %v, export %v", err, n.exp)
		}
		checkReplies(t, s.out.Bytes(), false)
		for b := s.out.Bytes()[len(greeting):]; len(b) > 0; b = b[20+binary.BigEndian.Uint32(b[16:]):] {
			opt, kind := binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])
			if kind != needsTLS && !(opt == nbdwire.OptAbort && kind == nbdwire.RepAck) && !(opt == nbdwire.OptStartTLS && kind == bad) {
				t.Fatalf("option %d is answered by %#x", opt, kind)
			}
		}
	})
}
