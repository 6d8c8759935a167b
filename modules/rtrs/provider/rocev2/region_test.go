package rocev2

import (
	"bytes"
	"net"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// mapped is a region with memory that can be unmapped.
func (e *end) mapped(n int) ([]byte, verbs.MR) {
	e.t.Helper()
	mem := must(unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON))(e.t)
	return mem, must(e.pd.RegMR(mem, verbs.AccessRemoteWrite|verbs.AccessRemoteRead))(e.t)
}

// noFault fails the test when f touches memory that is not mapped.
func noFault(t *testing.T, f func()) {
	t.Helper()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			t.Fatalf("memory was used after Close: %v\n%s", r, debug.Stack())
		}
	}()
	f()
}

func TestC047_RequestWhoseAnswerIsLostIsRepeatedWithoutItsRegion(t *testing.T) {
	const size = 20_000
	for _, tt := range []struct {
		name  string
		op    verbs.Opcode
		close func(t *testing.T, c *end, mr verbs.MR)
	}{
		{"write, closed by the owner", verbs.OpWriteImm, func(t *testing.T, _ *end, mr verbs.MR) { closeRegion(t, mr) }},
		{"send, closed by the owner", verbs.OpSendImm, func(t *testing.T, _ *end, mr verbs.MR) { closeRegion(t, mr) }},
		{"write, closed by another goroutine", verbs.OpWriteImm, func(t *testing.T, c *end, mr verbs.MR) {
			done := make(chan struct{})
			go func() { closeRegion(t, mr); close(done) }()
			c.until("the close", func() bool {
				select {
				case <-done:
					return true
				default:
					return false
				}
			})
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := pairOf(t, Config{PathMTU: 1024})
			mem, mr := c.mapped(size)
			fill(mem, 3)
			want := bytes.Clone(mem)
			dst, rmr := s.region(size, verbs.AccessRemoteWrite)
			s.recv(verbs.RecvWR{ID: 2, Buf: dst, LKey: rmr.LKey()})
			badNetwork(c.dev, 1, 100, 0, 0)
			c.send(verbs.SendWR{ID: 1, Op: tt.op, Signaled: true, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(),
				SGEs: []verbs.SGE{{Buf: mem[:99], LKey: mr.LKey()}, {Buf: mem[99:], LKey: mr.LKey()}}})
			if wc := s.next(c); wc.ID != 2 || wc.Status != verbs.StatusOK || !bytes.Equal(dst, want) {
				t.Fatalf("the message came as %+v", wc)
			}
			tt.close(t, c, mr)
			if err := unix.Munmap(mem); err != nil {
				t.Fatal(err)
			}
			noFault(t, func() {
				c.until("a repetition", func() bool { return c.dev.Stats().Resent > 0 }, s)
				c.dev.faults.Store(nil)
				if wc := c.next(s); wc.ID != 1 || wc.Status != verbs.StatusOK {
					t.Errorf("the request completed as %+v", wc)
				}
			})
		})
	}
}

func closeRegion(t *testing.T, mr verbs.MR) {
	if err := mr.Close(); err != nil {
		t.Error(err)
	}
}

// A datagram that the socket did not take yet is not sent from a region that
// was closed: it leaves at once, or is lost.
func TestC047_FullSocketLetsGoOfARegion(t *testing.T) {
	c, s := pairOf(t, Config{})
	mem, mr := c.mapped(4096)
	dst, rmr := s.region(4096, verbs.AccessRemoteWrite)
	fill(mem, 1)
	want := bytes.Clone(mem)
	full := c.qp.out.fd
	c.qp.out.fd = blockedSocket(t)
	c.send(verbs.SendWR{ID: 1, Op: verbs.OpWrite, Signaled: true, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: mem, LKey: mr.LKey()}}})
	c.poll()
	if !c.qp.out.blocked {
		t.Fatal("the socket is not full")
	}
	closeRegion(t, mr)
	if err := unix.Munmap(mem); err != nil {
		t.Fatal(err)
	}
	c.qp.out.fd = full
	noFault(t, func() {
		if wc := c.next(s); wc.ID != 1 || wc.Status != verbs.StatusOK || !bytes.Equal(dst, want) {
			t.Errorf("the request completed as %+v", wc)
		}
	})
}

// blockedSocket refuses every message with EAGAIN: it is of TCP, and full.
func blockedSocket(t *testing.T) int {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	conn := must(net.Dial("tcp", l.Addr().String()))(t)
	t.Cleanup(func() { conn.Close() })
	f := must(conn.(*net.TCPConn).File())(t)
	t.Cleanup(func() { f.Close() })
	fd := int(f.Fd())
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := unix.Write(fd, make([]byte, 64<<10)); err == unix.EAGAIN {
			return fd
		} else if err != nil {
			t.Fatal(err)
		}
	}
}
