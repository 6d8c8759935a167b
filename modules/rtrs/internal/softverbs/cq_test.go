package softverbs

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// conn is the least that a provider has.
type conn struct {
	QP
	name    string
	expired []int64
}

func (c *conn) Expire(now int64) { c.expired = append(c.expired, now) }

type queue struct{ CQ[*conn] }

func (q *queue) Release(*Region) {}

func newQueue(t *testing.T) *queue {
	t.Helper()
	q := &queue{}
	q.Init()
	if err := q.Open(4); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(q.Free)
	return q
}

// readable waits for the descriptor of q, for at most wait.
func (q *queue) readable(wait time.Duration) bool {
	fds := []unix.PollFd{{Fd: int32(q.FD()), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, int(wait.Milliseconds()))
		if err != unix.EINTR {
			return n > 0
		}
	}
}

func TestPending_OwnerSeesEachQueuePairOnce(t *testing.T) {
	q := newQueue(t)
	a, b := &conn{name: "a"}, &conn{name: "b"}
	called := 0
	if q.Asked() || !q.SetAlarm() || q.readable(0) {
		t.Fatal("a new queue has something to do")
	}
	q.Submit(a)
	q.Submit(b)
	q.Submit(a)
	q.Call(func() { called++ })
	if !q.Asked() || q.SetAlarm() || !q.readable(0) {
		t.Error("the owner is not woken")
	}
	if got := q.Take(); !slices.Equal(got, []*conn{a, b}) || called != 1 {
		t.Errorf("%d queue pairs, %d calls", len(got), called)
	}
	if q.Asked() || len(q.Take()) != 0 || called != 1 {
		t.Error("what was taken is there again")
	}
	q.Submit(a)
	if got := q.Take(); !slices.Equal(got, []*conn{a}) {
		t.Errorf("submitted again: %d queue pairs", len(got))
	}
}

// Whoever submits after a change is seen, or finds that the owner has not
// looked yet.
func TestPending_NothingIsLost(t *testing.T) {
	q := newQueue(t)
	c := &conn{}
	const rounds = 2000
	var wg sync.WaitGroup
	wg.Go(func() {
		for range rounds {
			c.AskDestroy()
			q.Submit(c)
		}
		q.Call(func() { c.AskDisconnect() })
	})
	for stop := time.Now().Add(time.Minute); !c.Disconnecting(); q.Take() {
		if time.Now().After(stop) {
			t.Fatal("the last call did not come")
		}
	}
	wg.Wait()
	if q.Asked() {
		t.Error("something is left")
	}
}

func TestPending_ClosedListsNothing(t *testing.T) {
	q := newQueue(t)
	failure := errors.New("busy")
	if err := q.Shut(func() error { return failure }); err != failure || q.Closed() {
		t.Errorf("%v, closed %t", err, q.Closed())
	}
	if err := q.Close(); err != nil || !q.Closed() {
		t.Errorf("%v, closed %t", err, q.Closed())
	}
	q.Submit(&conn{})
	q.Call(func() { t.Error("called") })
	if len(q.Take()) != 0 {
		t.Error("a closed queue lists queue pairs")
	}
	if err := q.Close(); err == nil {
		t.Error("closed twice")
	}
}

func TestReady_ServesInTurn(t *testing.T) {
	var r Ready[string]
	marks := map[string]*bool{"a": new(bool), "b": new(bool), "c": new(bool), "d": new(bool)}
	add := func(names ...string) {
		for _, n := range names {
			r.Add(n, marks[n])
		}
	}
	// round serves at most n connections; those in busy stay.
	round := func(n int, busy string) (served string) {
		for ; n > 0 && r.More(); n-- {
			name := r.Next()
			served += name
			if name == "c" {
				add("d")
			}
			r.Keep(marks[name], slices.Contains([]byte(busy), name[0]))
		}
		r.EndRound()
		return served
	}
	add("a", "b", "a", "c")
	for i, step := range []struct {
		room         int
		busy, served string
	}{
		{2, "a", "ab"}, // c is left: it comes first
		{3, "c", "cad"},
		{5, "", "cd"}, // d was added while c was served
		{5, "", ""},
	} {
		if got := round(step.room, step.busy); got != step.served {
			t.Errorf("round %d served %q, want %q", i, got, step.served)
		}
	}
	for name, m := range marks {
		if *m {
			t.Errorf("%s is still marked", name)
		}
	}
}

func TestCQ_DeadlinesExpireOnce(t *testing.T) {
	q := newQueue(t)
	dom := newDomain()
	soon, late, never := &conn{}, &conn{}, &conn{}
	for _, c := range []*conn{soon, late, never} {
		c.Domain = dom
		q.Attach(c, q)
	}
	now := q.Now()
	q.SetDeadline(&late.QP, now+int64(time.Hour))
	q.SetDeadline(&soon.QP, now+int64(time.Millisecond))
	q.SetDeadline(&never.QP, 0)
	if q.Due(now) || !q.Due(now+int64(time.Millisecond)) {
		t.Error("due at the wrong time")
	}
	if !q.SetAlarm() || !q.readable(time.Minute) {
		t.Fatal("the owner is not woken at the deadline")
	}
	now = q.Now()
	q.Expire(now)
	q.Expire(q.Now())
	if !slices.Equal(soon.expired, []int64{now}) || len(late.expired)+len(never.expired) != 0 {
		t.Errorf("expired: %v, %v, %v", soon.expired, late.expired, never.expired)
	}
	if !q.Timed() || q.Due(now) {
		t.Error("the later deadline was forgotten")
	}
}

func TestCQ_SlotsAreUsedAgain(t *testing.T) {
	q := newQueue(t)
	dom := newDomain()
	a, b, c := &conn{}, &conn{}, &conn{}
	for _, x := range []*conn{a, b, c} {
		x.Domain = dom
	}
	q.Attach(a, q)
	q.Attach(b, q)
	if err := q.Close(); err == nil {
		t.Error("closed with connections attached")
	}
	if !q.Detach(a, q) || q.Detach(a, q) {
		t.Error("a connection is detached exactly once")
	}
	q.Attach(c, q)
	if c.Slot != 0 || b.Slot != 1 || q.Count != 2 || q.Slots[0] != c {
		t.Errorf("slots %d and %d, %d connections", c.Slot, b.Slot, q.Count)
	}
	q.Detach(c, q)
	q.Detach(b, q)
	if len(q.Slots) != 0 || q.Count != 0 || dom.Used() {
		t.Errorf("%d slots, %d connections are left", len(q.Slots), q.Count)
	}
}
