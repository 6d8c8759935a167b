package pump

import (
	"errors"
	"math/rand"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func newPump(t testing.TB, cfg Config) *Pump {
	t.Helper()
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopInTime(t, p) })
	return p
}

func stopInTime(t testing.TB, p *Pump) {
	t.Helper()
	inTime(t, "Stop", p.Stop)
}

func inTime(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s did not return", what)
	}
}

// asleep waits until the pump's thread sleeps.
func asleep(t testing.TB, p *Pump) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Microsecond) {
		if st := p.Stats(); p.mode.Load() != modeAwake && st.Sleeps == st.Wakes+1 && p.owner.TryLock() {
			p.owner.Unlock()
			return
		}
	}
	t.Fatalf("pump does not go to sleep: %+v", p.Stats())
}

// echo is a source that answers every request of a ring.
type echo struct {
	*shm.Completer
	batch [8]shm.SQE
	polls int
	total atomic.Int64
}

func (e *echo) Poll() int {
	e.polls++
	n := e.Pop(e.batch[:])
	for _, r := range e.batch[:n] {
		e.Push(&shm.CQE{Tag: r.Tag})
	}
	e.Publish()
	e.total.Add(int64(n))
	return n
}

// caller is a source that has a number of requests answered, some at a time.
type caller struct {
	*shm.Submitter
	rnd        *rand.Rand
	left, open int
	done       chan error
	batch      [8]shm.CQE
}

func (c *caller) Poll() int {
	n := c.Pop(c.batch[:])
	c.open -= n
	if c.left == 0 && c.open == 0 && c.done != nil {
		c.done <- c.Err()
		c.done = nil
		return 1
	}
	if n == 0 && c.open > 0 {
		return 0
	}
	for range c.rnd.Intn(4) + 1 {
		if c.left > 0 && c.Push(&shm.SQE{Tag: uint64(c.left)}) {
			c.left--
			c.open++
		}
	}
	c.Publish()
	if c.rnd.Intn(100) == 0 {
		time.Sleep(time.Duration(c.rnd.Intn(300)) * time.Microsecond)
	}
	return n
}

func newRing(t testing.TB) *shm.Ring {
	t.Helper()
	r, err := shm.NewHeapRing(16)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// Pumps that sleep at every chance, spin now and then, or spin always, drive
// the two ends of rings: every request is answered.
func TestPump_NoWakeUpIsLost(t *testing.T) {
	for name, spin := range map[string]time.Duration{"never spins": -1, "short spin": 2 * time.Microsecond, "default spin": 0} {
		t.Run(name, func(t *testing.T) {
			a, b := newPump(t, Config{Name: "a", Spin: spin}), newPump(t, Config{Name: "b", Spin: spin})
			var results []chan error
			var echoes []*echo
			for i := range 3 {
				r := newRing(t)
				done := make(chan error, 1)
				results = append(results, done)
				add(t, a, &caller{Submitter: r.Submitter(), rnd: rand.New(rand.NewSource(int64(i))), left: 3000, done: done})
				e := &echo{Completer: r.Completer()}
				echoes = append(echoes, e)
				add(t, b, e)
			}
			a.Start()
			b.Start()
			last := int64(-1)
			for ended := 0; ended < len(results); {
				select {
				case err := <-results[ended]:
					if err != nil {
						t.Error(err)
					}
					ended++
				case <-time.After(10 * time.Second):
					now := int64(0)
					for _, e := range echoes {
						now += e.total.Load()
					}
					if now == last {
						t.Fatalf("a wake-up is lost: %+v and %+v", a.Stats(), b.Stats())
					}
					last = now
				}
			}
			t.Logf("%+v and %+v", a.Stats(), b.Stats())
			stopInTime(t, a)
			stopInTime(t, b)
		})
	}
}

func add(t testing.TB, p *Pump, s Source) {
	t.Helper()
	if err := p.Add(s); err != nil {
		t.Fatal(err)
	}
}

func TestPump_DoAndCallFromManyGoroutines(t *testing.T) {
	p := newPump(t, Config{Name: "mail", Spin: 5 * time.Microsecond})
	p.Start()
	var wg sync.WaitGroup
	n, calls := 0, 0 // of the pump's thread: the race detector watches
	for g := range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewSource(int64(g)))
			for range 100 {
				p.Do(func() { n++ })
				seen := 0
				p.Call(func() { calls++; seen = calls })
				if seen == 0 {
					t.Error("Call returned before its function ran")
				}
				if rnd.Intn(20) == 0 {
					time.Sleep(time.Duration(rnd.Intn(100)) * time.Microsecond)
				}
			}
		})
	}
	inTime(t, "Do and Call", wg.Wait)
	p.Call(func() {
		if n != 800 || calls != 800 {
			t.Errorf("%d and %d functions ran, want 800 each", n, calls)
		}
		inner := false
		p.Call(func() { inner = true })
		if !inner {
			t.Error("Call on the pump's thread did not run at once")
		}
	})
}

// probe counts its polls; busy makes it say that it did something each time.
type probe struct {
	polls atomic.Int64
	busy  atomic.Bool
	fd    int
	hook  func()
}

