package pump

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// link is a source that passes the requests of a caller's ring on to another pump,
// and its answers back.
type link struct {
	*shm.Completer // of the caller's ring
	out            *shm.Submitter
	caller         *Caller
	sqes           [16]shm.SQE
	cqes           [16]shm.CQE
}

func (l *link) Poll() int {
	n := l.Pop(l.sqes[:])
	for i := range l.sqes[:n] {
		l.out.Push(&l.sqes[i])
	}
	l.out.Publish()
	m := l.out.Pop(l.cqes[:])
	for i := range l.cqes[:m] {
		l.Push(&l.cqes[i])
	}
	if m > 0 {
		l.Publish()
		l.caller.Notify()
	}
	return n + m
}

// answers is the source that wakes the pump for the answers of a link.
type answers struct{ *link }

func (a answers) Poll() int { return 0 }
func (a answers) Arm() bool { return a.out.Arm() }
func (a answers) Disarm()   { a.out.Disarm() }
func (a answers) FD() int   { return a.out.FD() }

// ringWork is a caller's end of its ring.
type ringWork struct {
	*shm.Submitter
	cqes [16]shm.CQE
}

func (w *ringWork) Reap() int   { return w.Pop(w.cqes[:]) }
func (w *ringWork) Large() bool { return false }
func (w *ringWork) Sleep() {
	if w.Arm() {
		unix.Poll([]unix.PollFd{{Fd: int32(w.FD()), Events: unix.POLLIN}}, -1)
		w.Disarm()
	}
}

// server answers requests, unless it is told to hold them.
type server struct {
	*shm.Completer
	rig   *callerRig
	batch [16]shm.SQE
	held  []uint64 // tags
}

func (s *server) Poll() int {
	n := s.Pop(s.batch[:])
	for _, e := range s.batch[:n] {
		s.held = append(s.held, e.Tag)
	}
	s.rig.held.Add(int32(n))
	if s.rig.hold.Load() {
		return n
	}
	for _, tag := range s.held {
		s.Push(&shm.CQE{Tag: tag})
	}
	s.rig.held.Add(-int32(len(s.held)))
	if len(s.held) > 0 {
		s.held = s.held[:0]
		s.Publish()
	}
	return n
}

// soonEnough is longer than any of this takes on a loaded machine, and shorter
// than the limit of tools/mutants for a test.
const soonEnough = 30 * time.Second

// callerRig is a pump with callers. Another pump answers their requests.
type callerRig struct {
	*Pump
	far     *Pump
	callers []*Caller
	works   []*ringWork
	hold    atomic.Bool
	held    atomic.Int32 // requests that are not answered
}

func newCallerRig(t *testing.T, callers int) *callerRig {
	roomForPumps(t)
	r := &callerRig{Pump: newPump(t, Config{Name: "near"}), far: newPump(t, Config{Name: "far"})}
	procs.Add(int32(callers))
	for range callers {
		near, far := newRing(t), newRing(t)
		w := &ringWork{Submitter: near.Submitter()}
		l := &link{Completer: near.Completer(), out: far.Submitter()}
		add(t, r.Pump, l)
		add(t, r.Pump, answers{l})
		add(t, r.far, &server{Completer: far.Completer(), rig: r})
		l.caller = r.NewCaller(l, w)
		t.Cleanup(l.caller.Close)
		r.callers, r.works = append(r.callers, l.caller), append(r.works, w)
	}
	r.far.Start()
	r.Start()
	return r
}

// request has caller i ask for something, and waits for the answer.
func (r *callerRig) request(i int) int {
	r.works[i].Push(&shm.SQE{Tag: uint64(i)})
	return r.callers[i].Wait()
}

// release answers the held requests, and later ones at once.
func (r *callerRig) release() {
	r.hold.Store(false)
	r.far.Do(func() {})
}

// crowd has every caller ask n times, and waits for all answers.
func (r *callerRig) crowd(t *testing.T, n int) *sync.WaitGroup {
	var wg sync.WaitGroup
	for i := range r.callers {
		wg.Go(func() {
			for range n {
				if got := r.request(i); got != 1 {
					t.Errorf("caller %d got %d answers", i, got)
				}
			}
		})
	}
	return &wg
}

// untilLent has caller 0 ask until the pump is lent to it.
func (r *callerRig) untilLent(t *testing.T) {
	t.Helper()
	sdktest.Within(t, soonEnough, "the pump is lent", func() bool {
		for range 50 {
			if r.request(0); r.mode.Load() == modeLent {
				return true
			}
		}
		return false
	})
}

// The pump is given back when an answer takes longer than a drive lasts: the answer
// must not wait for the thread's next look.
func TestCaller_SlowAnswerAfterFastOnes(t *testing.T) {
	r := newCallerRig(t, 1)
	sdktest.Within(t, soonEnough, "a drive without an answer gives the pump back", func() bool {
		r.untilLent(t)
		r.hold.Store(true)
		r.works[0].Push(&shm.SQE{})
		before := r.Stats()
		if r.callers[0].tryDrive(true) { // not Wait: it recalls the pump besides
			t.Fatal("an answer that was not given")
		}
		after := r.Stats()
		r.release()
		r.callers[0].Wait()
		return after.Drives > before.Drives && after.GivenBack > before.GivenBack
	})
}

