package iwarp

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// deafen makes the kernel drop everything that arrives for a socket, as a
// network does that has lost the way to it: nothing is acknowledged, nothing is
// refused.
func deafen(t *testing.T, fd int) {
	t.Helper()
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	prog := unix.SockFprog{Len: uint16(len(drop)), Filter: &drop[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
		t.Fatal(err)
	}
}

// patience is the PeerTimeout of these tests, and tooLong the limit for the
// end of a silent connection.
const (
	patience = time.Second
	tooLong  = 15 * time.Second
)

// endOf polls e, and lets others poll, until the connection with context ends.
func (e *end) endOf(context uint64, others ...*end) verbs.WC {
	e.t.Helper()
	for stop := time.Now().Add(tooLong); time.Now().Before(stop); time.Sleep(time.Millisecond) {
		for _, o := range others {
			o.poll()
		}
		e.poll()
		for _, wc := range e.wcs {
			if wc.Op == verbs.OpDisconnected && wc.QP == context {
				return wc
			}
		}
		e.wcs = e.wcs[:0]
	}
	e.t.Fatalf("a connection that is cut off is still up after %s", tooLong)
	return verbs.WC{}
}

func TestConnectionThatIsCutOffEnds(t *testing.T) {
	for _, tt := range []struct {
		name string
		cut  func(t *testing.T, c, s *end) // connection 2 of both
	}{
		{"with data on the way", func(t *testing.T, c, s *end) {
			deafen(t, c.q().fd)
			deafen(t, s.q().fd)
			c.send(verbs.SendWR{Op: verbs.OpWriteImm})
		}},
		{"while it is idle", func(t *testing.T, c, s *end) {
			deafen(t, c.q().fd)
			deafen(t, s.q().fd)
		}},
		{"by a peer that takes nothing", func(t *testing.T, c, s *end) {
			buf, mr := c.region(16<<20, 0)
			_, sink := s.region(len(buf), verbs.AccessRemoteWrite)
			c.send(verbs.SendWR{Op: verbs.OpWriteImm, RemoteAddr: sink.Addr(), RKey: sink.RKey(), SGEs: []verbs.SGE{{Buf: buf, LKey: mr.LKey()}}})
			// Its owner is stuck: nobody polls s.
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{PeerTimeout: patience}
			c, near := newEnd(t, cfg), newEnd(t, cfg)
			far := newEnd(t, cfg)
			l, lfar := listen(t, near.dev), listen(t, far.dev)
			healthy, other := more(t, l, c, near, 7)
			sick := &end{t: t, dev: c.dev, pd: c.pd, cq: c.cq}
			sick.qp, far.qp = more(t, lfar, sick, far, 2)
			c.poll()
			near.poll()
			far.poll()
			tt.cut(t, sick, far)
			start := time.Now()
			if wc := c.endOf(2, near); wc.Status != verbs.StatusRetryExceeded {
				t.Errorf("the connection ended with %+v", wc)
			}
			if n := c.dev.Stats().Silent; n != 1 {
				t.Errorf("%d silent connections were counted", n)
			}
			if took := time.Since(start); took < patience/2 {
				t.Errorf("it ended after %s already", took)
			}
			other.PostRecv([]verbs.RecvWR{{ID: 1}})
			if _, err := healthy.PostSend([]verbs.SendWR{{Op: verbs.OpWriteImm, Imm: 9}}); err != nil {
				t.Fatal(err)
			}
			if wc := near.next(c); wc.Imm != 9 {
				t.Errorf("its neighbour: %+v", wc)
			}
		})
	}
}

func TestConnectEndsWhenNobodyAnswers(t *testing.T) {
	t.Parallel()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false) // MPTCP sockets have no filters
	nl, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer nl.Close()
	raw, err := nl.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) { deafen(t, int(fd)) })
	c := newEnd(t, Config{PeerTimeout: patience})
	ctx, cancel := context.WithTimeout(t.Context(), tooLong)
	defer cancel()
	_, err = c.dev.Connect(ctx, c.qp, verbs.ConnectParams{Dst: addrPort(nl.Addr())})
	if !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("connect to a host that drops everything: %v", err)
	}
}