func newProbe(t testing.TB) *probe {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return &probe{fd: fd}
}

func (s *probe) Poll() int {
	s.polls.Add(1)
	if s.hook != nil {
		s.hook()
	}
	if s.busy.Load() {
		return 1
	}
	return 0
}
func (s *probe) Arm() bool { return !s.busy.Load() }
func (s *probe) FD() int   { return s.fd }

func TestPump_RemovedSourceIsNotCalledAgain(t *testing.T) {
	for _, busy := range []bool{true, false} {
		p := newPump(t, Config{Name: "remove"})
		p.Start()
		for range 50 {
			s := newProbe(t)
			s.busy.Store(busy)
			add(t, p, s)
			for s.polls.Load() == 0 {
				runtime.Gosched()
			}
			p.Remove(s)
			n := s.polls.Load()
			signal(s.fd) // not watched any more
			time.Sleep(100 * time.Microsecond)
			if got := s.polls.Load(); got != n {
				t.Fatalf("busy %v: called %d times after Remove returned", busy, got-n)
			}
		}
	}
}

func TestPump_SourceRemovesItselfAndAnother(t *testing.T) {
	p := newPump(t, Config{Name: "self"})
	first, second, third := newProbe(t), newProbe(t), newProbe(t)
	added := newProbe(t)
	first.hook = func() {
		p.Remove(first)
		p.Remove(second)
		p.Add(added)
	}
	for _, s := range []*probe{first, second, third} {
		add(t, p, s)
	}
	p.Start()
	asleep(t, p)
	signal(third.fd)
	for end := time.Now().Add(5 * time.Second); added.polls.Load() == 0 && time.Now().Before(end); {
		runtime.Gosched()
	}
	stopInTime(t, p)
	if a, b := first.polls.Load(), second.polls.Load(); a != 1 || b != 0 || third.polls.Load() < 2 || added.polls.Load() == 0 {
		t.Errorf("polls: %d, %d, %d, %d; want 1, 0, many, some", a, b, third.polls.Load(), added.polls.Load())
	}
}

func TestPump_RemoveBeforeStart(t *testing.T) {
	p := newPump(t, Config{Name: "early"})
	s := newProbe(t)
	add(t, p, s)
	inTime(t, "Remove", func() { p.Remove(s) })
	p.Start()
	asleep(t, p)
	if s.polls.Load() != 0 {
		t.Error("a source removed before Start was polled")
	}
}

func TestPump_AddRefusesWhatCannotBeWatched(t *testing.T) {
	p := newPump(t, Config{Name: "refuse"})
	s := newProbe(t)
	add(t, p, s)
	if err := p.Add(s); !errors.Is(err, unix.EEXIST) {
		t.Errorf("same descriptor twice: %v, want EEXIST", err)
	}
	if err := p.Add(&probe{fd: 1 << 20}); !errors.Is(err, unix.EBADF) {
		t.Errorf("closed descriptor: %v, want EBADF", err)
	}
	add(t, p, &probe{fd: -1}) // none: polled only
	p.Start()
	stopInTime(t, p)
	if err := p.Add(newProbe(t)); !errors.Is(err, ErrStopped) {
		t.Errorf("stopped pump: %v, want ErrStopped", err)
	}
}

func TestPump_StopWhileSleeping(t *testing.T) {
	for range 100 {
		p := newPump(t, Config{Name: "stop", Spin: time.Microsecond})
		add(t, p, newProbe(t))
		p.Start()
		asleep(t, p)
		stopInTime(t, p)
	}
}

func TestPump_StopIsFinalAndRunsWhatWasPosted(t *testing.T) {
	p := newPump(t, Config{Name: "final"})
	p.Start()
	ran := 0
	p.Call(func() { // on the thread: no waiting, posted functions still run
		p.Do(func() { ran++ })
		p.Stop()
	})
	stopInTime(t, p)
	stopInTime(t, p)
	p.Do(func() { ran++ })
	p.Call(func() { ran++; p.Call(func() { ran++ }) })
	p.Remove(newProbe(t))
	if ran != 4 {
		t.Errorf("%d functions ran, want 4", ran)
	}
	if p.TryDrive(func() {}) {
		t.Error("a stopped pump lets itself be driven")
	}
	never := newPump(t, Config{Name: "never started"})
	never.Do(func() { ran++ })
	stopInTime(t, never)
	if ran != 5 {
		t.Error("function posted to a pump that never ran was dropped")
	}
}

func TestPump_IdleDoesNotWake(t *testing.T) {
	p := newPump(t, Config{Name: "idle"})
	r := newRing(t)
	add(t, p, &echo{Completer: r.Completer()})
	p.Start()
	asleep(t, p)
	before := p.Stats()
	time.Sleep(500 * time.Millisecond)
	if after := p.Stats(); after != before {
		t.Errorf("idle pump went from %+v to %+v", before, after)
	}
}

