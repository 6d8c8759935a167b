package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/diskio"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// fileDisk is a disk in memory with a file that is locked like those of real
// plugins.
type fileDisk struct {
	*memDisk
	f *os.File
}

func (d *fileDisk) Close() error {
	d.memDisk.closes.Add(1)
	return d.f.Close()
}

// filesOf makes m a plugin that is asked for paths, and returns the folder of its
// files.
func filesOf(t *testing.T, m *memory, names ...string) string {
	t.Helper()
	m.names = plugin.NamesPath
	dir := t.TempDir()
	for _, name := range names {
		must(t, os.WriteFile(filepath.Join(dir, name), make([]byte, 1<<20), 0o600))
		m.add(name, 1<<20)
	}
	m.wrap = func(ctx context.Context, r plugin.OpenRequest, d *memDisk) (plugin.Disk, error) {
		f, err := diskio.Open(ctx, r, diskio.AccessFlags(r), 0)
		if err != nil {
			return nil, err
		}
		return &fileDisk{d, f}, nil
	}
	return dir
}

// Devices come back by themselves, however many there are.
func TestPluginDiesWithManyDevices(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	var names []string
	for k := range 130 {
		names = append(names, fmt.Sprintf("disk%03d", k))
	}
	dir := filesOf(t, mem, names...)
	r := newRig(t, mem, func(c *Config) { c.SearchPath = dir })
	i := r.connect("s")
	var ids []uint32
	for _, name := range names {
		dev, err := i.open(name, blk.ReadWrite)
		must(t, err)
		ids = append(ids, dev.DeviceID)
	}
	r.process().Kill()
	for _, id := range ids {
		if errno := i.rw(id, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
			t.Fatalf("device %d: errno %d", id, errno)
		}
	}
	for _, d := range r.server.openDevices() {
		if s := d.stateText(); s != "open" {
			t.Errorf("%s is %q", d.name, s)
		}
	}
}

// A disk that does not open holds up no other, and comes back when it does.
func TestDeviceThatDoesNotOpenAgainIsTriedAgain(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("good", 1<<20)
	mem.add("bad", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.FenceTimeout = 50 * time.Millisecond })
	i := r.connect("s")
	good, err := i.open("good", blk.ReadWrite)
	must(t, err)
	bad, err := i.open("bad", blk.ReadWrite)
	must(t, err)
	mem.setFail("bad", syscall.ENXIO)
	r.process().Kill()
	if errno := i.rw(good.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("the other device: errno %d", errno)
	}
	eventually(t, "the device is failed", func() bool { return r.server.openDevicesByName("bad").isFailing() })
	if errno := i.rw(bad.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.EIO {
		t.Errorf("a request of the device: errno %d, want EIO", errno)
	}
	if _, err := r.connect("t").open("bad", blk.Migration); !errors.Is(err, syscall.EIO) {
		t.Errorf("OPEN: %v, want EIO", err)
	}
	mem.setFail("bad", nil)
	eventually(t, "the device is back", func() bool { return r.deviceState("bad") == "open" })
	if errno := i.rw(bad.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("after its return: errno %d", errno)
	}
}

// One crash and starts that fail are one crash; requests wait, and go on.
func TestPluginThatDoesNotStartForAWhile(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	fails := 4
	r := newRig(t, mem, func(c *Config) {
		launch, n := c.Launch, 0
		c.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
			if n++; n > 1 && n <= 1+fails {
				return nil, errors.New("no memory for it")
			}
			return launch(ctx, pc)
		}
	})
	i := r.connect("s")
	dev, err := i.open("a", blk.ReadWrite)
	must(t, err)
	r.process().Kill()
	if errno := i.rw(dev.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("a write after a crash and %d failed starts: errno %d", fails, errno)
	}
	if s := r.deviceState("a"); s != "open" {
		t.Errorf("it is %q", s)
	}
}

// giveUp kills the plugin until it is given up. The last process dies by last.
func (r *rig) giveUp(name string, last func()) {
	r.t.Helper()
	for range 2 {
		n := r.launched()
		r.process().Kill()
		eventually(r.t, "the plugin is back", func() bool { return r.launched() > n && r.deviceState(name) == "open" })
	}
	last()
	eventually(r.t, "the plugin is given up", func() bool { return r.server.plugins[0].sup.State() == supervise.GivenUp })
}

