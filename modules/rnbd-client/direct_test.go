package client

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
)

// roomForPumps lets pumps be lent until the end of the test.
func roomForPumps(t *testing.T) {
	before, percent := runtime.GOMAXPROCS(0), debug.SetGCPercent(100)
	pump.SetProcs(16)
	t.Cleanup(func() {
		runtime.GOMAXPROCS(before)
		debug.SetGCPercent(percent)
	})
}

// A caller whose answers come fast drives the pump, which is lent to him. When an
// answer takes longer than he looks for it, he gives the pump back: the answer
// must not wait until the pump's thread finds out that nobody looks any more.
func TestIO_SlowAnswerAfterFastOnes(t *testing.T) {
	roomForPumps(t)
	s := newTarget(t, 1<<20)
	_, io := s.device(s.newClient())
	defer io.Close()
	p := io.pump.pump
	var done [1]Done
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if do(t, io, Request{Op: blk.Read, Len: 4096}); p.Stats().Sleeps != p.Stats().Wakes {
			continue // its thread sleeps: it is not lent
		}
		s.set(func() { s.hold = true })
		io.Submit(Request{Op: blk.Read, Len: 4096})
		before := p.Stats()
		answered := io.driveFor(done[:], true) // not Wait, which recalls the pump besides
		after := p.Stats()
		eventually(t, "the server has the read", func() (has bool) { s.set(func() { has = len(s.held) == 1 }); io.Flush(); return has })
		s.releaseAll(blk.OK)
		if answered {
			t.Fatal("an answer that the server has not given")
		}
		io.Wait(done[:])
		if after.Drives > before.Drives && after.GivenBack > before.GivenBack {
			return
		}
	}
	t.Fatalf("never given back: %+v", p.Stats())
}

// Callers who share a pump do not borrow it: the one who leaves first would let the
// other one's answer lie.
func TestPumpShare_EnterKnowsWhoIsAlone(t *testing.T) {
	var p pumpShare
	visit := func() bool {
		defer p.waiters.Add(-1)
		return p.enter()
	}
	for range 2 {
		if !visit() {
			t.Fatal("the only caller is not alone")
		}
	}
	p.enter()
	if visit() {
		t.Error("alone beside another one")
	}
	p.waiters.Add(-1)
	for i := range crowdedFor {
		if visit() {
			t.Fatalf("alone %d calls after another one", i+1)
		}
	}
	if !visit() {
		t.Error("still not alone")
	}
}

// A caller who has his answer leaves. If others came while he drove, nobody looks
// for theirs unless he gives the pump back.
func TestIO_CallerWhoLeavesGivesThePumpToOthers(t *testing.T) {
	roomForPumps(t)
	s := newTarget(t, 1<<20)
	_, io := s.device(s.newClient())
	defer io.Close()
	p := io.pump.pump
	var done [1]Done
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if do(t, io, Request{Op: blk.Read, Len: 4096}); p.Stats().Sleeps != p.Stats().Wakes {
			continue // its thread sleeps: it is not lent
		}
		before := p.Stats().GivenBack
		io.pump.waiters.Add(2) // the caller, and somebody who comes while he drives
		io.Submit(Request{Op: blk.Read, Len: 4096})
		answered := io.driveFor(done[:], true)
		io.pump.waiters.Add(-2)
		if !answered {
			io.Wait(done[:])
		} else if p.Stats().GivenBack > before {
			return
		}
	}
	t.Fatalf("never given back: %+v", p.Stats())
}

// A caller whose requests become more than he drives for leaves them to the pump's
// thread, which must not find out by itself, a millisecond later, that nobody
// drives.
func TestIO_MoreRequestsThanTheCallerDrivesFor(t *testing.T) {
	roomForPumps(t)
	s := newTarget(t, 1<<20)
	_, io := s.device(s.newClient())
	defer io.Close()
	p := io.pump.pump
	var done [16]Done
	for _, leave := range []struct {
		how string
		do  func() int
	}{
		{"by Wait", func() int { return io.Wait(done[:]) }},
		{"by Flush", func() int { io.Flush(); return 0 }},
	} {
		recalled := false
		for end := time.Now().Add(20 * time.Second); !recalled; {
			for loans := p.Stats().Loans; p.Stats().Loans == loans; {
				if do(t, io, Request{Op: blk.Read, Len: 4096}); time.Now().After(end) {
					t.Fatalf("%s: not recalled: %+v", leave.how, p.Stats())
				}
			}
			before := p.Stats().GivenBack
			for slot := range 8 {
				io.Submit(Request{Slot: slot, Op: blk.Read, Len: largeCopy})
			}
			n := leave.do()
			recalled = p.Stats().GivenBack > before
			for n < 8 {
				n += io.Wait(done[:])
			}
		}
	}
}
