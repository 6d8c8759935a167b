package server

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// openAsync sends an OPEN without waiting for its answer.
func (i *initiator) openAsync(name string) {
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = i.open(name, blk.ReadWrite) })
	i.t.Cleanup(wg.Wait)
}

// adminUnderWay is how many messages of the session at the index are being served
// off the pumps.
func (r *rig) adminUnderWay(index uint32) int {
	s := r.server.sessionAt(index)
	if s == nil {
		return 0
	}
	return int(s.holds.Load()) - 1
}

// An OPEN that outlives its session leaves neither a writer nor memory in the
// plugin. Until then the session's index is not used again.
func TestAnOpenThatOutlivesItsSession(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	mem.add("b", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.RetireAfter = 20 * time.Millisecond })
	gate := mem.setGate()
	first := r.connect("first")
	first.openAsync("a")
	eventually(t, "the plugin is asked to open", func() bool { return mem.opened() == 1 })
	first.openAsync("b") // waits for the other one
	eventually(t, "both are under way", func() bool { return r.adminUnderWay(0) == 2 })
	first.close()
	eventually(t, "the session is gone", func() bool { return len(r.server.front.Load().rtrs.Sessions()) == 0 })

	second := r.connect("second")
	eventually(t, "the next session has another index", func() bool { return r.server.sessionAt(1) != nil })
	close(gate)
	var ids []uint32
	for _, name := range []string{"a", "b"} {
		dev, err := second.open(name, blk.ReadWrite)
		must(t, err)
		ids = append(ids, dev.DeviceID)
	}
	eventually(t, "the first session is forgotten", func() bool { return r.server.sessionAt(0) == nil })
	p := r.server.plugins[0]
	p.mu.Lock()
	known := len(p.shown)
	p.mu.Unlock()
	if known != 1 {
		t.Errorf("the plugin has the memory of %d sessions, want 1", known)
	}
	r.process().Kill()
	for _, id := range ids {
		if errno := second.rw(id, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
			t.Errorf("write after the plugin's death: errno %d", errno)
		}
	}
	if n := r.launched(); n != 2 {
		t.Errorf("%d processes were started, want 2", n)
	}
}

// A CLOSE that waits for a disk that hangs does not keep the server from closing.
func TestServerClosesWhileADiskHangs(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	dev, err := i.open("a", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	i.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
	eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })
	m := r.server.sessionAt(0).openMappings()[0]
	var wg sync.WaitGroup
	wg.Go(func() { _ = i.closeDevice(dev.DeviceID) })
	t.Cleanup(wg.Wait)
	eventually(t, "the device is being closed", m.closed.Load)

	r.closed = true
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		if err := r.server.Close(ctx); err == nil {
			t.Error("close is content, though a request had not ended")
		}
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("the server does not close")
	}
	select {
	case <-r.process().Exited():
	default:
		t.Error("the plugin lives on")
	}
}

// logHook calls back when a message is logged, before anything else happens.
type logHook struct {
	slog.Handler
	message string
	call    func()
}

func (h *logHook) Enabled(context.Context, slog.Level) bool { return true }
func (h *logHook) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h *logHook) WithGroup(string) slog.Handler            { return h }
func (h *logHook) Handle(_ context.Context, r slog.Record) error {
	if r.Message == h.message {
		h.call()
	}
	return nil
}

// A device that is closed after a new process has opened it again, and before it
// is ready, is not left open there.
func TestClosedBetweenOpenedAgainAndReady(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	opened, goOn := make(chan struct{}), make(chan struct{})
	r := newRig(t, mem, func(c *Config) {
		c.Logger = slog.New(&logHook{Handler: slog.DiscardHandler, message: "device resized", call: func() {
			close(opened)
			<-goOn
		}})
	})
	i := r.connect("s")
	dev, err := i.open("a", blk.ReadWrite)
	must(t, err)
	mem.mu.Lock()
	disk := mem.add("a", 2<<20) // the disk of the next process
	mem.mu.Unlock()
	r.process().Kill()
	<-opened
	err = i.closeDevice(dev.DeviceID)
	close(goOn)
	must(t, err)
	eventually(t, "the new process has closed it", func() bool { return disk.closes.Load() == 1 })
}

// A device is not stuck if its fence opens at the moment when its time ends.
func TestFenceOpensAsTheTimeEnds(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	late, goOn := make(chan struct{}), make(chan struct{})
	r := newRig(t, mem, func(c *Config) {
		c.FenceTimeout = 20 * time.Millisecond
		c.Logger = slog.New(&logHook{Handler: slog.DiscardHandler, message: "device is stuck: I/O of the dead plugin has not ended", call: func() {
			close(late)
			<-goOn
		}})
	})
	i := r.connect("s")
	_, err := i.open("a", blk.ReadWrite)
	must(t, err)
	d := r.server.openDevices()[0]
	gate := mem.setGate()
	r.process().Kill()
	<-late
	close(gate)
	time.Sleep(50 * time.Millisecond)
	close(goOn)
	eventually(t, "the device is back", d.isServing)
	if s := d.stateText(); s != "open" {
		t.Errorf("it is shown as %q", s)
	}
}

// The memory of a session that ends while a new process is shown that of the
// others is not shown to it: it is gone, and its number may be another's.
func TestSessionEndsWhileArenasAreAttachedAgain(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	mem.add("b", 1<<20)
	r := newRig(t, mem)
	clients := []*initiator{r.connect("s0"), r.connect("s1")}
	names := []string{"a", "b"}
	for k, name := range names {
		_, err := clients[k].open(name, blk.ReadWrite)
		must(t, err)
	}
	attaching, goOn := make(chan uint32, 2), make(chan struct{})
	mem.mu.Lock()
	mem.attaching = func(arena uint32) {
		attaching <- arena
		<-goOn
	}
	mem.mu.Unlock()
	r.process().Kill()
	stays := <-attaching
	clients[1-stays].close()
	eventually(t, "the other session is gone", func() bool { return len(r.server.front.Load().rtrs.Sessions()) == 1 })
	mem.mu.Lock()
	mem.attaching = nil
	mem.mu.Unlock()
	close(goOn)
	if errno := clients[stays].rw(0, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("write after the plugin's death: errno %d", errno)
	}
	if n := r.launched(); n != 2 {
		t.Errorf("%d processes were started, want 2", n)
	}
	third := r.connect("s2") // with the index of the one that ended
	_, err := third.open(names[1-stays], blk.ReadWrite)
	must(t, err)
	if r.server.sessionAt(1-stays).name != "s2" {
		t.Errorf("session s2 has not the free index %d", 1-stays)
	}
}

// A process that is started while the server is being closed ends with it.
func TestCloseDuringARestart(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	starting, closing := make(chan struct{}), make(chan struct{})
	r := newRig(t, mem, func(c *Config) {
		launch, first := c.Launch, true
		c.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
			if !first {
				close(starting)
				<-closing
			}
			first = false
			return launch(ctx, pc)
		}
	})
	r.process().Kill()
	<-starting
	closed := make(chan error)
	go func() { closed <- r.server.plugins[0].stopProcess(t.Context()) }()
	eventually(t, "the plugin is being stopped", func() bool { return r.server.plugins[0].life.Err() != nil })
	close(closing)
	must(t, <-closed)
	select {
	case <-r.process().Exited():
	case <-time.After(10 * time.Second):
		t.Error("the process that was being started lives on")
	}
}
