package pump

import (
	"math/rand"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// TryDrive, Drive and Turn are the steps of callers, for tests that call a pump
// directly.
func (p *Pump) TryDrive(once func()) bool { return p.tryDrive(keeping(once), false) }
func (p *Pump) Drive(once func()) bool    { return p.borrow(keeping(once)) }
func (p *Pump) Turn() int                 { return p.turn() }

// keeping is a drive that does not give the pump back.
func keeping(once func()) func() bool { return func() bool { once(); return true } }

// client is a source that submits for callers and counts answers.
type client struct {
	*shm.Submitter
	answered int
	batch    [8]shm.CQE
}

func (c *client) Poll() int {
	n := c.Pop(c.batch[:])
	c.answered += n
	return n
}

func TestTryDrive_SparesTheThread(t *testing.T) {
	near, far := newPump(t, Config{Name: "near"}), newPump(t, Config{Name: "far"})
	r := newRing(t)
	c := &client{Submitter: r.Submitter()}
	add(t, near, c)
	add(t, far, &echo{Completer: r.Completer()})
	near.Start()
	far.Start()
	asleep(t, near)
	before := near.Stats()
	for i := range 200 {
		asleep(t, near)
		done := false
		drove := near.TryDrive(func() {
			want := c.answered + 1
			c.Push(&shm.SQE{Tag: uint64(i)})
			c.Publish()
			for end := time.Now().Add(5 * time.Second); c.answered < want && time.Now().Before(end); {
				near.Turn()
				yield()
			}
			done = c.answered == want
		})
		if !drove || !done {
			t.Fatalf("request %d: drove %v, answered %v", i, drove, done)
		}
	}
	after := near.Stats()
	if after.Wakes > before.Wakes+10 || after.Drives != before.Drives+200 {
		t.Errorf("the thread woke %d times in %d drives", after.Wakes-before.Wakes, after.Drives-before.Drives)
	}
}

// stale is a source with a first Arm that finds a trace of handled work, as
// an epoll set with edges does.
type stale struct {
	*client
	trace bool
}

func (s *stale) Arm() bool {
	if s.trace {
		s.trace = false
		return false
	}
	return s.client.Arm()
}

func TestTryDrive_TraceOfHandledWorkDoesNotWakeTheThread(t *testing.T) {
	near := newPump(t, Config{Name: "near"})
	r := newRing(t)
	s := &stale{client: &client{Submitter: r.Submitter()}}
	add(t, near, s)
	near.Start()
	asleep(t, near)
	before := near.Stats()
	for range 50 {
		if !near.TryDrive(func() { s.trace = true }) {
			t.Fatal("sleeping pump is not driven")
		}
	}
	time.Sleep(5 * time.Millisecond)
	if after := near.Stats(); after.Wakes != before.Wakes {
		t.Errorf("the thread woke %d times in 50 drives", after.Wakes-before.Wakes)
	}
}

func TestTryDrive_LeftWorkWakesTheThread(t *testing.T) {
	near, far := newPump(t, Config{Name: "near"}), newPump(t, Config{Name: "far"})
	r := newRing(t)
	c := &client{Submitter: r.Submitter()}
	add(t, near, c)
	add(t, far, &echo{Completer: r.Completer()})
	near.Start()
	far.Start()
	for i := range 100 {
		asleep(t, near)
		if !near.TryDrive(func() {
			c.Push(&shm.SQE{})
			c.Publish()
			if i%2 == 0 { // answered, but not looked at, when the drive ends
				time.Sleep(200 * time.Microsecond)
			}
		}) {
			t.Fatal("sleeping pump is not driven")
		}
		for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Microsecond) {
			n := 0
			near.Call(func() { n = c.answered })
			if n == i+1 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("request %d is never answered", i)
			}
		}
	}
}

func TestTryDrive_DoDuringADriveIsHeard(t *testing.T) {
	p := newPump(t, Config{Name: "do"})
	p.Start()
	asleep(t, p)
	ran := make(chan struct{})
	p.TryDrive(func() { p.Do(func() { close(ran) }) })
	select {
	case <-ran:
	case <-time.After(5 * time.Second):
		t.Fatal("function posted during a drive never ran")
	}
	asleep(t, p)
	s := newProbe(t)
	add(t, p, s)
	asleep(t, p)
	p.TryDrive(func() { p.Remove(s); p.Stop() })
	stopInTime(t, p)
}

