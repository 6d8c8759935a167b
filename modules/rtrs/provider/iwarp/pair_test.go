package iwarp

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// end is one side of a connection, polled by the test.
type end struct {
	t   testing.TB
	dev *Device
	pd  verbs.PD
	cq  verbs.CQ
	qp  verbs.QP
	wcs []verbs.WC // seen and not yet asked for
	buf [64]verbs.WC
}

func quiet(cfg Config) Config {
	cfg.Logger = slog.New(slog.DiscardHandler)
	return cfg
}

func openDevice(t testing.TB, cfg Config) *Device {
	t.Helper()
	d, err := Open(quiet(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d.(*Device)
}

func newEnd(t testing.TB, cfg Config) *end {
	t.Helper()
	return newEndOn(t, openDevice(t, cfg))
}

func newEndOn(t testing.TB, d *Device) *end {
	t.Helper()
	e := &end{t: t, dev: d}
	var err error
	if e.pd, err = d.AllocPD(); err != nil {
		t.Fatal(err)
	}
	if e.cq, err = d.CreateCQ(64); err != nil {
		t.Fatal(err)
	}
	e.qp = e.newQP(1)
	t.Cleanup(func() {
		e.qp.Destroy()
		e.poll()
		e.cq.Close()
	})
	return e
}

func (e *end) newQP(context uint64) verbs.QP {
	e.t.Helper()
	q, err := e.dev.CreateQP(e.pd, verbs.QPConfig{CQ: e.cq, Context: context, SendQueue: 64, RecvQueue: 64, MaxSGE: 4})
	if err != nil {
		e.t.Fatal(err)
	}
	return q
}

func (e *end) region(n int, access verbs.Access) ([]byte, verbs.MR) {
	e.t.Helper()
	buf := make([]byte, n)
	mr, err := e.pd.RegMR(buf, access)
	if err != nil {
		e.t.Fatal(err)
	}
	return buf, mr
}

func (e *end) poll() int {
	n := e.cq.Poll(e.buf[:])
	e.wcs = append(e.wcs, e.buf[:n]...)
	return n
}

func (e *end) send(wrs ...verbs.SendWR) {
	e.t.Helper()
	if n, err := e.qp.PostSend(wrs); err != nil {
		e.t.Fatalf("PostSend took %d of %d: %v", n, len(wrs), err)
	}
}

func (e *end) recv(wrs ...verbs.RecvWR) {
	e.t.Helper()
	if n, err := e.qp.PostRecv(wrs); err != nil {
		e.t.Fatalf("PostRecv took %d of %d: %v", n, len(wrs), err)
	}
}

const testLimit = 5 * time.Second

// next polls e, and the others, until e has a completion.
func (e *end) next(others ...*end) verbs.WC {
	e.t.Helper()
	for stop := time.Now().Add(testLimit); len(e.wcs) == 0; {
		idle := e.poll() == 0
		for _, o := range others {
			idle = o.poll() == 0 && idle
		}
		if time.Now().After(stop) {
			e.t.Fatal("no completion came")
		}
		if idle {
			time.Sleep(20 * time.Microsecond)
		}
	}
	wc := e.wcs[0]
	e.wcs = e.wcs[1:]
	return wc
}

// join connects c to s.
func join(t testing.TB, c, s *end, at string) {
	t.Helper()
	l, err := s.dev.Listen(netip.MustParseAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept()
		if err == nil {
			err = r.Accept(s.qp, []byte("answer"))
		}
		accepted <- err
	}()
	private, err := c.dev.Connect(context.Background(), c.qp, verbs.ConnectParams{Dst: l.Addr(), Private: []byte("question")})
	if err != nil {
		t.Fatal(err)
	}
	if string(private) != "answer" {
		t.Errorf("private data %q", private)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
}

func pairOf(t testing.TB, cfg Config) (c, s *end) {
	t.Helper()
	c, s = newEnd(t, cfg), newEnd(t, cfg)
	join(t, c, s, "127.0.0.1:0")
	return c, s
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i)*7 + byte(i>>8) + seed
	}
}

func TestWriteImmReachesThePeer(t *testing.T) {
	for _, size := range []int{0, 1, 7, 512, 4096, 65472, 65473, 131072, 1 << 20, 3<<20 + 5} {
		c, s := pairOf(t, DefaultConfig())
		src, lmr := c.region(size+1, 0)
		dst, rmr := s.region(size+1, verbs.AccessRemoteWrite)
		fill(src, byte(size))
		s.recv(verbs.RecvWR{ID: 9})
		c.send(verbs.SendWR{ID: 5, Op: verbs.OpWriteImm, Signaled: true, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), Imm: 0xdeadbeef,
			SGEs: []verbs.SGE{{Buf: src[:size/2], LKey: lmr.LKey()}, {Buf: src[size/2 : size], LKey: lmr.LKey()}}})
		got := s.next(c)
		want := verbs.WC{ID: 9, QP: 1, Op: verbs.OpRecvImm, HasImm: true, Imm: 0xdeadbeef, ByteLen: uint32(size)}
		if got != want {
			t.Errorf("size %d: %+v, want %+v", size, got, want)
		}
		if !bytes.Equal(src[:size], dst[:size]) {
			t.Errorf("size %d: data differ", size)
		}
		if wc := c.next(s); wc.ID != 5 || wc.Status != verbs.StatusOK || wc.Op != verbs.OpWriteImm {
			t.Errorf("size %d: send completion %+v", size, wc)
		}
	}
}

