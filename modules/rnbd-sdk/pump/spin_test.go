package pump

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func TestSpinner(t *testing.T) {
	const S = 100 * time.Microsecond
	spins := func(s *spinner, hit bool, n int) (full, probes, none int) {
		for range n {
			switch d := s.next(); d {
			case 0:
				none++
				continue
			case S:
				full++
			case 2 * S:
				probes++
			default:
				t.Fatalf("budget %v", d)
			}
			s.record(hit)
		}
		return
	}
	s := newSpinner(S)
	if full, probes, none := spins(&s, true, 50); full != 50 || probes+none != 0 {
		t.Errorf("while spins pay off: %d full, %d probes, %d none", full, probes, none)
	}
	// 13 misses leave 3 hits in 16: fewer than a quarter.
	if full, probes, none := spins(&s, false, 13+160); full != 13 || probes != 10 || none != 150 {
		t.Errorf("while spins miss: %d full, %d probes, %d none; want 13, 10, 150", full, probes, none)
	}
	// Four probes that pay off bring spinning back.
	if full, probes, _ := spins(&s, true, 4*16+5); full != 5 || probes != 4 {
		t.Errorf("when spins pay off again: %d full, %d probes; want 5, 4", full, probes)
	}
	s.large = true
	if full, probes, none := spins(&s, true, 20); none != 20 {
		t.Errorf("after large I/O: %d full, %d probes", full, probes)
	}
	never := newSpinner(-1)
	if _, _, none := spins(&never, true, 40); none != 40 {
		t.Error("spins though told never to")
	}
}

// After many spins with work in time, one lasts longer, and only one: an event that
// keeps coming late is a slow one.
func TestPump_SteadySpinLastsLongerOnce(t *testing.T) {
	sdktest.Within(t, soonEnough, "one late event is waited for, the next one is not", func() bool {
		first, second := lateEvents(t)
		return !first && second
	})
}

// lateEvents reports of two late events in a row whether a steady pump had gone to sleep
// when they came.
func lateEvents(t *testing.T) (first, second bool) {
	const spin = 50 * time.Millisecond
	p := newPump(t, Config{Name: "steady", Spin: spin})
	r := newRing(t)
	add(t, p, &echo{Completer: r.Completer()})
	s := r.Submitter()
	event := func() {
		s.Push(&shm.SQE{})
		s.Publish()
		var c [1]shm.CQE
		for s.Pop(c[:]) == 0 {
			runtime.Gosched()
		}
	}
	late := func() (slept bool) {
		time.Sleep(2 * spin)
		before := p.Stats().Sleeps
		event()
		return before > 0
	}
	p.Start()
	event() // in time
	first = late()
	return first, late()
}

// After a long sleep a pump spins no longer than it is told to.
func TestPump_RareEventsAreNotWaitedForLonger(t *testing.T) {
	const spin = 20 * time.Millisecond
	p := newPump(t, Config{Name: "rare", Spin: spin})
	p.own()
	defer p.disown()
	sdktest.Within(t, soonEnough, "a spin after a long sleep lasts no longer", func() bool {
		p.rested = true
		start := time.Now()
		if p.spin() {
			t.Error("an event from nowhere")
		}
		return time.Since(start) < Grace*spin
	})
}

// large is a source with events that are large I/O, or not, as set.
type large struct {
	*echo
	is atomic.Bool
}

func (l *large) LargeIO() bool { return l.is.Load() }

func TestPump_DoesNotSpinAfterLargeIO(t *testing.T) {
	p := newPump(t, Config{Name: "large", Spin: 20 * time.Microsecond})
	r := newRing(t)
	l := &large{echo: &echo{Completer: r.Completer()}}
	add(t, p, l)
	p.Start()
	s := r.Submitter()
	event := func() (spins uint64) {
		asleep(t, p)
		before := p.Stats()
		s.Push(&shm.SQE{})
		s.Publish()
		var c [1]shm.CQE
		for s.Pop(c[:]) == 0 {
			runtime.Gosched()
		}
		asleep(t, p)
		st := p.Stats()
		return st.SpinHits + st.SpinMisses - before.SpinHits - before.SpinMisses
	}
	if n := event(); n == 0 {
		t.Error("no spin after small I/O")
	}
	l.is.Store(true)
	if n := event(); n != 0 {
		t.Errorf("%d spins after large I/O", n)
	}
	l.is.Store(false)
	if n := event(); n == 0 {
		t.Error("no spin after small I/O that followed large I/O")
	}
}