// A plugin that was given up comes back with its devices, without a new OPEN.
func TestE023_E024_PluginThatIsGivenUpIsReset(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	dev, err := i.open("a", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	var held <-chan int
	r.giveUp("a", func() {
		sent := len(mem.requests())
		held = i.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
		eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) > sent })
		r.process().Kill()
	})
	if e := await(t, i.listen(0)); e.err != nil || e.Kind != rnbdwire.EventFailed || e.DeviceID != dev.DeviceID {
		t.Errorf("clients are told %+v, want that it has failed", e)
	}
	eventually(t, "the device is failed", func() bool { return r.deviceState("a") == "failed: plugin memory crashes too often" })
	if errno := i.bare(dev.DeviceID, blk.Flush, 0, 0, 0, false); errno != blk.EIO {
		t.Errorf("a new request: errno %d, want EIO", errno)
	}
	select {
	case errno := <-held:
		t.Errorf("a request that the dead process had is answered with %d, though nobody knows that its I/O has ended", errno)
	case <-time.After(50 * time.Millisecond):
	}
	mem.setHold(false)
	must(t, r.server.ResetPlugin(t.Context(), "memory"))
	if errno := i.await(held); errno != blk.OK {
		t.Errorf("the request that waited: errno %d", errno)
	}
	if e := await(t, i.listen(1)); e.err != nil || e.Kind != rnbdwire.EventBack || e.Sectors != dev.Sectors {
		t.Errorf("clients are told %+v, want that it is back", e)
	}
	if errno := i.bare(dev.DeviceID, blk.Flush, 0, 0, 0, false); errno != blk.OK {
		t.Errorf("after the reset: errno %d", errno)
	}
	if err := r.server.ResetPlugin(t.Context(), "other"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("reset of a plugin that is none: %v, want ENOENT", err)
	}
}

// A device that has failed for good is opened again by the next OPEN of its session,
// under another id, when its plugin runs.
func TestE023_OpenOfADeviceThatIsLost(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.LosesAll
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	dev, err := i.open("a", blk.ReadWrite)
	must(t, err)
	news := i.listen(0)
	p := r.server.plugins[0]
	for p.sup.State() != supervise.GivenUp {
		n := r.launched()
		r.process().Kill()
		eventually(t, "the plugin is back or given up", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.in != nil && r.launched() > n || p.sup.State() == supervise.GivenUp
		})
	}
	if e := await(t, news); e.err != nil || e.Kind != rnbdwire.EventFailed || e.DeviceID != dev.DeviceID {
		t.Errorf("clients are told %+v, want that it has failed", e)
	}
	eventually(t, "the device is lost", func() bool { return r.deviceState("a") == "failed: plugin state lost" })
	if _, err := i.open("a", blk.ReadWrite); !errors.Is(err, syscall.EIO) {
		t.Errorf("OPEN while the plugin does not run: %v, want EIO", err)
	}
	must(t, r.server.ResetPlugin(t.Context(), "memory"))
	again, err := i.open("a", blk.ReadWrite)
	must(t, err)
	if again.DeviceID == dev.DeviceID {
		t.Errorf("the id is %d still", dev.DeviceID)
	}
	if errno := i.rw(again.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("a write then: errno %d", errno)
	}
	if errno := i.rw(dev.DeviceID, blk.Write, 0, make([]byte, 512)); errno == blk.OK {
		t.Error("a write with the old id succeeds")
	}
}