// After many answers in time a drive lasts longer before it gives the pump back, once.
func TestCaller_SlowAnswerAfterManyFastOnes(t *testing.T) {
	r := newCallerRig(t, 1)
	drive := func(prompt int) time.Duration {
		r.untilLent(t)
		r.callers[0].prompt = prompt
		r.hold.Store(true)
		r.works[0].Push(&shm.SQE{})
		start := time.Now()
		r.callers[0].tryDrive(true)
		lasted := time.Since(start)
		r.release()
		r.callers[0].Wait()
		return lasted
	}
	sdktest.Within(t, soonEnough, "a drive after few fast answers lasts no longer", func() bool {
		return drive(0) < 2*patience*Grace
	})
	sdktest.Within(t, soonEnough, "a drive after many fast answers lasts longer", func() bool {
		return drive(promptDrives) >= 2*patience*Grace
	})
	if n := r.callers[0].prompt; n >= promptDrives {
		t.Errorf("%d answers in time are remembered after one that was not", n)
	}
}

// The pump is given back by a driver that returns while others wait.
func TestCaller_WhoReturnsGivesThePumpToOthers(t *testing.T) {
	r := newCallerRig(t, 1)
	sdktest.Within(t, soonEnough, "a driver beside others gives the pump back", func() bool {
		r.untilLent(t)
		before := r.Stats().GivenBack
		r.Pump.callers.waiting.Add(2) // the caller, and another one
		defer r.Pump.callers.waiting.Add(-2)
		r.works[0].Push(&shm.SQE{})
		if !r.callers[0].tryDrive(true) {
			r.callers[0].Wait()
			return false
		}
		return r.Stats().GivenBack > before
	})
}

// Callers that share a pump do not borrow it.
func TestCaller_EnterKnowsWhoIsAlone(t *testing.T) {
	var c callers
	visit := func() bool {
		defer c.waiting.Add(-1)
		return c.enter()
	}
	for range 2 {
		if !visit() {
			t.Fatal("the only caller is not alone")
		}
	}
	c.enter()
	if visit() {
		t.Error("alone beside another one")
	}
	c.waiting.Add(-1)
	for i := range crowdedFor {
		if visit() {
			t.Fatalf("alone %d calls after another one", i+1)
		}
	}
	if !visit() {
		t.Error("still not alone")
	}
}

func TestAlloc_CallersWaitWithoutAny(t *testing.T) {
	r := newCallerRig(t, 1)
	r.untilLent(t)
	if n := testing.AllocsPerRun(200, func() { r.request(0) }); n != 0 {
		t.Errorf("%.1f objects per request", n)
	}
}

// afterCombine has f run at the end of each drive of the combiner.
func (r *callerRig) afterCombine(f func()) {
	combine := r.Pump.callers.serve
	r.Pump.callers.serve = func() bool { defer f(); return combine() }
}

func TestCombiner_NotifiesSeveralAtOnce(t *testing.T) {
	r := newCallerRig(t, 12)
	var most atomic.Int32
	r.afterCombine(func() { most.Store(max(most.Load(), int32(r.Pump.callers.notified))) })
	sdktest.Within(t, soonEnough, "several are notified at once", func() bool {
		r.crowd(t, 100).Wait()
		return most.Load() >= 2
	})
}

// Two callers suffice for a combiner.
func TestCombiner_ServesTwo(t *testing.T) {
	r := newCallerRig(t, 2)
	var drives atomic.Int32
	r.afterCombine(func() { drives.Add(1) })
	sdktest.Within(t, soonEnough, "it drives for two", func() bool {
		r.crowd(t, 100).Wait()
		return drives.Load() > 0
	})
}

// A combiner that finds no results stops, the pump's thread wakes the callers, and
// callers do without it for a while.
func TestCombiner_SlowAnswers(t *testing.T) {
	r := newCallerRig(t, 12)
	var vain atomic.Int32
	r.afterCombine(func() {
		if r.Pump.callers.vain {
			vain.Add(1)
		}
	})
	sdktest.Within(t, soonEnough, "the combiner looks in vain", func() bool {
		r.Pump.callers.skip.Store(0)
		r.hold.Store(true)
		before := vain.Load()
		crowd := r.crowd(t, 1)
		sdktest.Within(t, soonEnough, "all have asked", func() bool { return r.held.Load() == 12 })
		sdktest.Within(t, soonEnough, "the combiner stops", func() bool { return !r.Pump.callers.active.Load() })
		if vain.Load() > before && r.Pump.callers.skip.Load() == 0 {
			t.Error("callers would call it at once")
		}
		r.release()
		crowd.Wait()
		return vain.Load() >= 3
	})
}

// Answers that come after it has stopped must not wait for the thread's next look.
func TestCombiner_GivesThePumpBackWhenItLooksInVain(t *testing.T) {
	r := newCallerRig(t, 1)
	r.request(0)
	r.Call(func() { r.Pump.callers.look = soonEnough }) // a loan lasts until it is ended
	r.Pump.callers.resting.Store(1)
	r.Do(func() { r.Pump.callers.wanted.Store(true) })
	sdktest.Within(t, soonEnough, "the pump is lent", func() bool { return r.mode.Load() == modeLent })
	before := r.Stats().GivenBack
	sdktest.Within(t, soonEnough, "the combiner drives", func() bool {
		r.Pump.callers.since = 1 // long ago
		return r.tryDrive(r.Pump.callers.serve, true)
	})
	if r.Stats().GivenBack == before {
		t.Error("it has kept the pump")
	}
}

func TestCombiner_EndsWithThePump(t *testing.T) {
	r := newCallerRig(t, 4)
	r.crowd(t, 10).Wait()
	r.Pump.callers.active.Store(true) // it is not called any more
	ended := make(chan struct{})
	go func() { r.runCombiner(); close(ended) }()
	r.Stop()
	select {
	case <-ended:
	case <-time.After(soonEnough):
		t.Fatal("it goes on")
	}
}
