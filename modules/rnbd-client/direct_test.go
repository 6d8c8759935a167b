package client

import (
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
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

// A caller with more requests than it drives for leaves them to the pump's thread. It
// recalls the pump: else the thread would see them a millisecond later.
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

// Callers on one pump. Most of them sleep until the combiner brings their
// answers.
func TestIO_ManyCallers(t *testing.T) {
	roomForPumps(t)
	s := newTarget(t, 1<<20)
	d, first := s.device(s.newClient())
	first.Close()
	const callers, reads = 12, 200
	var finished atomic.Int32
	ios := make([]*IO, callers)
	for i := range ios {
		var err error
		ios[i], err = d.NewIO(0, i, 1)
		must(t, err)
	}
	for _, io := range ios {
		go func() {
			for range reads {
				if errno := do(t, io, Request{Op: blk.Read, Len: 4096}); errno != blk.OK {
					t.Error(errno)
				}
			}
			finished.Add(1)
		}()
	}
	sdktest.Within(t, 30*time.Second, "all callers have their answers", func() bool { return finished.Load() == callers })
	for _, io := range ios {
		io.Close()
	}
}
