package nbd

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// server is as much of an NBD server as the client needs, with a disk of its
// own per connection. after has actions by the number of answered requests.
type server struct {
	disk  []byte
	flags uint16
	after map[int]func(net.Conn)
	bye   chan struct{} // not nil: it ends a connection that is told to end after that
	tls   *tls.Config   // not nil: the server does nothing before TLS
}

const exportName = "rnbd0"

// serve returns the address of a server in this process.
func serve(t *testing.T, s *server) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "nbd.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go s.talk(conn)
		}
	}()
	return "nbd+unix:///" + exportName + "?" + url.Values{"socket": {path}}.Encode()
}

func (s *server) talk(conn net.Conn) {
	defer conn.Close()
	conn.Write(nbdwire.AppendGreeting(nil, nbdwire.FlagFixedNewstyle|nbdwire.FlagNoZeroes))
	option := make([]byte, 4+16)
	if _, err := io.ReadFull(conn, option); err != nil {
		return
	}
	if s.tls != nil {
		conn.Write(optReplyTo(nbdwire.OptStartTLS, nbdwire.RepAck, nil))
		conn = tls.Server(conn, s.tls)
		if _, err := io.ReadFull(conn, option[4:]); err != nil {
			return
		}
	}
	if n := binary.BigEndian.Uint32(option[12:]); n != nbdwire.OptGo {
		conn.Write(optReplyTo(n, nbdwire.RepErrUnsup, nil))
		return
	}
	data := make([]byte, binary.BigEndian.Uint32(option[16:]))
	io.ReadFull(conn, data)
	if name := string(data[4 : 4+binary.BigEndian.Uint32(data)]); name != exportName {
		conn.Write(optReply(nbdwire.RepErrUnknown, []byte("no export "+name)))
		return
	}
	conn.Write(optReply(nbdwire.RepInfo, nbdwire.AppendExportInfo(nil, uint64(len(s.disk)), s.flags)))
	conn.Write(optReply(nbdwire.RepInfo, nbdwire.AppendBlockSizeInfo(nil, 512, 4096, 8192+100)))
	conn.Write(optReply(nbdwire.RepAck, nil))
	for n := 0; s.answer(conn) == nil; n++ {
		if f := s.after[n]; f != nil {
			f(conn)
		}
	}
}

func optReply(kind uint32, data []byte) []byte { return optReplyTo(nbdwire.OptGo, kind, data) }

func optReplyTo(option, kind uint32, data []byte) []byte {
	return nbdwire.AppendOptionReply(nil, option, kind, data)
}

// answer does one request. Beyond the disk's end is ENOSPC.
func (s *server) answer(conn net.Conn) error {
	h := make([]byte, nbdwire.RequestSize)
	if _, err := io.ReadFull(conn, h); err != nil {
		return err
	}
	cmd, cookie := binary.BigEndian.Uint16(h[6:]), h[8:16]
	off, n := binary.BigEndian.Uint64(h[16:]), uint64(binary.BigEndian.Uint32(h[24:]))
	if cmd == nbdwire.CmdDisc {
		if s.bye != nil {
			<-s.bye
		}
		return io.EOF
	}
	payload := make([]byte, n)
	if cmd == nbdwire.CmdWrite {
		if _, err := io.ReadFull(conn, payload); err != nil {
			return err
		}
	}
	code := uint32(0)
	switch {
	case off+n > uint64(len(s.disk)):
		code, payload = uint32(syscall.ENOSPC), nil
	case cmd == nbdwire.CmdWrite:
		copy(s.disk[off:], payload)
		payload = nil
	default:
		copy(payload, s.disk[off:])
	}
	_, err := conn.Write(append(simpleReply(cookie, code), payload...))
	return err
}

func simpleReply(cookie []byte, code uint32) []byte {
	b := binary.BigEndian.AppendUint32(nil, nbdwire.MagicSimple)
	return append(binary.BigEndian.AppendUint32(b, code), cookie...)
}

