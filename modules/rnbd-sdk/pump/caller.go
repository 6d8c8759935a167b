package pump

import (
	"runtime"
	"sync/atomic"
	"time"
)

// Work is a Caller's exchange with its source: requests and results. The
// methods are called by the goroutine that is in Wait.
type Work interface {
	// Publish makes submitted requests visible to the source.
	Publish()
	// Reap takes results, and returns their number.
	Reap() int
	// InFlight returns the number of requests without a result.
	InFlight() int
	// Large reports whether the last request was so large that most of its time is
	// spent copying.
	Large() bool
	// Sleep blocks until there may be results.
	Sleep()
}

// Caller is one goroutine's way to wait for the results of a source of the pump. At
// low depth it drives the pump itself, as callers.go explains.
type Caller struct {
	pump   *Pump
	source Source
	work   Work
	drive  func() bool // the method value driven, made once
	got    int         // results of the last drive
	prompt int         // drives in a row with results in time
	slow   bool        // the last result took longer than a drive lasts

	// Of a caller that the combiner serves.
	resting atomic.Bool
	bell    chan struct{}
}

const (
	// patience is how long a caller looks for results before it sleeps. A drive
	// without results lasts twice as long.
	patience = 100 * time.Microsecond
	// crowdedFor is the number of calls of Wait, after two callers have waited at
	// once, that do not borrow the pump.
	crowdedFor = 64
	// After promptDrives drives with results in time one may last longer, see Limit.
	promptDrives = 64
	// fewDriven is the number of requests up to which a caller drives with any
	// number of CPUs. With more of them two threads are faster than one.
	fewDriven = 4
)

// waiting is the number of callers in Wait, of all pumps of the process.
var waiting atomic.Int32

// mostSpinners is the number of callers that look for results before they sleep. More
// would take the CPUs from the pumps that they wait for.
var mostSpinners = int32(max(runtime.NumCPU()/2, 1))

// fewCPUs reports whether one more busy thread takes the CPU from one that has work.
var fewCPUs = runtime.NumCPU() <= 2

// NewCaller returns a caller for work that s does. s has been added to the pump, and
// calls Notify after it has published results. Close ends the caller. Control path.
func (p *Pump) NewCaller(s Source, w Work) *Caller {
	c := &Caller{pump: p, source: s, work: w, bell: make(chan struct{}, 1)}
	c.drive = c.driven
	p.Do(func() { p.callers.all = append(p.callers.all, c) })
	p.startCombiner()
	return c
}

// Close ends the caller. The caller must not be in Wait. Control path.
func (c *Caller) Close() {
	p := c.pump
	p.Call(func() {
		for i, o := range p.callers.all {
			if o == c {
				p.callers.all = append(p.callers.all[:i], p.callers.all[i+1:]...)
				return
			}
		}
	})
}

// Wait publishes the submitted requests and waits for results. It returns their
// number. 0 means that nothing is in flight.
//
// Of these ways to wait it takes the first that is possible: it drives the pump, it
// rests until the combiner has results, it looks for results until its patience
// ends, it sleeps.
func (c *Caller) Wait() int {
	p := c.pump
	everywhere := waiting.Add(1)
	defer waiting.Add(-1)
	alone := p.callers.enter()
	defer p.callers.waiting.Add(-1)
	for c.work.InFlight() > 0 {
		if everywhere <= pumps.Load() && c.work.InFlight() <= c.mostDriven(alone) && c.tryDrive(alone) {
			return c.got
		}
		c.work.Publish()
		if !alone && !c.work.Large() && p.combines() {
			if n := c.rest(); n > 0 {
				return n
			}
			continue
		}
		p.Recall() // the thread does the work
		if everywhere <= mostSpinners {
			if n := c.spin(); n > 0 {
				c.slow = false
				return n
			}
		}
		c.work.Sleep()
		if n := c.work.Reap(); n > 0 {
			return n
		}
	}
	return 0
}

// enter counts a caller in Wait, and reports whether it may borrow the pump. It may not
// while there are others, since their results would be stranded when it returns.
func (c *callers) enter() (alone bool) {
	if c.waiting.Add(1) > 1 {
		c.crowded.Store(crowdedFor)
		return false
	}
	if c.crowded.Load() > 0 {
		c.crowded.Add(-1)
		return false
	}
	return true
}

// mostDriven returns the largest number of requests in flight with which the caller
// drives: any number if it is alone and one more busy thread would take its CPU.
func (c *Caller) mostDriven(alone bool) int {
	if alone && fewCPUs && !c.work.Large() && !c.slow {
		return 1 << 30
	}
	return fewDriven
}

// tryDrive drives until there are results, or a drive has lasted too long, and
// reports whether there are any. borrow: the pump may be awake.
func (c *Caller) tryDrive(borrow bool) bool {
	c.got = 0
	if borrow {
		return c.pump.borrow(c.drive) && c.got > 0
	}
	return c.pump.tryDrive(c.drive, false) && c.got > 0
}

// driven does the pump's work until there are results. It publishes the submitted
// requests itself: the source is not armed here and need not be woken. It polls the
// source first, so that requests are sent before anything is received. It returns
// false, to give the pump back, if the results are slow or other callers wait.
func (c *Caller) driven() (keep bool) {
	p := c.pump
	c.work.Publish()
	c.source.Poll()
	limit := NewLimit(p.Now(), 2*patience, c.prompt >= promptDrives)
	for {
		p.turn()
		if c.got = c.work.Reap(); c.got > 0 || limit.Spent() {
			break
		}
		yield()
	}
	c.slow = c.got == 0
	if c.prompt++; c.slow || limit.Late() {
		c.prompt = 0
	}
	return !c.slow && p.callers.waiting.Load() <= 1
}

// spin looks for results of a pump that is awake.
func (c *Caller) spin() int {
	for start := time.Now(); time.Since(start) < patience; yield() {
		if n := c.work.Reap(); n > 0 {
			return n
		}
	}
	return 0
}