func TestSendAndReadReachThePeer(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	src, lmr := c.region(200000, verbs.AccessRemoteRead)
	dst, rmr := s.region(200000, verbs.AccessRemoteWrite)
	fill(src, 3)
	s.recv(verbs.RecvWR{ID: 1, Buf: dst[:100000], LKey: rmr.LKey()}, verbs.RecvWR{ID: 2, Buf: dst[100000:], LKey: rmr.LKey()})
	c.send(
		verbs.SendWR{ID: 1, Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: src[:99999], LKey: lmr.LKey()}}},
		verbs.SendWR{ID: 2, Op: verbs.OpSendImm, Imm: 77, SGEs: []verbs.SGE{{Buf: src[:8], LKey: lmr.LKey()}}})
	if wc := s.next(c); wc.ID != 1 || wc.ByteLen != 99999 || wc.HasImm || !bytes.Equal(dst[:99999], src[:99999]) {
		t.Errorf("send: %+v", wc)
	}
	if wc := s.next(c); wc.ID != 2 || wc.ByteLen != 8 || !wc.HasImm || wc.Imm != 77 || wc.Op != verbs.OpRecv {
		t.Errorf("send with immediate: %+v", wc)
	}
	clear(dst)
	s.send(verbs.SendWR{ID: 3, Op: verbs.OpRead, Signaled: true, RemoteAddr: lmr.Addr(), RKey: lmr.RKey(),
		SGEs: []verbs.SGE{{Buf: dst[:3], LKey: rmr.LKey()}, {Buf: dst[3:150000], LKey: rmr.LKey()}, {Buf: dst[150000:], LKey: rmr.LKey()}}})
	if wc := s.next(c); wc.ID != 3 || wc.Status != verbs.StatusOK || !bytes.Equal(dst, src) {
		t.Errorf("read: %+v, equal %v", wc, bytes.Equal(dst, src))
	}
}

func TestDisconnectFlushesBothEnds(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	c.recv(verbs.RecvWR{ID: 1})
	s.recv(verbs.RecvWR{ID: 2}, verbs.RecvWR{ID: 3})
	c.poll()
	s.poll()
	c.qp.Disconnect()
	for _, want := range []verbs.WC{{ID: 1, QP: 1, Op: verbs.OpRecv, Status: verbs.StatusFlushed}, {QP: 1, Op: verbs.OpDisconnected}} {
		if got := c.next(s); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	for _, want := range []verbs.WC{{ID: 2, QP: 1, Op: verbs.OpRecv, Status: verbs.StatusFlushed}, {ID: 3, QP: 1, Op: verbs.OpRecv, Status: verbs.StatusFlushed}, {QP: 1, Op: verbs.OpDisconnected}} {
		if got := s.next(c); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}