func open(t *testing.T, uri string, slots int) load.Queue {
	t.Helper()
	e, err := Open(t.Context(), uri)
	if err != nil {
		t.Fatal(err)
	}
	q, err := e.Open(t.Context(), 0, 1, slots, 8192)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func TestTheExportIsWhatTheServerSays(t *testing.T) {
	e, err := Open(t.Context(), serve(t, &server{disk: make([]byte, 1<<20), flags: nbdwire.ReadOnly}))
	if err != nil {
		t.Fatal(err)
	}
	want := blk.Limits{Size: 1 << 20, LogicalBlockSize: 512, MaxIOSize: 8192, ReadOnly: true}
	if e.Limits() != want {
		t.Errorf("limits are %+v, want %+v", e.Limits(), want)
	}
}

func TestLoadOverNBDIsCompared(t *testing.T) {
	e, err := Open(t.Context(), serve(t, &server{disk: make([]byte, 1<<20)}))
	if err != nil {
		t.Fatal(err)
	}
	target := &load.Target{Name: "nbd", Device: e, Pattern: load.NewPattern(1<<20, 1)}
	w := load.Mixed(2, 1)
	for writes, tries := uint64(0), 0; writes == 0; tries++ {
		r, err := load.Run(t.Context(), w, []*load.Target{target}, load.Options{Time: 50 * time.Millisecond})
		if err != nil || tries == 100 {
			t.Fatalf("%d requests and no write, %v", r.Requests(), err)
		}
		writes = r.Latency[1].Count()
	}
	if n, err := load.ReadBack(t.Context(), target); err != nil || n == 0 {
		t.Errorf("%d bytes read back, %v", n, err)
	}
}

// wait collects n answers by slot.
func wait(t *testing.T, q load.Queue, n int) map[int]error {
	t.Helper()
	got := map[int]error{}
	for len(got) < n {
		var done [2]load.Done
		k := q.Wait(done[:])
		if k == 0 {
			t.Fatalf("nothing comes after %d of %d answers", len(got), n)
		}
		for _, d := range done[:k] {
			if _, twice := got[d.Slot]; twice {
				t.Fatalf("slot %d is answered twice", d.Slot)
			}
			got[d.Slot] = d.Err
		}
	}
	if k := q.Wait(make([]load.Done, 1)); k != 0 {
		t.Errorf("%d answers with nothing in flight", k)
	}
	return got
}

func TestAnErrorIsThatOfItsRequest(t *testing.T) {
	q := open(t, serve(t, &server{disk: make([]byte, 8192)}), 3)
	for slot, off := range []uint64{0, 8192, 4096} {
		q.Submit(load.Request{Op: blk.Read, Slot: slot, Off: off, Len: 4096})
	}
	got := wait(t, q, 3)
	if got[0] != nil || !errors.Is(got[1], syscall.ENOSPC) || got[2] != nil {
		t.Errorf("answers are %v", got)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
}

func TestALostConnectionFailsWhatIsInFlight(t *testing.T) {
	for name, f := range map[string]func(net.Conn){
		"the server closes it":       func(c net.Conn) { c.Close() },
		"a reply is garbage":         func(c net.Conn) { c.Write(make([]byte, nbdwire.SimpleSize)) },
		"a reply comes twice":        func(c net.Conn) { c.Write(simpleReply(make([]byte, 8), 0)) },
		"a reply is to no request":   func(c net.Conn) { c.Write(simpleReply([]byte{0, 0, 0, 0, 0, 0, 1, 0}, 0)) },
		"a reply ends in its middle": func(c net.Conn) { c.Write([]byte{0x67, 0x44}); c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			q := open(t, serve(t, &server{disk: make([]byte, 8192), after: map[int]func(net.Conn){0: f}}), 1)
			q.Submit(load.Request{Op: blk.Read, Len: 512})
			if got := wait(t, q, 1); got[0] != nil {
				t.Fatal(got[0])
			}
			select {
			case d, more := <-q.(*queue).answers:
				if more {
					t.Fatalf("answer %+v to no request", d)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("the connection goes on")
			}
			q.Submit(load.Request{Op: blk.Write, Len: 512})
			if got := wait(t, q, 1); got[0] == nil {
				t.Error("a write on a connection that is over is answered")
			}
			q.Close()
		})
	}
}

// The server's next answer must show one user less.
func TestCloseWaitsForTheServersEnd(t *testing.T) {
	s := &server{disk: make([]byte, 1<<20), bye: make(chan struct{})}
	q := open(t, serve(t, s), 1)
	began := time.Now()
	ended := make(chan error, 1)
	go func() { ended <- q.Close() }()
	select {
	case err := <-ended:
		if took := time.Since(began); took < goodbye {
			t.Errorf("it returned after %v, %v", took, err)
		}
		close(s.bye)
	case <-time.After(20 * time.Millisecond):
		close(s.bye)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	uri := serve(t, &server{disk: make([]byte, 8192)})
	silent, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, c := range []struct {
		name, uri string
		want      error
		text      string
	}{
		{"no such export", strings.Replace(uri, exportName, "other", 1), syscall.ENOENT, "no export other"},
		{"nobody listens", "nbd+unix:///x?socket=/nonexistent", syscall.ENOENT, "nonexistent"},
		{"another scheme", "http://127.0.0.1/x", syscall.EINVAL, "no address"},
		{"no address", "nbd:///x", syscall.EINVAL, "no address"},
		{"a server that is silent", "nbd+unix:///x?socket=" + silent.Addr().String(), nil, "greeting"},
	} {
		ctx := t.Context()
		if c.want == nil {
			short, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			ctx = short
		}
		_, err := Open(ctx, c.uri)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestTLS: an export by TLS is read as any other, and a server without it, or
// with a certificate of another authority, is refused.
func TestTLS(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	certificate := func(dir string) *tls.Config {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, IsCA: true, BasicConstraintsValid: true,
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "ca-cert.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	}
	s := &server{disk: bytes.Repeat([]byte{7}, 1<<20), tls: certificate(dir)}
	certificate(other)
	secure := func(address, dir string) string {
		return "nbds" + strings.TrimPrefix(address, "nbd") + "&tls-certificates=" + dir
	}
	address := serve(t, s)
	e, err := Open(t.Context(), secure(address, dir))
	if err != nil || e.Limits().Size != 1<<20 || !strings.HasPrefix(e.TLS(), "TLS 1.3 ") {
		t.Fatalf("%+v, %v", e, err)
	}
	q, err := e.Open(t.Context(), 0, 1, 1, 4096)
	if err != nil {
		t.Fatal(err)
	}
	q.Submit(load.Request{Op: blk.Read, Len: 4096})
	done := make([]load.Done, 1)
	if n := q.Wait(done); n != 1 || done[0].Err != nil || q.Buf(0)[4095] != 7 {
		t.Errorf("%d answers, %v", n, done[0].Err)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	plain := serve(t, &server{disk: s.disk})
	for what, address := range map[string]string{
		"plain client": address, "another authority": secure(address, other), "no authority": secure(address, ""),
		"no folder": secure(address, "/nonexistent"), "plain server": secure(plain, dir),
	} {
		if _, err := Open(t.Context(), address); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
}