// busyPump is awake as long as its source is busy.
func busyPump(t *testing.T) (*Pump, *probe) {
	p, s := newPump(t, Config{Name: "awake"}), newProbe(t)
	s.busy.Store(true)
	add(t, p, s)
	p.Start()
	for s.polls.Load() == 0 {
		runtime.Gosched()
	}
	return p, s
}

func TestTryDrive_RefusedWhileAwake(t *testing.T) {
	p, _ := busyPump(t)
	for range 100 {
		if p.TryDrive(func() {}) {
			t.Fatal("a busy pump lets itself be driven")
		}
	}
	fresh := newPump(t, Config{Name: "fresh"})
	if fresh.TryDrive(func() {}) {
		t.Error("a pump that was not started lets itself be driven")
	}
}

// Many callers, some driving, some posting; every request is answered, and the
// race detector sees one owner at a time.
func TestTryDrive_AmongManyCallers(t *testing.T) {
	roomForPumps(t)
	near, far := newPump(t, Config{Name: "near", Spin: 5 * time.Microsecond}), newPump(t, Config{Name: "far"})
	r := newRing(t)
	c := &client{Submitter: r.Submitter()}
	add(t, near, c)
	add(t, far, &echo{Completer: r.Completer()})
	near.Start()
	far.Start()
	pushed := 0 // of the owner
	submit := func() {
		if c.Push(&shm.SQE{}) {
			c.Publish()
			pushed++
		}
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewSource(int64(g)))
			for range 400 {
				drive := near.TryDrive
				if g%2 == 0 {
					drive = near.Drive
				}
				if !drive(func() { submit(); near.Turn() }) {
					near.Do(submit)
				}
				if rnd.Intn(4) == 0 {
					time.Sleep(time.Duration(rnd.Intn(100)) * time.Microsecond)
				}
			}
		})
	}
	inTime(t, "callers", wg.Wait)
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		var a, b int
		near.Call(func() { a, b = pushed, c.answered })
		if a == b && a > 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d of %d answered", b, a)
		}
	}
	if st := near.Stats(); st.Drives == 0 {
		t.Errorf("nobody ever drove: %+v", st)
	}
}

// watched counts how often its pump prepared to sleep.
type watched struct {
	*client
	arms atomic.Int32
}

func (w *watched) Arm() bool {
	w.arms.Add(1)
	return w.client.Arm()
}

func TestDrive_CallersWhoKeepDrivingGetThePumpLent(t *testing.T) {
	roomForPumps(t)
	p := newPump(t, Config{Name: "lent"})
	r := newRing(t)
	w := &watched{client: &client{Submitter: r.Submitter()}}
	add(t, p, w)
	p.Start()
	asleep(t, p)
	unarmed := 0 // drives in a row without anything armed
	for end := time.Now().Add(10 * time.Second); unarmed < 100; {
		if time.Now().After(end) {
			t.Fatalf("not lent: %+v", p.Stats())
		}
		before := w.arms.Load()
		if !p.Drive(func() {}) || w.arms.Load() > before {
			unarmed = 0
		} else {
			unarmed++
		}
	}
	if st := p.Stats(); st.Loans == 0 {
		t.Errorf("lent without a loan: %+v", st)
	}
	asleep(t, p) // soon after the last drive the thread has it back
}

func TestDrive_AwakePumpIsLent(t *testing.T) {
	roomForPumps(t)
	p, s := busyPump(t)
	for end := time.Now().Add(10 * time.Second); !p.Drive(func() {}); {
		if time.Now().After(end) {
			t.Fatal("a busy pump is never lent")
		}
	}
	had := s.polls.Load()
	for end := time.Now().Add(10 * time.Second); s.polls.Load() == had; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the thread does not take back what nobody drives")
		}
	}
}

// A caller that finds nothing for long gives the pump back: its answers come to
// the thread.
func TestDrive_GivenBackAtOnce(t *testing.T) {
	roomForPumps(t)
	p := newPump(t, Config{Name: "back"})
	p.callers.look = time.Hour
	s := newProbe(t)
	s.busy.Store(true)
	add(t, p, s)
	p.Start()
	for end := time.Now().Add(10 * time.Second); !p.Drive(func() {}); {
		if time.Now().After(end) {
			t.Fatal("a busy pump is never lent")
		}
	}
	had := s.polls.Load()
	time.Sleep(5 * time.Millisecond)
	if s.polls.Load() != had {
		t.Fatal("the thread works while the pump is lent")
	}
	if !p.borrow(func() bool { return false }) {
		t.Fatal("lent, and not to be driven")
	}
	for end := time.Now().Add(10 * time.Second); s.polls.Load() == had; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the thread has not got it back")
		}
	}
}

