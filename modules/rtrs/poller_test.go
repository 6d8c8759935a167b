package rtrs

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func TestPoller_DoWakesASleepingOwnerAndKeepsOrder(t *testing.T) {
	p := startPollers(t, 1)[0]
	for range 50 {
		var got []int
		done := make(chan struct{})
		time.Sleep(200 * time.Microsecond) // now it spins, now it sleeps
		for i := range 10 {
			p.Do(func() { got = append(got, i) })
		}
		p.Do(func() { close(done) })
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Fatal("the owner sleeps on")
		}
		for i, v := range got {
			if i != v || len(got) != 10 {
				t.Fatalf("order %v", got)
			}
		}
	}
}

func TestPoller_DoFromManyGoroutines(t *testing.T) {
	p := startPollers(t, 1)[0]
	n := 0
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				if err := p.Call(t.Context(), func() { n++ }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if err := p.Call(t.Context(), func() {
		if n != 4000 {
			t.Errorf("%d calls", n)
		}
	}); err != nil {
		t.Error(err)
	}
}

func TestPoller_CallGivesUpWithItsContext(t *testing.T) {
	p, err := NewPoller(0) // nobody polls it
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := p.Call(ctx, func() {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Call: %v", err)
	}
	if p.Arm() {
		t.Error("Arm sleeps with a full mailbox")
	}
	if n := p.Poll(); n != 1 {
		t.Errorf("Poll handled %d events, want 1", n)
	}
	if n := p.Poll(); n != 0 {
		t.Errorf("idle Poll handled %d events", n)
	}
	if !p.Arm() {
		t.Error("Arm does not sleep")
	}
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Error(err)
	}
}

func TestPoller_SlotsAreReusedWithANewGeneration(t *testing.T) {
	dev := loopback.New().Device("d")
	pd, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	p, err := NewPoller(0)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	for range 100 {
		var conns []*conn
		for range 20 { // more than the first table has
			c, err := newConn(p, dev, pd, nil, connConfig{sendQueue: 16, recvQueue: 16, maxSGE: 1, interval: 4})
			if err != nil {
				t.Fatal(err)
			}
			if seen[c.ctx] || lookupConn(*p.conns.Load(), c.ctx) != c {
				t.Fatalf("context %#x", c.ctx)
			}
			seen[c.ctx] = true
			conns = append(conns, c)
		}
		for _, c := range conns {
			c.destroyQP()
			if lookupConn(*p.conns.Load(), c.ctx) != nil {
				t.Fatalf("context %#x still names a connection", c.ctx)
			}
		}
	}
	if n := len(*p.conns.Load()); n > 64 {
		t.Errorf("the table has %d slots for 20 connections", n)
	}
	if n := len(*p.cqs.Load()); n != 1 || (*p.cqs.Load())[0].used != 0 {
		t.Errorf("%d completion queues, %d entries in use", n, (*p.cqs.Load())[0].used)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestPoller_ConnectionsThatDoNotFitShareAnotherQueue(t *testing.T) {
	dev := loopback.New().Device("d")
	p, err := NewPoller(0)
	if err != nil {
		t.Fatal(err)
	}
	for _, entries := range []int{cqEntries / 2, cqEntries / 2, 1, 2 * cqEntries, 5} {
		if _, err := p.reserveCQ(dev, entries); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(*p.cqs.Load()); n != 3 {
		t.Errorf("%d completion queues, want 3", n)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := p.reserveCQ(dev, 1); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// A device whose addresses another process is to use gives up its queues.
func TestPoller_Release(t *testing.T) {
	net := loopback.New()
	dev, other := net.Device("d"), net.Device("e")
	p, err := NewPoller(0)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	idle, err := p.reserveCQ(dev, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.reserveCQ(other, 1); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{2, 1} { // in use, then not
		if err := p.Release(t.Context(), dev); err != nil {
			t.Fatal(err)
		}
		if n := len(*p.cqs.Load()); n != want {
			t.Errorf("%d completion queues, want %d", n, want)
		}
		p.releaseCQ(idle, 1)
	}
}

// Queues that were needed for a while only are closed; the last of a device stays.
func TestPoller_QueuesThatAreNotNeededAreClosed(t *testing.T) {
	net := loopback.New()
	devs := []verbs.Device{net.Device("d"), net.Device("e")}
	p, err := NewPoller(0)
	if err != nil {
		t.Fatal(err)
	}
	reserve := func(dev verbs.Device, n int) *pollerCQ {
		t.Helper()
		q, err := p.reserveCQ(dev, n)
		if err != nil {
			t.Fatal(err)
		}
		return q
	}
	files := openDescriptors(t)
	for range 100 {
		var qs []*pollerCQ
		for i := range 6 {
			qs = append(qs, reserve(devs[i%2], cqEntries))
		}
		for _, q := range qs {
			p.releaseCQ(q, cqEntries)
		}
		p.Poll()
	}
	if n := len(*p.cqs.Load()); n != 2 {
		t.Errorf("%d completion queues are left, want one of each device", n)
	}
	if n := openDescriptors(t) - files; n > 2 {
		t.Errorf("%d descriptors more than before", n)
	}
	first := reserve(devs[0], cqEntries)
	second := reserve(devs[0], cqEntries)
	p.releaseCQ(second, cqEntries)
	if again := reserve(devs[0], 1); again != second {
		t.Error("a queue that is still there was not taken")
	}
	p.Poll()
	if n := len(*p.cqs.Load()); n != 3 {
		t.Errorf("%d completion queues: one was closed although it was needed again", n)
	}
	p.releaseCQ(first, cqEntries)
	p.releaseCQ(second, 1)
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	p.Poll() // the work left to the owner is too late, and harmless
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// postRecorder is a queue pair that only remembers.
type postRecorder struct {
	verbs.QP
	wrs []verbs.SendWR
}

func (q *postRecorder) PostSend(wrs []verbs.SendWR) (int, error) {
	q.wrs = append(q.wrs, wrs...)
	return len(wrs), nil
}

type creditHandler struct {
	connHandler
	calls int
}

func (h *creditHandler) connCredit() { h.calls++ }

// Signals come often enough that the queue never gets stuck, and no oftener
// than once per interval.
func TestConn_SelectiveSignalling(t *testing.T) {
	for _, size := range []struct{ depth, interval, chain uint32 }{{16, 4, 4}, {41, 8, 5}, {2561, 512, 4}, {1026, 256, 1}} {
		q, h := &postRecorder{}, &creditHandler{}
		c := &conn{qp: q, h: h, depth: size.depth, interval: size.interval}
		c.posted, c.acked, c.signaled = ^uint32(0)-10, ^uint32(0)-10, ^uint32(0)-10 // about to wrap
		signals, posts := 0, 0
		for range 1000 {
			chain := make([]verbs.SendWR, size.chain)
			if err := c.postChain(chain); err == nil {
				posts++
				continue
			} else if err != errNoCredit {
				t.Fatal(err)
			}
			last := -1
			for i, wr := range q.wrs {
				if wr.Signaled {
					signals++
					last = i
					c.onCompletion(&verbs.WC{ID: wr.ID, Op: wr.Op})
				}
			}
			if last < 0 {
				t.Fatalf("%+v: the queue is full and nothing is signalled", size)
			}
			q.wrs = q.wrs[last+1:]
		}
		if h.calls != signals {
			t.Errorf("%d credits for %d signals", h.calls, signals)
		}
		if most := posts*int(size.chain)/int(size.interval) + 1; signals > most {
			t.Errorf("%+v: %d signals for %d requests", size, signals, posts*int(size.chain))
		}
	}
}

// fullCQ has so many completions.
type fullCQ struct {
	verbs.CQ
	left int
}

func (c *fullCQ) Poll(wcs []verbs.WC) int {
	n := min(len(wcs), c.left)
	c.left -= n
	return n
}

func TestPollerCQ_TakesFewFirst(t *testing.T) {
	for _, c := range []struct {
		there int
		want  []int
	}{
		{1, []int{1}},
		{8, []int{8}},
		{16, []int{8, 8}},
		{27, []int{8, 16, 3}},
		{100, []int{8, 16, 32, 32, 12}},
	} {
		cq := &fullCQ{}
		q := pollerCQ{CQ: cq, size: fewPolled}
		for range 2 { // the second time after a Poll that found none
			cq.left = c.there
			var got []int
			for {
				n := q.pollCQ(new([pollBatch]verbs.WC))
				if n == 0 {
					break
				}
				got = append(got, n)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("of %d: %v, want %v", c.there, got, c.want)
			}
		}
	}
}
