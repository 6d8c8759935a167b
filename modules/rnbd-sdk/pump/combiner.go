package pump

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// With two or more callers in Wait none of them drives the pump: the driver
// would return with its own results and strand the others'. To wake each by a
// system call would cost more than its request. One goroutine, the combiner, drives
// for all. It does the pump's work until there are results and wakes each of their
// callers by a channel. It lets them run on its own thread before it drives again,
// so their next requests are sent together.
type combiner struct {
	start   sync.Once
	called  chan struct{} // wakes the combiner
	active  atomic.Bool   // it drives, or is about to
	skip    atomic.Int32  // calls of Wait left that do without it, after it found no results
	resting atomic.Int32  // callers that sleep until they are notified

	// Of the combiner.
	serve func() bool // the method value combine, made once
	vain  bool        // it has found no results for 2*patience
	since int64       // when it found the last, by the pump's clock; 0: none yet
	// Of the owner.
	notified int // callers that were woken in this drive
}

const (
	// combineFrom is the number of callers in Wait from which on the combiner
	// serves them.
	combineFrom = 2
	// skipFor is the number of calls of Wait that do without a combiner that found no
	// results.
	skipFor = 256
)

// startCombiner starts the combiner with the first caller. It ends with the pump.
func (p *Pump) startCombiner() {
	p.callers.start.Do(func() {
		p.callers.called = make(chan struct{}, 1)
		p.callers.serve = p.combine
		go p.runCombiner()
	})
}

// combines reports whether a caller leaves the work to the combiner.
func (p *Pump) combines() bool {
	c := &p.callers.combiner
	if p.callers.waiting.Load() < combineFrom || !p.lends() {
		return false
	}
	if c.skip.Load() > 0 {
		c.skip.Add(-1)
		return false
	}
	return true
}

// rest waits for results that the combiner brings, and returns their number.
func (c *Caller) rest() int {
	b := &c.pump.callers.combiner
	c.resting.Store(true)
	if n := c.work.Reap(); n > 0 {
		if !c.resting.CompareAndSwap(true, false) {
			<-c.bell // Notify has rung it, or is about to
		}
		return n
	}
	b.resting.Add(1)
	if !b.active.Load() && b.active.CompareAndSwap(false, true) {
		b.called <- struct{}{}
	}
	<-c.bell
	b.resting.Add(-1)
	return c.work.Reap()
}

// Notify wakes the caller if it rests. The source calls it after it has published
// results. Owner only.
func (c *Caller) Notify() {
	if c.resting.Load() && c.resting.Swap(false) {
		c.pump.callers.notified++
		c.bell <- struct{}{}
	}
}

func (p *Pump) runCombiner() {
	c := &p.callers.combiner
	for {
		select {
		case <-c.called:
		case <-p.done:
			return
		}
		for c.vain, c.since = false, 0; !c.vain && p.borrow(c.serve); {
			runtime.Gosched()
		}
		if c.vain && c.resting.Load() > 0 {
			c.skip.Store(skipFor)
		}
		c.active.Store(false)
	}
}

// combine is the combiner's drive. It does the pump's work until callers were woken,
// or none rests. If there were no results for 2*patience, it returns false: the pump
// is given back, and its thread wakes the callers.
func (p *Pump) combine() (keep bool) {
	c := &p.callers.combiner
	c.notified = 0
	for _, o := range p.callers.all { // so that the next turn sends their requests
		o.source.Poll()
	}
	for ; ; yield() {
		p.turn()
		now := p.Now()
		if c.notified > 0 || c.since == 0 {
			c.since = now
		}
		if now-c.since > int64(2*patience) {
			c.vain = true
			return false
		}
		if c.notified > 0 || c.resting.Load() == 0 {
			return true
		}
	}
}
