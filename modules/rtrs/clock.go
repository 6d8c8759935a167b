package rtrs

import (
	"slices"
	"sync"
	"time"
)

// tickPeriod is the period of the one ticker that serves all sessions of the
// process, so that an idle process wakes no more than four times a second.
const tickPeriod = 250 * time.Millisecond

// clock calls its subscribers from one goroutine, which runs while there are
// any. A subscriber with short timers makes everybody's tick shorter.
type clock struct {
	mu      sync.Mutex
	subs    []*tickSub
	changed chan struct{} // closed when the period changed or the last one left

	ticking sync.Mutex // held during calls: they never overlap
	calls   []*tickSub // of the tick that runs
}

type tickSub struct {
	every time.Duration
	f     func(now time.Time)
}

var processClock clock

// subscribe calls f about every period, which is cut to 5..250 ms, until stop.
// f must not block. It may be called once more while stop returns.
func (c *clock) subscribe(every time.Duration, f func(now time.Time)) (stop func()) {
	s := &tickSub{min(max(every, 5*time.Millisecond), tickPeriod), f}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subs = append(c.subs, s)
	c.restart()
	return sync.OnceFunc(func() { c.remove(s) })
}

func (c *clock) remove(s *tickSub) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subs = slices.DeleteFunc(c.subs, func(o *tickSub) bool { return o == s })
	c.restart()
}

// restart ends the goroutine and starts one with the shortest period.
func (c *clock) restart() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
	if len(c.subs) == 0 {
		return
	}
	every := tickPeriod
	for _, s := range c.subs {
		every = min(every, s.every)
	}
	c.changed = make(chan struct{})
	go c.run(every, c.changed)
}

func (c *clock) run(every time.Duration, changed chan struct{}) {
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case now := <-t.C:
			c.tick(now)
		case <-changed:
			return
		}
	}
}

func (c *clock) tick(now time.Time) {
	c.ticking.Lock()
	defer c.ticking.Unlock()
	c.mu.Lock()
	c.calls = append(c.calls[:0], c.subs...)
	c.mu.Unlock()
	for _, s := range c.calls {
		s.f(now)
	}
	clear(c.calls) // a subscriber that has left is not kept
}

// tickFor is a period fine enough for the timers of t.
func tickFor(t Timing) time.Duration { return t.Heartbeat / 4 }
