package client

import (
	"runtime"
	"sync/atomic"
)

// Many callers who wait on one pump are a crowd. None of them may borrow it, since
// he would leave with his answer while the others' lie, and to wake each by a
// system call costs more than his request. So an attendant, a goroutine, borrows
// the pump for all: he does its work until answers have come, wakes those whose
// they are, and lets them run on his thread before he looks again. What they
// submit then is sent together.
type crowd struct {
	called  chan struct{} // wakes the attendant
	here    atomic.Bool   // he attends, or is about to
	snub    atomic.Int32  // how many callers rest without him, after he looked in vain
	resting atomic.Int32  // callers who sleep until they are roused

	// Of the attendant.
	serve func() // serveCrowd, made once
	vain  bool   // he has looked in vain
	since int64  // when an answer came last, by the pump's clock; 0: none yet
	// Of the pump's owner.
	roused int // callers, in this turn
}

// rester is a caller who sleeps until his source has answers.
type rester struct {
	asleep atomic.Bool
	bell   chan struct{}
}

const (
	// crowdMin callers on a pump are a crowd.
	crowdMin = 3
	// snubFor is how many callers do without an attendant who looked in vain.
	snubFor = 256
)

// attended tells whether a caller leaves the pump's work to the attendant.
func (p *pumpShare) attended() bool {
	if p.waiters.Load() < crowdMin || !p.pump.Lends() {
		return false
	}
	if p.crowd.snub.Load() > 0 {
		p.crowd.snub.Add(-1)
		return false
	}
	return true
}

// callAttendant makes the attendant come, if he is not here.
func (p *pumpShare) callAttendant() {
	if !p.crowd.here.Load() && p.crowd.here.CompareAndSwap(false, true) {
		p.crowd.called <- struct{}{}
	}
}

// attend is the attendant's life, which ends with the client's.
func (p *pumpShare) attend() {
	c := &p.crowd
	for {
		select {
		case <-c.called:
		case <-p.client.life.Done():
			return
		}
		for c.vain, c.since = false, 0; !c.vain && p.pump.Drive(c.serve); {
			runtime.Gosched()
		}
		if c.vain && c.resting.Load() > 0 {
			c.snub.Store(snubFor)
		}
		c.here.Store(false)
	}
}

// serveCrowd runs as the pump: its work until there are answers, nobody is left
// who waits for one, or there has been none for long.
func (p *pumpShare) serveCrowd() {
	c := &p.crowd
	c.roused = 0
	p.takeFromCrowd()
	for ; ; yield() {
		p.pump.Turn()
		now := p.pump.Now()
		if c.roused > 0 || c.since == 0 {
			c.since = now
		}
		if now-c.since > int64(2*patience) {
			c.vain = true
			p.pump.GiveBack() // whose thread rouses those who rest
			return
		}
		if c.roused > 0 || c.resting.Load() == 0 {
			return
		}
	}
}

// takeFromCrowd takes what callers have submitted before the turn in which it is
// to be sent.
func (p *pumpShare) takeFromCrowd() {
	for _, s := range p.sources {
		if s != nil && s.caller.bell != nil {
			s.Poll()
		}
	}
}

// rest sends what was submitted by way of the attendant, and sleeps until there
// is an answer.
func (io *IO) rest(done []Done) int {
	caller := &io.source.caller
	caller.asleep.Store(true)
	if n := io.Reap(done); n > 0 {
		if !caller.asleep.CompareAndSwap(true, false) {
			<-caller.bell // it rings, or is about to
		}
		return n
	}
	io.pump.crowd.resting.Add(1)
	io.pump.callAttendant()
	<-caller.bell
	io.pump.crowd.resting.Add(-1)
	return io.Reap(done)
}

// rouse wakes a caller who rests, after answers were published. Owner.
func (s *source) rouse() {
	if s.caller.asleep.Load() && s.caller.asleep.Swap(false) {
		s.pump.crowd.roused++
		s.caller.bell <- struct{}{}
	}
}