// Requests that a dead process had are answered when its locks have gone, and not
// before: its I/O may still reach their chunks.
func TestRequestsOfAFailedDeviceWaitForTheFence(t *testing.T) {
	for _, c := range []struct {
		name  string
		crash plugin.CrashClass
	}{
		{"its plugin is given up", plugin.KeepsAcknowledged},
		{"what it held is lost", plugin.KeepsFlushed},
	} {
		t.Run(c.name, func(t *testing.T) {
			mem := newMemory()
			mem.crash = c.crash
			dir := filesOf(t, mem, "a")
			r := newRig(t, mem, func(cfg *Config) {
				cfg.SearchPath = dir
				if c.crash == plugin.KeepsAcknowledged {
					cfg.CrashLimit = 1
				}
			})
			i := r.connect("s")
			dev, err := i.open("a", blk.ReadWrite)
			must(t, err)
			io := mem.lastDisk().(*fileDisk).keepIO(t) // as requests that the kernel still has
			mem.setHold(true)
			write := i.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
			eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })
			r.process().Kill()
			eventually(t, "the device fails", func() bool { return r.server.openDevicesByName("a").isFailing() })
			if errno := i.bare(dev.DeviceID, blk.Flush, 0, 0, 0, false); errno != blk.EIO {
				t.Errorf("a new request: errno %d, want EIO", errno)
			}
			select {
			case errno := <-write:
				t.Errorf("answered with %d before its I/O has ended", errno)
			case <-time.After(100 * time.Millisecond):
			}
			must(t, io.Close())
			if errno := i.await(write); errno != blk.EIO {
				t.Errorf("after the fence: errno %d, want EIO", errno)
			}
		})
	}
}

// TestAnAnswerToNoRequest_EndsThePlugin: the request that it means has no answer, and is
// sent again to the next process.
func TestAnAnswerToNoRequest_EndsThePlugin(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	r := newRig(t, mem, func(cfg *Config) { cfg.SearchPath = filesOf(t, mem, "a") })
	i := r.connect("s")
	dev, err := i.open("a", blk.ReadWrite)
	must(t, err)
	for n, tag := range []uint64{1 << 63, 3} { // no session; a chunk without a request
		mem.setHold(true)
		flush := i.start(false, 0, ioMessage(dev.DeviceID, blk.Flush, 0, 0, 0))
		eventually(t, "the plugin has the request", func() bool { return len(mem.requests()) == 2*n+1 })
		q := r.server.plugins[0].queues[0]
		r.server.pumps[0].pump.Call(func() { q.onDone(&shm.CQE{Tag: tag}) })
		eventually(t, "the next process", func() bool { return r.launched() == n+2 })
		mem.setHold(false)
		if errno := i.await(flush); errno != blk.OK {
			t.Errorf("tag %#x: errno %d", tag, errno)
		}
	}
}

// keepIO keeps the description of d's file in use until the return value is closed.
func (d *fileDisk) keepIO(t *testing.T) *os.File {
	t.Helper()
	fd, err := syscall.Dup(int(d.f.Fd()))
	must(t, err)
	return os.NewFile(uintptr(fd), "in flight")
}

// A server that waits for a file writes to it after all that the other server
// sends again, not between the death of a process and the next one.
func TestAnotherServerWaitsForTheReplay(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	dir := filesOf(t, mem, "a")
	restart := make(chan struct{})
	first := newRig(t, mem, func(c *Config) {
		c.SearchPath = dir
		launch, n := c.Launch, 0
		c.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
			if n++; n > 1 {
				<-restart
			}
			return launch(ctx, pc)
		}
	})
	mem2 := newMemory()
	mem2.crash = plugin.KeepsAcknowledged
	mem2.names, mem2.wrap = mem.names, mem.wrap
	mem2.add("a", 1<<20)
	second := newRig(t, mem2, func(c *Config) { c.SearchPath = dir })

	i := first.connect("s")
	dev, err := i.open("a", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	write := i.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
	eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })
	opened := make(chan error, 1)
	j := second.connect("s")
	var wg sync.WaitGroup
	wg.Go(func() { _, err := j.open("a", blk.ReadWrite); opened <- err })
	defer wg.Wait()
	first.process().Kill()
	time.Sleep(100 * time.Millisecond) // many times the time that a waiting plugin needs
	select {
	case err := <-opened:
		t.Errorf("the other server opens the file (%v) before the replay", err)
	default:
	}
	mem.setHold(false)
	close(restart)
	if errno := i.await(write); errno != blk.OK {
		t.Errorf("the write that is sent again: errno %d", errno)
	}
	must(t, i.closeDevice(dev.DeviceID))
	select {
	case err := <-opened:
		must(t, err)
	case <-time.After(15 * time.Second):
		t.Error("the other server does not open the file after the first has closed it")
	}
}