func TestPump_SleepersDoNotDelayGC(t *testing.T) {
	for i := range 4 {
		p := newPump(t, Config{Name: "gc", CPU: -i})
		r := newRing(t)
		add(t, p, &echo{Completer: r.Completer()})
		p.Start()
		asleep(t, p)
	}
	best := time.Hour // of several: the machine may be busy with other things
	for range 5 {
		start := time.Now()
		inTime(t, "GC beside sleeping pumps", runtime.GC)
		best = min(best, time.Since(start))
	}
	if best > 5*time.Second {
		t.Errorf("collection took %v beside 4 sleeping pumps", best)
	}
}

func TestPump_SpinnersLetGCStop(t *testing.T) {
	old := runtime.GOMAXPROCS(0)
	SetProcs(2)
	if got := runtime.GOMAXPROCS(0); got < 4 || got > 6 {
		t.Errorf("GOMAXPROCS for 2 pumps is %d, want 4 to 6", got)
	}
	defer runtime.GOMAXPROCS(old)
	for range 2 {
		p := newPump(t, Config{Name: "busy"})
		s := newProbe(t)
		s.busy.Store(true)
		add(t, p, s)
		p.Start()
	}
	inTime(t, "GC beside busy pumps", runtime.GC)
}

// A descriptor is watched for edges only: readable for ever wakes once.
func TestPump_UndrainedDescriptorLetsItSleep(t *testing.T) {
	p := newPump(t, Config{Name: "edge", Spin: -1})
	s := newProbe(t)
	add(t, p, s)
	p.Start()
	asleep(t, p)
	for range 20 {
		before := s.polls.Load()
		signal(s.fd) // its counter grows and is never read
		for end := time.Now().Add(5 * time.Second); s.polls.Load() == before; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatal("edge not noticed")
			}
		}
		asleep(t, p)
	}
	if n := s.polls.Load(); n > 60 {
		t.Errorf("polled %d times for 20 edges", n)
	}
}

func TestPump_WakesBySetOfDescriptors(t *testing.T) {
	set, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(set)
	inner := newProbe(t)
	if err := unix.EpollCtl(set, unix.EPOLL_CTL_ADD, inner.fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
		t.Fatal(err)
	}
	p := newPump(t, Config{Name: "set", Spin: -1})
	var b [8]byte
	events := 0 // of the pump's thread
	s := &probe{fd: set}
	s.hook = func() {
		if n, _ := unix.Read(inner.fd, b[:]); n == 8 {
			events++
		}
	}
	add(t, p, s)
	p.Start()
	for i := range 20 {
		asleep(t, p)
		signal(inner.fd)
		got := 0
		for end := time.Now().Add(5 * time.Second); got != i+1; p.Call(func() { got = events }) {
			if time.Now().After(end) {
				t.Fatalf("event %d not noticed", i)
			}
		}
	}
	stopInTime(t, p)
}

func TestPump_PinsItsThread(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("one CPU only")
	}
	runtime.LockOSThread() // the process's first thread may have been a pump's, and pinned
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	unix.SchedGetaffinity(0, &all)
	for cpu, want := range map[int]int{1: 1, 0: -1, -1: -1, 100000: -1} {
		p := newPump(t, Config{Name: "pin", CPU: cpu})
		p.Start()
		var got unix.CPUSet
		p.Call(func() { unix.SchedGetaffinity(0, &got) })
		if want >= 0 && (got.Count() != 1 || !got.IsSet(want)) {
			t.Errorf("CPU %d: thread may run on %d CPUs", cpu, got.Count())
		}
		if want < 0 && got != all {
			t.Errorf("CPU %d: thread may run on %d CPUs of %d", cpu, got.Count(), all.Count())
		}
	}
}

func TestPump_RunUntil(t *testing.T) {
	p := newPump(t, Config{Name: "run"})
	r := newRing(t)
	e := &echo{Completer: r.Completer()}
	add(t, p, e)
	done := make(chan error)
	go func() { done <- p.Run(func() bool { return e.total.Load() >= 3 }) }()
	s := r.Submitter()
	for i := range 3 {
		s.Push(&shm.SQE{Tag: uint64(i)})
		s.Publish()
		time.Sleep(time.Millisecond) // asleep again
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Run does not end")
	}
	inTime(t, "Call after Run", func() { p.Call(func() {}) })
}

func TestPump_RunEndsByStop(t *testing.T) {
	p := newPump(t, Config{Name: "run"})
	done := make(chan error)
	go func() { done <- p.Run(func() bool { return false }) }()
	asleep(t, p)
	stopInTime(t, p)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestPump_LoopAllocatesNothing(t *testing.T) {
	p := newPump(t, Config{Name: "allocs", Spin: -1})
	r := newRing(t)
	add(t, p, &echo{Completer: r.Completer()})
	p.Start()
	s := r.Submitter()
	var cqe [4]shm.CQE
	n := testing.AllocsPerRun(200, func() {
		s.Push(&shm.SQE{})
		s.Publish()
		for s.Pop(cqe[:]) == 0 {
			runtime.Gosched()
		}
	})
	if n != 0 {
		t.Errorf("%v allocations per request, want 0", n)
	}
	if st := p.Stats(); st.Sleeps < 10 {
		t.Errorf("pump slept %d times only: the test did not cover sleeping", st.Sleeps)
	}
}
