package rtrs

import (
	"sync/atomic"
	"testing"
	"time"
)

func TestClock_CallsEverySubscriberWhileThereAreAny(t *testing.T) {
	var c clock
	var fast, slow atomic.Int64
	var busy atomic.Int32
	count := func(n *atomic.Int64) func(time.Time) {
		return func(time.Time) {
			if busy.Add(1) != 1 {
				t.Error("two calls at a time")
			}
			n.Add(1)
			busy.Add(-1)
		}
	}
	stopSlow := c.subscribe(time.Hour, count(&slow))
	stopFast := c.subscribe(5*time.Millisecond, count(&fast))
	waitFor(t, "five ticks", func() bool { return fast.Load() >= 5 && slow.Load() >= 5 })
	stopFast()
	stopFast()
	before := fast.Load()
	waitFor(t, "a tick of the slow one alone", func() bool { return slow.Load() > fast.Load()+1 })
	if d := fast.Load() - before; d > 1 {
		t.Errorf("%d calls after stop", d)
	}
	stopSlow()
	if c.changed != nil {
		t.Error("the ticker runs without subscribers")
	}
}

func TestClock_TickAllocatesNothing(t *testing.T) {
	var c clock
	calls := 0
	for range 3 {
		c.subs = append(c.subs, &tickSub{f: func(time.Time) { calls++ }})
	}
	now := time.Now()
	if n := testing.AllocsPerRun(100, func() { c.tick(now) }); n != 0 {
		t.Errorf("%v allocations per tick", n)
	}
	if calls != 3*101 {
		t.Errorf("%d calls, want %d", calls, 3*101)
	}
}

// waitFor polls cond for at most 10 s.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}