// The number of a session's memory is not used again while a plugin may know it.
func TestMemoryThatAPluginDoesNotRelease(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	var refuse sync.Mutex
	refusals := 2
	r := newRig(t, mem, func(c *Config) {
		launch := c.Launch
		c.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
			p, err := launch(ctx, pc)
			return &noDetach{p, func() error {
				refuse.Lock()
				defer refuse.Unlock()
				if refusals--; refusals >= 0 {
					return context.DeadlineExceeded
				}
				return nil
			}}, err
		}
	})
	for range 3 {
		i := r.connect("s")
		if _, err := i.open("a", blk.ReadWrite); err != nil {
			t.Error(err)
		}
		i.close()
	}
	eventually(t, "the memory is released in the end", func() bool { return r.server.sessionAt(0) == nil })
}

// noDetach is a process that refuses to detach arenas as long as refuse says so.
type noDetach struct {
	supervise.Process
	refuse func() error
}

func (p *noDetach) DetachArena(ctx context.Context, id uint32) error {
	if err := p.refuse(); err != nil {
		return err
	}
	return p.Process.DetachArena(ctx, id)
}

// Close ends soon after its time, whatever hangs: a plugin's process that cannot be
// killed, and an OPEN in it.
func TestServerClosesInTime(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	asked, goOn := make(chan struct{}), make(chan struct{})
	r := newRig(t, mem, func(c *Config) {
		launch := c.Launch
		c.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
			p, err := launch(ctx, pc)
			return &hung{p, asked, goOn}, err
		}
	})
	i := r.connect("s")
	i.openAsync("a")
	<-asked
	r.closed = true
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	ended := make(chan error)
	go func() { ended <- r.server.Close(ctx) }()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("close is content")
		}
	case <-time.After(8 * time.Second):
		t.Error("the server does not close")
	}
	close(goOn)
	r.process().Kill()
}

// hung is a process in the kernel's hands.
type hung struct {
	supervise.Process
	asked, goOn chan struct{}
}

func (p *hung) Kill() {}

func (p *hung) Stop(context.Context) error {
	<-p.goOn
	return nil
}

func (p *hung) OpenStorage(context.Context, plugin.OpenRequest) (plugin.OpenedDisk, error) {
	close(p.asked)
	<-p.goOn
	return plugin.OpenedDisk{}, plugin.ErrExited
}

// openDevicesByName returns the device of that name.
func (s *Server) openDevicesByName(name string) *device {
	for _, d := range s.openDevices() {
		if d.name == name {
			return d
		}
	}
	return nil
}

// launchBehind makes starts of processes after the first one wait until restart is
// closed.
func launchBehind(restart <-chan struct{}) func(*Config) {
	return func(c *Config) {
		launch, n := c.Launch, 0
		c.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
			if n++; n > 1 {
				select {
				case <-restart:
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			return launch(ctx, pc)
		}
	}
}

// An OPEN during the restart of the plugin waits for the next process: of a device that
// nobody has open, of one that another session has open, and of one that was lost with
// the process.
func TestOpenWaitsForTheNextProcessOfThePlugin(t *testing.T) {
	for name, x := range map[string]struct {
		crash  plugin.CrashClass
		before []string // sessions that have it open
	}{
		"new":                 {plugin.KeepsAcknowledged, nil},
		"open in another":     {plugin.KeepsAcknowledged, []string{"other"}},
		"lost with a process": {plugin.LosesAll, []string{"s"}},
	} {
		t.Run(name, func(t *testing.T) {
			mem := newMemory()
			mem.crash = x.crash
			mem.add("a", 1<<20)
			restart := make(chan struct{})
			r := newRig(t, mem, launchBehind(restart))
			i := r.connect("s")
			for _, session := range x.before {
				j := i
				if session != "s" {
					j = r.connect(session)
				}
				_, err := j.open("a", blk.ReadOnly)
				must(t, err)
			}
			r.process().Kill()
			p := r.server.plugins[0]
			eventually(t, "the plugin is being restarted", func() bool { _, err := p.sup.Current(); return errors.Is(err, syscall.EBUSY) })
			opened := make(chan error, 1)
			go func() { _, err := i.open("a", blk.ReadOnly); opened <- err }()
			select {
			case err := <-opened:
				t.Fatalf("OPEN during the restart: %v, want that it waits", err)
			case <-time.After(50 * time.Millisecond):
			}
			close(restart)
			must(t, await(t, opened))
		})
	}
}
