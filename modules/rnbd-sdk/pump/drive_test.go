package pump

import (
	"math/rand"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

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
	if after.Wakes != before.Wakes || after.Drives != before.Drives+200 {
		t.Errorf("the thread woke %d times in %d drives", after.Wakes-before.Wakes, after.Drives-before.Drives)
	}
}

// stale is a source whose first Arm finds a trace of what was handled before,
// as an epoll set with edges does.
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

func TestTryDrive_RefusedWhileAwake(t *testing.T) {
	p := newPump(t, Config{Name: "awake"})
	s := newProbe(t)
	s.busy.Store(true)
	add(t, p, s)
	p.Start()
	for s.polls.Load() == 0 {
		runtime.Gosched()
	}
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
				if !near.TryDrive(func() { submit(); near.Turn() }) {
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
