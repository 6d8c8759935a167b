package server

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// arenaLog records which arenas processes have.
type arenaLog struct {
	mu     sync.Mutex
	events []string
	held   map[uint32]bool // in the process that runs now
	gate   chan struct{}   // not nil: a detach waits until it is closed
}

// wrap makes each process tell the log.
func (l *arenaLog) wrap(c *Config) {
	launch := c.Launch
	c.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
		p, err := launch(ctx, pc)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.held = map[uint32]bool{}
		return &loggedArenas{p, l}, err
	}
}

func (l *arenaLog) note(what string, id uint32, has bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, fmt.Sprintf("%s %d", what, id))
	l.held[id] = has
}

func (l *arenaLog) has(id uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held[id]
}

func (l *arenaLog) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.events)
}

func (l *arenaLog) setGate(gate chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gate = gate
}

type loggedArenas struct {
	supervise.Process
	log *arenaLog
}

func (p *loggedArenas) AttachArena(ctx context.Context, id uint32, a *shm.Arena) error {
	err := p.Process.AttachArena(ctx, id, a)
	if err == nil {
		p.log.note("attach", id, true)
	}
	return err
}

func (p *loggedArenas) DetachArena(ctx context.Context, id uint32) error {
	p.log.mu.Lock()
	gate := p.log.gate
	p.log.mu.Unlock()
	if gate != nil {
		<-gate
	}
	err := p.Process.DetachArena(ctx, id)
	if err == nil {
		p.log.note("detach", id, false)
	}
	return err
}

// A process maps the memory of the sessions that have a device with it, and of no
// others.
func TestArenasOfSessionsWithoutDevices(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	mem.add("b", 1<<20)
	mem.add("c", 1<<20)
	var log arenaLog
	r := newRig(t, mem, log.wrap)
	s0, s1 := r.connect("s0"), r.connect("s1")
	open := func(i *initiator, name string) uint32 {
		t.Helper()
		rsp, err := i.open(name, blk.ReadWrite)
		must(t, err)
		return rsp.DeviceID
	}
	write := func(i *initiator, id uint32) {
		t.Helper()
		if errno := i.rw(id, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
			t.Errorf("write: errno %d", errno)
		}
	}
	a, b, c := open(s0, "a"), open(s0, "b"), open(s1, "c")
	if !log.has(0) || !log.has(1) {
		t.Fatalf("both sessions have devices: %v", log.all())
	}
	must(t, s0.closeDevice(a))
	write(s0, b)
	if !log.has(0) {
		t.Errorf("a session with one device left: %v", log.all())
	}
	must(t, s0.closeDevice(b))
	eventually(t, "the memory of the session without devices is taken away", func() bool { return !log.has(0) })
	write(s1, c)
	if !log.has(1) {
		t.Errorf("the other session: %v", log.all())
	}
	write(s0, open(s0, "b"))
	if !log.has(0) {
		t.Errorf("the session has a device again: %v", log.all())
	}
}

// An OPEN that follows the last CLOSE at once waits until the process has let go.
func TestOpenWhileTheArenaIsTakenAway(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	var log arenaLog
	r := newRig(t, mem, log.wrap)
	i := r.connect("s")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	gate := make(chan struct{})
	log.setGate(gate)
	must(t, i.closeDevice(rsp.DeviceID))
	opened := make(chan error, 1)
	go func() {
		_, err := i.open("a", blk.ReadWrite)
		opened <- err
	}()
	select {
	case err := <-opened:
		t.Fatalf("it did not wait: %v, %v", err, log.all())
	case <-time.After(50 * time.Millisecond):
	}
	close(gate)
	must(t, <-opened)
	if got, want := log.all(), []string{"attach 0", "detach 0", "attach 0"}; !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

// The memory stays with the process until the device's last request is answered.
func TestArenaStaysForRequestsInFlight(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	var log arenaLog
	r := newRig(t, mem, log.wrap)
	i := r.connect("s")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	written := make(chan blk.Errno, 1)
	go func() { written <- i.rw(rsp.DeviceID, blk.Write, 0, make([]byte, 512)) }()
	eventually(t, "the plugin has the request", func() bool { return mem.taken() == 1 })
	closed := make(chan error, 1)
	go func() { closed <- i.closeDevice(rsp.DeviceID) }()
	time.Sleep(50 * time.Millisecond)
	if !log.has(0) {
		t.Errorf("it is taken away: %v", log.all())
	}
	mem.setHold(false)
	mem.wake()
	if errno := <-written; errno != blk.OK {
		t.Errorf("write: errno %d", errno)
	}
	must(t, <-closed)
	eventually(t, "the memory is taken away", func() bool { return !log.has(0) })
}

// taken is how many requests have reached the plugin.
func (m *memory) taken() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.seen)
}

// The next process is not shown what the one before had to let go.
func TestNextProcessIsNotShownWhatWasTakenAway(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	mem.add("b", 1<<20)
	var log arenaLog
	r := newRig(t, mem, log.wrap)
	s0, s1 := r.connect("s0"), r.connect("s1")
	rsp, err := s0.open("a", blk.ReadWrite)
	must(t, err)
	other, err := s1.open("b", blk.ReadWrite)
	must(t, err)
	must(t, s0.closeDevice(rsp.DeviceID))
	eventually(t, "the memory is taken away", func() bool { return !log.has(0) })
	r.process().Kill()
	if errno := s1.rw(other.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("write after the plugin's death: errno %d", errno)
	}
	if log.has(0) || !log.has(1) {
		t.Errorf("%v", log.all())
	}
	s0.close()
	eventually(t, "the index is free", func() bool { return r.server.sessionAt(0) == nil })
}
