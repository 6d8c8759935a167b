package rocev2

import (
	"context"
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
	qp  *qp
	wcs []verbs.WC // seen and not yet asked for
	buf [64]verbs.WC
}

func newEnd(t testing.TB, cfg Config, addr netip.Addr) *end {
	t.Helper()
	cfg.Addrs = []netip.Addr{addr}
	return newEndOn(t, openDevice(t, cfg))
}

func newEndOn(t testing.TB, d *Device) *end {
	t.Helper()
	e := &end{t: t, dev: d}
	e.pd = must(d.AllocPD())(t)
	e.cq = must(d.CreateCQ(64))(t)
	e.qp = e.newQP(1)
	t.Cleanup(func() {
		e.qp.Destroy()
		e.poll()
		if err := e.cq.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

const testDepth = 64

func (e *end) newQP(context uint64) *qp {
	e.t.Helper()
	return must(e.dev.CreateQP(e.pd, verbs.QPConfig{CQ: e.cq, Context: context, SendQueue: testDepth, RecvQueue: testDepth, MaxSGE: 4}))(e.t).(*qp)
}

func (e *end) region(n int, access verbs.Access) ([]byte, verbs.MR) {
	e.t.Helper()
	buf := make([]byte, n)
	return buf, must(e.pd.RegMR(buf, access))(e.t)
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

// until polls e, and the others, until cond holds.
func (e *end) until(what string, cond func() bool, others ...*end) {
	e.t.Helper()
	e.within(testLimit, what, cond, others...)
}

// within is until, with a limit for slow conditions.
func (e *end) within(limit time.Duration, what string, cond func() bool, others ...*end) {
	e.t.Helper()
	for stop := time.Now().Add(limit); !cond(); {
		idle := e.poll() == 0
		for _, o := range others {
			idle = o.poll() == 0 && idle
		}
		if time.Now().After(stop) {
			e.t.Fatalf("waited in vain for %s; completions %+v", what, e.wcs)
		}
		if idle {
			time.Sleep(20 * time.Microsecond)
		}
	}
}

// next returns the next completion of e.
func (e *end) next(others ...*end) verbs.WC {
	e.t.Helper()
	e.until("a completion", func() bool { return len(e.wcs) > 0 }, others...)
	wc := e.wcs[0]
	e.wcs = e.wcs[1:]
	return wc
}

// join connects c to s.
func join(t testing.TB, c, s *end) {
	t.Helper()
	l := must(s.dev.Listen(netip.AddrPortFrom(s.dev.cfg.Addrs[0], 0)))(t)
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept()
		if err == nil {
			err = r.Accept(s.qp, []byte("answer"))
		}
		accepted <- err
	}()
	private := must(c.dev.Connect(context.Background(), c.qp, verbs.ConnectParams{Dst: l.Addr(), Private: []byte("question")}))(t)
	if string(private[:6]) != "answer" {
		t.Errorf("private data %q", private)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	c.poll()
	s.poll()
}

func pairOf(t testing.TB, cfg Config) (c, s *end) {
	t.Helper()
	c, s = newEnd(t, cfg, addrA), newEnd(t, cfg, addrB)
	join(t, c, s)
	return c, s
}

func fill(b []byte, seed int) {
	for i := range b {
		b[i] = byte(i)*7 + byte(i>>8) + byte(seed)
	}
}
