package client

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// crowdOf makes ways to one device on pump 0, and a function that has a reader wait
// on each of them, n reads long.
func crowdOf(t *testing.T, s *target, c *Client, size int) (p *pumpShare, read func(n int) *sync.WaitGroup) {
	d, first := s.device(c)
	first.Close()
	ios := make([]*IO, size)
	for i := range ios {
		var err error
		ios[i], err = d.NewIO(0, i, 1)
		must(t, err)
		t.Cleanup(ios[i].Close)
	}
	return ios[0].pump, func(n int) *sync.WaitGroup {
		wg := &sync.WaitGroup{}
		for _, io := range ios {
			wg.Go(func() {
				for range n {
					if errno := do(t, io, Request{Op: blk.Read, Len: 4096}); errno != blk.OK {
						t.Error(errno)
					}
				}
			})
		}
		return wg
	}
}

// afterServe has f run at the end of each visit of the attendant.
func (c *crowd) afterServe(f func()) {
	serve := c.serve
	c.serve = func() { serve(); f() }
}

// Many callers are served by an attendant, who wakes several of them in one go.
func TestCrowd_IsServedByAnAttendant(t *testing.T) {
	roomForPumps(t)
	s := newTarget(t, 1<<20)
	c := s.newClient()
	p, read := crowdOf(t, s, c, 12)
	var most atomic.Int32
	p.crowd.afterServe(func() { most.Store(max(most.Load(), int32(p.crowd.roused))) })
	for end := time.Now().Add(20 * time.Second); most.Load() < 2; {
		if read(100).Wait(); time.Now().After(end) {
			t.Fatalf("an attendant woke %d at once at the most: %+v", most.Load(), p.pump.Stats())
		}
	}
}

// An attendant who looks in vain leaves, the pump's thread wakes those who rest, and
// callers do without him for a while.
func TestCrowd_SlowAnswers(t *testing.T) {
	roomForPumps(t)
	s := newTarget(t, 1<<20)
	c := s.newClient()
	p, read := crowdOf(t, s, c, 12)
	var vain atomic.Int32
	p.crowd.afterServe(func() {
		if p.crowd.vain {
			vain.Add(1)
		}
	})
	for end := time.Now().Add(20 * time.Second); vain.Load() < 3; {
		if time.Now().After(end) {
			t.Fatalf("in vain %d times: %+v", vain.Load(), p.pump.Stats())
		}
		p.crowd.snub.Store(0)
		s.set(func() { s.hold = true })
		readers := read(1)
		eventually(t, "all are asked for", func() (all bool) {
			s.set(func() { all = len(s.held) == 12 })
			return all
		})
		before := vain.Load()
		eventually(t, "the attendant leaves", func() bool { return !p.crowd.here.Load() })
		if vain.Load() > before && p.crowd.snub.Load() == 0 {
			t.Error("callers would call him at once")
		}
		s.releaseAll(blk.OK)
		readers.Wait()
	}
}

// Answers that come after he has left must not wait until the pump's thread finds
// out that nobody drives it.
func TestCrowd_PumpIsGivenBackWhenHeLooksInVain(t *testing.T) {
	roomForPumps(t)
	s := newTarget(t, 1<<20)
	c := s.newClient()
	p, read := crowdOf(t, s, c, 1)
	read(1).Wait()
	p.crowd.resting.Store(1)
	before := p.pump.Stats().GivenBack
	for end := time.Now().Add(10 * time.Second); p.pump.Stats().GivenBack == before; {
		p.crowd.since = 1 // long ago
		p.pump.Drive(p.crowd.serve)
		if time.Now().After(end) {
			t.Fatalf("never given back: %+v", p.pump.Stats())
		}
	}
}

// The attendant goes with the client.
func TestCrowd_AttendantEnds(t *testing.T) {
	roomForPumps(t)
	s := newTarget(t, 1<<20)
	c := s.newClient()
	p, read := crowdOf(t, s, c, 4)
	read(10).Wait()
	p.crowd.here.Store(true) // nobody calls him
	ended := make(chan struct{})
	go func() { p.attend(); close(ended) }()
	c.endLife()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("he stays")
	}
}
