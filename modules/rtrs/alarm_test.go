package rtrs

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

func newAlarms(t *testing.T) *alarmSet {
	t.Helper()
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	a := &alarmSet{}
	if err := a.openTimer(epfd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.close(); _ = unix.Close(epfd) })
	return a
}

// ready waits until the timer has fired.
func (a *alarmSet) ready(wait time.Duration) bool {
	fds := []unix.PollFd{{Fd: int32(a.fd), Events: unix.POLLIN}}
	for end := time.Now().Add(wait); ; {
		n, err := unix.Poll(fds, max(int(time.Until(end).Milliseconds()), 0))
		if n > 0 || err != unix.EINTR {
			return n > 0
		}
	}
}

func TestAlarms_AreCalledWhenDueAndOnlyThen(t *testing.T) {
	a := newAlarms(t)
	start := time.Now()
	var called []string
	var list []*pollerAlarm
	for i := range 5 {
		al := &pollerAlarm{f: func(time.Time) { called = append(called, fmt.Sprint(i)) }}
		a.setAlarm(al, start.Add(time.Duration(i+1)*time.Second))
		list = append(list, al)
	}
	a.setAlarm(list[1], time.Time{})              // taken back
	a.setAlarm(list[1], time.Time{})              // twice
	a.setAlarm(list[3], start.Add(2*time.Second)) // moved
	again := 0
	list[2].f = func(now time.Time) {
		if again++; again < 3 {
			a.setAlarm(list[2], now.Add(1))
		}
	}
	steps := []struct {
		after time.Duration
		n     int
		want  []string
	}{
		{999 * time.Millisecond, 0, nil},
		{time.Second, 1, []string{"0"}},
		{time.Second, 0, nil},
		{2500 * time.Millisecond, 1, []string{"3"}},
		{3 * time.Second, 1, nil}, // the one that sets itself
		{3*time.Second + 1, 1, nil},
		{4 * time.Second, 1, nil},
		{time.Hour, 1, []string{"4"}},
		{2 * time.Hour, 0, nil},
	}
	for _, s := range steps {
		called = nil
		if n := a.run(start.Add(s.after)); n != s.n || !slices.Equal(called, s.want) {
			t.Errorf("after %v: %d calls, %v; want %d, %v", s.after, n, called, s.n, s.want)
		}
	}
	if again != 3 || len(a.list) != 0 || a.next != 0 {
		t.Errorf("%d calls of the one that sets itself; %d alarms are left, the next at %d", again, len(a.list), a.next)
	}
}

func TestAlarms_ArmWakesAtTheEarliest(t *testing.T) {
	a := newAlarms(t)
	early, late := &pollerAlarm{f: func(time.Time) {}}, &pollerAlarm{f: func(time.Time) {}}
	if !a.armTimer() || a.ready(0) {
		t.Fatal("no alarm is set, but it is time")
	}
	a.setAlarm(late, time.Now().Add(time.Hour))
	a.setAlarm(early, time.Now().Add(5*time.Millisecond))
	for !a.armTimer() { // a slow machine
		a.setAlarm(early, time.Now().Add(5*time.Millisecond))
	}
	if !a.ready(10 * time.Second) {
		t.Fatal("the timer does not fire")
	}
	if a.armTimer() {
		t.Error("an owner may sleep with an alarm that is due")
	}
	if n := a.run(time.Now()); n != 1 {
		t.Errorf("%d calls", n)
	}
	if !a.armTimer() || a.ready(0) {
		t.Error("the timer of an alarm that was called goes on firing")
	}
	a.setAlarm(early, time.Now().Add(time.Millisecond))
	a.setAlarm(early, time.Time{})
	time.Sleep(2 * time.Millisecond)
	if !a.armTimer() || a.ready(0) {
		t.Error("an alarm that was taken back fires")
	}
}

func TestAlarms_AllocateNothingOnceThere(t *testing.T) {
	a := newAlarms(t)
	now := time.Now()
	for range 10 {
		al := &pollerAlarm{}
		al.f = func(now time.Time) { a.setAlarm(al, now.Add(time.Second)) }
		a.setAlarm(al, now)
	}
	if n := testing.AllocsPerRun(100, func() {
		now = now.Add(time.Second)
		a.run(now)
		a.armTimer()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// countedPoller is polled by an owner that counts how often it falls asleep.
type countedPoller struct {
	*Poller
	sleeps atomic.Int64
}

func startCounted(t testing.TB, index int) *countedPoller {
	t.Helper()
	p, err := NewPoller(index)
	if err != nil {
		t.Fatal(err)
	}
	c := &countedPoller{Poller: p}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { c.run(ctx) })
	t.Cleanup(func() {
		cancel()
		p.Do(func() {})
		wg.Wait()
		if err := p.Close(); err != nil {
			t.Errorf("close poller: %v", err)
		}
	})
	return c
}

// run looks for work a while before it sleeps, as a pump does.
func (c *countedPoller) run(ctx context.Context) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	last := time.Now()
	for ctx.Err() == nil {
		switch {
		case c.Poll() > 0:
			last = time.Now()
		case time.Since(last) < 2*time.Millisecond:
			runtime.Gosched()
		case c.Arm():
			c.sleeps.Add(1)
			c.sleepOnce()
			last = time.Now()
		}
	}
}

// Many sessions that have nothing to do cost the owners of their connections as
// many wake-ups as one.
func TestIdleSessionsWakeTheirOwnersTogether(t *testing.T) {
	const (
		sessions = 20
		beat     = 250 * time.Millisecond
		beats    = 8
	)
	net := loopback.New()
	near, far := startCounted(t, 0), startCounted(t, 0)
	srv := startServer(t, net, serve, heartbeatEvery(beat, 50), func(c *ServerConfig) { c.Pollers = []*Poller{far.Poller} })
	for i := range sessions {
		_, cfg := cltConfig(t, 1)
		cfg.Pollers, cfg.Queues = []*Poller{near.Poller}, 1
		cfg.Timing.Heartbeat, cfg.Timing.HeartbeatMisses = beat, 50
		s, err := Open(cltContext(t), fmt.Sprint("idle", i), []PathAddr{pathTo(net.Device("client"), cltA, serverAddr.String())}, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close(cltContext(t)) })
	}
	answered := func() (n int) {
		for _, s := range srv.Sessions() {
			if s.Paths()[0].Stats.Latency > 0 {
				n++
			}
		}
		return n
	}
	eventually(t, "heartbeats on all paths", func() bool { return answered() == sessions })
	before := near.sleeps.Load() + far.sleeps.Load()
	time.Sleep(beats * beat)
	n := near.sleeps.Load() + far.sleeps.Load() - before
	t.Logf("%d wake-ups of two owners in %d intervals", n, beats)
	if most := int64(sessions * beats); n < beats || n > most { // one by one they would do it twice as often, at least
		t.Errorf("%d sessions woke their owners %d times in %d intervals, want %d to %d", sessions, n, beats, beats, most)
	}
}
