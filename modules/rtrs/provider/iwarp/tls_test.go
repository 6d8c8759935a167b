package iwarp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tlsrecord"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs/verbstest"
)

// newPSK returns what both ends of a test's connection hold.
func newPSK(t testing.TB) *tlsauth.Auth {
	t.Helper()
	line, err := tlsauth.NewPSK("test")
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(name, []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	a, err := tlsauth.New(tlsauth.Config{Files: tlsauth.Files{PSK: name}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func protectedConfig(t testing.TB) Config {
	cfg := DefaultConfig()
	cfg.TLS, cfg.AcceptTLS = newPSK(t), TLSRequire
	return cfg
}

// protected is a device that connects with TLS.
type protected struct{ *Device }

func (d protected) Connect(ctx context.Context, qp verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	p.Protect = true
	return d.Device.Connect(ctx, qp, p)
}

func TestConformanceUnderTLS(t *testing.T) {
	verbstest.Patience = 10 * time.Second
	cfg := protectedConfig(t)
	cfg.TLSCRC = true
	verbstest.Run(t, func(t *testing.T) verbstest.Fabric {
		f := fabric(t, cfg)
		f.Client, f.Server = protected{f.Client.(*Device)}, protected{f.Server.(*Device)}
		return f
	})
}

// joinTLS connects c to s and returns the error of the client.
func joinTLS(t testing.TB, c, s *end, protect bool) error {
	t.Helper()
	l, err := s.dev.Listen(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept()
		if err == nil {
			err = r.Accept(s.qp, nil)
		}
		accepted <- err
	}()
	_, err = c.dev.Connect(context.Background(), c.qp, verbs.ConnectParams{Dst: l.Addr(), Protect: protect})
	if err == nil {
		err = <-accepted
	}
	l.Close()
	return err
}

func protectedPair(t testing.TB) (c, s *end) {
	t.Helper()
	cfg := protectedConfig(t)
	c, s = newEnd(t, cfg), newEnd(t, cfg)
	if err := joinTLS(t, c, s, true); err != nil {
		t.Fatal(err)
	}
	return c, s
}

func TestModesOfListeners(t *testing.T) {
	auth := newPSK(t)
	for _, c := range []struct {
		client  *tlsauth.Auth
		mode    TLSMode
		protect bool
		want    bool
	}{
		{auth, TLSOff, false, true},
		{auth, TLSOff, true, false},
		{auth, TLSAllow, false, true},
		{auth, TLSAllow, true, true},
		{auth, TLSRequire, false, false},
		{auth, TLSRequire, true, true},
		{nil, TLSAllow, true, false},
		{newPSK(t), TLSAllow, true, false},
	} {
		cfg := DefaultConfig()
		cfg.TLS = c.client
		client := newEnd(t, cfg)
		cfg.TLS, cfg.AcceptTLS = auth, c.mode
		server := newEnd(t, cfg)
		err := joinTLS(t, client, server, c.protect)
		if (err == nil) != c.want {
			t.Errorf("mode %d, TLS %v: %v", c.mode, c.protect, err)
		}
		for _, e := range []*end{client, server} {
			got := verbs.SecurityOf(e.qp)
			if (got.Peer == "psk:test") != (c.want && c.protect) {
				t.Errorf("mode %d, TLS %v: %+v", c.mode, c.protect, got)
			}
			if q := e.qp.(*qp); c.want && q.terms.crc == c.protect {
				t.Errorf("mode %d, TLS %v: CRC %v", c.mode, c.protect, q.terms.crc)
			}
		}
	}
	if _, err := Open(Config{AcceptTLS: TLSRequire}); err == nil {
		t.Error("a listener without keys requires TLS")
	}
}

func TestPayloadUnderTLS(t *testing.T) {
	c, s := protectedPair(t)
	for _, size := range []int{0, 1, 512, 4096, 16383, 16384, 65472, 131072, 1 << 20, 3<<20 + 5} {
		src, lmr := c.region(size+1, verbs.AccessRemoteRead)
		dst, rmr := s.region(size+1, verbs.AccessRemoteWrite)
		fill(src, byte(size))
		s.recv(verbs.RecvWR{ID: 9})
		c.send(verbs.SendWR{Op: verbs.OpWriteImm, Signaled: true, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(),
			SGEs: []verbs.SGE{{Buf: src[:size/2], LKey: lmr.LKey()}, {Buf: src[size/2 : size], LKey: lmr.LKey()}}})
		if got := s.next(c); got.ByteLen != uint32(size) || got.Status != verbs.StatusOK {
			t.Fatalf("size %d: %+v", size, got)
		}
		if !bytes.Equal(src[:size], dst[:size]) || dst[size] != 0 {
			t.Errorf("size %d: data differ", size)
		}
		c.next(s)
		clear(dst)
		s.send(verbs.SendWR{ID: 3, Op: verbs.OpRead, Signaled: true, RemoteAddr: lmr.Addr(), RKey: lmr.RKey(),
			SGEs: []verbs.SGE{{Buf: dst[:size/3], LKey: rmr.LKey()}, {Buf: dst[size/3 : size], LKey: rmr.LKey()}}})
		if wc := s.next(c); wc.Status != verbs.StatusOK || !bytes.Equal(src[:size], dst[:size]) || dst[size] != 0 {
			t.Errorf("size %d: read %+v", size, wc)
		}
	}
}

// TestRecordsOfLargePayload counts the records of a large payload: all but the last are full.
func TestRecordsOfLargePayload(t *testing.T) {
	for _, size := range []int{16 << 10, 64 << 10, 128 << 10, 1 << 20} {
		c, s := protectedPair(t)
		src, lmr := c.region(size, 0)
		dst, rmr := s.region(size, verbs.AccessRemoteWrite)
		fill(src, 7)
		s.recv(verbs.RecvWR{ID: 9})
		out := c.qp.(*qp).tls.out
		before := out.Keys().Seq
		c.send(verbs.SendWR{Op: verbs.OpWriteImm, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}})
		if got := s.next(c); got.Status != verbs.StatusOK || !bytes.Equal(src, dst) {
			t.Fatalf("%d bytes: %+v", size, got)
		}
		// Headers of messages make the payload a little longer.
		if n := int(out.Keys().Seq - before); n > size/tlsrecord.MaxContent+2 {
			t.Errorf("%d bytes in %d records", size, n)
		}
	}
}

func TestKeyUpdatesUnderTLS(t *testing.T) {
	c, s := protectedPair(t)
	src, lmr := c.region(100000, 0)
	dst, rmr := s.region(100000, verbs.AccessRemoteWrite)
	for i := range 5 {
		before := c.qp.(*qp).tls.out.Keys().Secret
		c.qp.(*qp).tls.update = true // as if s had asked for it
		fill(src, byte(i))
		s.recv(verbs.RecvWR{ID: 9})
		c.send(verbs.SendWR{Op: verbs.OpWriteImm, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}})
		if got := s.next(c); got.Status != verbs.StatusOK || !bytes.Equal(src, dst) {
			t.Fatalf("update %d: %+v", i, got)
		}
		if after := c.qp.(*qp).tls.out.Keys().Secret; bytes.Equal(before, after) {
			t.Fatal("the key is the old one")
		}
	}
}

// TestEndsUnderTLS: close_notify is an orderly end, its absence is not, and a
// broken record ends the connection with an alert.
func TestEndsUnderTLS(t *testing.T) {
	record := func(q *qp, typ byte, content ...byte) []byte {
		b := make([]byte, len(content)+tlsrecord.Overhead)
		copy(b[tlsrecord.HeaderLen:], content)
		return b[:q.tls.out.Seal(b, typ, len(content))]
	}
	for name, c := range map[string]struct {
		act    func(q *qp, conn net.Conn)
		status verbs.Status
	}{
		"orderly":         {func(q *qp, _ net.Conn) { q.Disconnect() }, verbs.StatusOK},
		"close_notify":    {func(q *qp, conn net.Conn) { conn.Write(record(q, tlsrecord.Alert, 1, 0)) }, verbs.StatusOK},
		"truncated":       {func(q *qp, conn net.Conn) { conn.(*net.TCPConn).CloseWrite() }, verbs.StatusFatal},
		"half a record":   {func(q *qp, conn net.Conn) { conn.Write(record(q, 23, 1, 2, 3)[:9]); conn.(*net.TCPConn).CloseWrite() }, verbs.StatusFatal},
		"alert":           {func(q *qp, conn net.Conn) { conn.Write(record(q, tlsrecord.Alert, 2, 42)) }, verbs.StatusFatal},
		"plain bytes":     {func(q *qp, conn net.Conn) { conn.Write([]byte("\x00\x12\x41\x43 plain frame")) }, verbs.StatusFatal},
		"forged record":   {func(q *qp, conn net.Conn) { conn.Write(append([]byte{23, 3, 3, 0, 40}, make([]byte, 40)...)) }, verbs.StatusFatal},
		"record too long": {func(q *qp, conn net.Conn) { conn.Write([]byte{23, 3, 3, 0xff, 0xff}) }, verbs.StatusFatal},
		"renegotiation":   {func(q *qp, conn net.Conn) { conn.Write(record(q, tlsrecord.Handshake, 1, 0, 0, 0)) }, verbs.StatusFatal},
		"flood of nothing": {func(q *qp, conn net.Conn) {
			for range 100 {
				conn.Write(record(q, 23))
			}
		}, verbs.StatusFatal},
		"close_notify late": {func(q *qp, conn net.Conn) {
			conn.Write(record(q, 23, 0, 99))
			conn.Write(record(q, tlsrecord.Alert, 1, 0))
		}, verbs.StatusFatal},
	} {
		client, s := protectedPair(t)
		q := client.qp.(*qp)
		client.poll()
		for range 3 {
			client.poll()
			s.poll()
		}
		f := os.NewFile(uintptr(dupFD(t, q.fd)), "socket")
		conn, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		c.act(q, conn)
		if name == "orderly" {
			client.poll()
		}
		if wc := s.next(); wc.Op != verbs.OpDisconnected || wc.Status != c.status {
			t.Errorf("%s: %+v, want status %d", name, wc, c.status)
		}
		conn.Close()
	}
}

// TestNothingPlainOnTheWire: a peer that waits for a plain request or answer gets
// none.
func TestNothingPlainOnTheWire(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	heard := make(chan []byte, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			heard <- nil
			return
		}
		defer conn.Close()
		b := make([]byte, 2000)
		n, _ := conn.Read(b)
		conn.Write((&mpaFrame{flags: mpaEnhanced, rev: 2, private: make([]byte, 12)}).encode(mpaKeyReply))
		rest, _ := io.ReadAll(conn)
		heard <- append(b[:n], rest...)
	}()
	c := newEnd(t, protectedConfig(t))
	_, err = c.dev.Connect(context.Background(), c.qp, verbs.ConnectParams{Dst: netip.MustParseAddrPort(l.Addr().String()), Protect: true, Private: []byte("secret word")})
	if err == nil {
		t.Error("a server without TLS was taken")
	}
	if b := <-heard; len(b) == 0 || b[0] != typeHandshake || bytes.Contains(b, []byte("secret word")) || bytes.Contains(b, []byte("MPA")) {
		t.Errorf("heard %q", b)
	}
}

// TestStalledHandshakesEnd: a peer that begins TLS and says nothing more is closed
// after the time for a request, and counted.
func TestStalledHandshakesEnd(t *testing.T) {
	cfg := protectedConfig(t)
	cfg.RequestTimeout = 50 * time.Millisecond
	d := openDevice(t, cfg)
	l, err := d.Listen(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, b := range [][]byte{nil, {22}, {22, 3, 1, 1, 0, 1, 0, 0}} {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(b)
		conn.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%x: still open", b)
		}
		conn.Close()
	}
	for stop := time.Now().Add(30 * time.Second); d.Stats().Handshakes.Late != 3; time.Sleep(time.Millisecond) {
		if time.Now().After(stop) {
			t.Fatalf("%+v", d.Stats().Handshakes)
		}
	}
}

func TestTLSAllocatesNothing(t *testing.T) {
	for _, size := range []int{512, 4096, 128 << 10} {
		c, s := protectedPair(t)
		src, lmr := c.region(size, 0)
		_, rmr := s.region(size, verbs.AccessRemoteWrite)
		recv := []verbs.RecvWR{{ID: 1}}
		sge := []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}
		write := []verbs.SendWR{{Op: verbs.OpWriteImm, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: sge}}
		answer := []verbs.SendWR{{Op: verbs.OpWriteImm}}
		wcs := make([]verbs.WC, 16)
		await := func(e, other *end) {
			for stop := time.Now().Add(testLimit); e.cq.Poll(wcs) == 0; {
				other.cq.Flush()
				if time.Now().After(stop) {
					t.Fatal("no completion came")
				}
			}
		}
		round := func() {
			s.qp.PostRecv(recv)
			c.qp.PostRecv(recv)
			c.qp.PostSend(write)
			await(s, c)
			s.qp.PostSend(answer)
			await(c, s)
		}
		for range 200 {
			round()
		}
		if n := testing.AllocsPerRun(200, round); n != 0 {
			t.Errorf("%d bytes: %v allocations", size, n)
		}
	}
}

func dupFD(t *testing.T, fd int) int {
	t.Helper()
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