// Work that a caller leaves undone, or that others post, is done without the
// caller.
func TestDrive_NothingIsLostInALoan(t *testing.T) {
	roomForPumps(t)
	near, far := newPump(t, Config{Name: "near"}), newPump(t, Config{Name: "far"})
	r := newRing(t)
	c := &client{Submitter: r.Submitter()}
	add(t, near, c)
	add(t, far, &echo{Completer: r.Completer()})
	near.Start()
	far.Start()
	answered := func() (n int) {
		near.Call(func() { n = c.answered })
		return n
	}
	want := 0
	for range 50 {
		for loans := near.Stats().Loans; near.Stats().Loans == loans; {
			near.Drive(func() {})
		}
		if near.Drive(func() { c.Push(&shm.SQE{}); c.Publish() }) {
			want++
		}
		for end := time.Now().Add(10 * time.Second); answered() < want; time.Sleep(20 * time.Microsecond) {
			if time.Now().After(end) {
				t.Fatalf("%d of %d answered: %+v", answered(), want, near.Stats())
			}
		}
	}
	for near.Stats().Loans == 0 || !near.Drive(func() {}) {
	}
	stopInTime(t, near)
	if near.Drive(func() {}) {
		t.Error("a stopped pump is driven")
	}
}

// A thread that has lent its pump keeps a place in the scheduler. Others need
// it if there are few.
func TestDrive_NotLentWithoutRoom(t *testing.T) {
	procs.Store(0)
	p := newPump(t, Config{Name: "crowd"})
	p.Start()
	for range 100 {
		asleep(t, p)
		if !p.Drive(func() {}) {
			t.Fatal("a sleeping pump is not driven")
		}
	}
	if st := p.Stats(); st.Loans != 0 {
		t.Errorf("lent: %+v", st)
	}
}

// Nothing is armed during a loan: a caller that leaves work to the thread ends
// it.
func TestRecall_WorkLeftToTheThread(t *testing.T) {
	roomForPumps(t)
	near, far := newPump(t, Config{Name: "near"}), newPump(t, Config{Name: "far"})
	near.callers.look = time.Hour
	r := newRing(t)
	c := &client{Submitter: r.Submitter()}
	answered := make(chan struct{})
	add(t, near, &notified{client: c, answered: answered})
	add(t, far, &echo{Completer: r.Completer()})
	near.Start()
	far.Start()
	left := false
	leave := func() {
		if left = near.mode.Load() == modeLent; left {
			c.Push(&shm.SQE{})
			c.Publish()
		}
	}
	for end := time.Now().Add(10 * time.Second); !left; near.Drive(leave) {
		if time.Now().After(end) {
			t.Fatalf("not lent: %+v", near.Stats())
		}
	}
	near.Recall()
	select {
	case <-answered:
	case <-time.After(10 * time.Second):
		t.Fatalf("nobody looks at the answer: %+v", near.Stats())
	}
}

// notified tells of the first answer.
type notified struct {
	*client
	answered chan struct{}
}

func (n *notified) Poll() int {
	had := n.client.answered
	events := n.client.Poll()
	if had == 0 && n.client.answered > 0 {
		close(n.answered)
	}
	return events
}

// A caller that was refused is gone: the pump must not be lent without a
// borrower.
func TestDrive_RefusedLeavesNoWish(t *testing.T) {
	roomForPumps(t)
	p := newPump(t, Config{Name: "wish"})
	s := newProbe(t)
	add(t, p, s)
	p.Start()
	asleep(t, p)
	held, free := make(chan struct{}), make(chan struct{})
	go p.TryDrive(func() { close(held); <-free })
	<-held
	if p.Drive(func() {}) {
		t.Error("two drive at once")
	}
	close(free)
	asleep(t, p)
	s.busy.Store(true)
	p.Call(func() {})
	had := s.polls.Load()
	for end := time.Now().Add(10 * time.Second); s.polls.Load() < had+100; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the thread does not work")
		}
	}
	if st := p.Stats(); st.Loans != 0 {
		t.Errorf("lent to nobody: %+v", st)
	}
}
