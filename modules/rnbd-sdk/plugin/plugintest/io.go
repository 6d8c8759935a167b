package plugintest

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Options say how to run a plugin. The zero value is fine for a backend with
// opaque names.
type Options struct {
	Name       string            // of the disk; empty: "disk"
	Path       string            // of the node, for backends with paths as names; opened O_PATH
	ReadOnly   bool              // open it so
	Configure  map[string]string // settings of the plugin
	Entries    int               // of the ring; 0: 128
	ArenaSize  int               // bytes; 0: 8 MiB
	HeapRing   bool              // a ring that the race detector can watch; not with Executable
	Executable string            // run this plugin as a process, not the backend given
	Seed       uint64            // of random patterns; 0: the time. It is logged.
	Span       int               // bytes of the disk that the suite touches, half at each end; 0: 2 MiB
	Logger     *slog.Logger      // of the plugin; nil: nothing is shown
}

func (o Options) withDefaults() Options {
	if o.Name == "" {
		o.Name = "disk"
	}
	if o.Entries == 0 {
		o.Entries = 128
	}
	if o.ArenaSize == 0 {
		o.ArenaSize = 8 << 20
	}
	if o.Span == 0 {
		o.Span = 2 << 20
	}
	if o.Seed == 0 {
		o.Seed = uint64(time.Now().UnixNano())
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Main runs the tests, or main if this process was started as a plugin. Call
// it from TestMain.
func Main(m *testing.M, main func()) {
	if plugin.StartedByHost() {
		main()
		return
	}
	os.Exit(m.Run())
}

// The numbers of the device and the arena that IO attaches; others are free.
const (
	Device = 1
	Arena  = 2
)

// callTime bounds calls of the control path.
const callTime = 20 * time.Second

// IO is a running plugin with one queue, one arena and one open disk. The test
// is the host: it owns Submitter.
type IO struct {
	Process   *plugin.Process
	Ring      *shm.Ring
	Submitter *shm.Submitter
	Memory    *shm.Arena // attached as Arena
	Limits    blk.Limits // of the open disk

	tb         testing.TB
	o          Options
	generation uint32 // of the process
	isOpen     bool
}

// StartIO starts a plugin, attaches a queue and an arena, and opens the disk as
// Device. Everything is stopped at the end of the test.
func StartIO(tb testing.TB, b plugin.Backend, o Options) *IO {
	tb.Helper()
	h := &IO{tb: tb, o: o.withDefaults()}
	h.start(b)
	h.attach()
	h.Open(h.o.ReadOnly)
	tb.Cleanup(h.stop)
	return h
}

func (h *IO) start(b plugin.Backend) {
	h.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	c := plugin.Config{Kind: plugin.KindIO, Configure: h.o.Configure, Logger: h.o.Logger, Path: h.o.Executable,
		Env: []string{"GORACE=atexit_sleep_ms=0"}} // a race-enabled plugin would take a second to end
	var err error
	if h.o.Executable != "" {
		h.Process, err = plugin.Launch(ctx, c)
	} else {
		h.Process, err = plugin.LaunchInProcess(ctx, c, b)
	}
	h.must("start", err)
	h.generation++
}

// kill ends the process by SIGKILL, with its disk open, and frees the memory
// shared with it.
func (h *IO) kill() {
	h.tb.Helper()
	h.Process.Kill()
	select {
	case <-h.Process.Exited():
	case <-time.After(callTime):
		h.tb.Fatalf("plugintest: the killed plugin has not ended after %v", callTime)
	}
	h.isOpen = false
	h.must("close ring", h.Ring.Close())
	h.must("close arena", h.Memory.Close())
}

func (h *IO) attach() {
	h.tb.Helper()
	newRing := shm.NewRing
	if h.o.HeapRing {
		newRing = shm.NewHeapRing
	}
	var err error
	h.Ring, err = newRing(h.o.Entries)
	h.must("ring", err)
	h.Submitter = h.Ring.Submitter()
	h.Memory, err = shm.NewArena("plugintest", h.o.ArenaSize)
	h.must("arena", err)
	h.call("attach queue", func(ctx context.Context) error { return h.Process.AttachQueue(ctx, 0, h.Ring) })
	h.call("attach arena", func(ctx context.Context) error { return h.Process.AttachArena(ctx, Arena, h.Memory) })
}

// Open opens the disk again, after Close.
func (h *IO) Open(readOnly bool) {
	h.tb.Helper()
	h.Limits = h.openAs(Device, readOnly)
	h.isOpen = true
}

// openAs opens the disk as a device and returns its limits.
func (h *IO) openAs(device uint32, readOnly bool) (l blk.Limits) {
	h.tb.Helper()
	r := plugin.OpenRequest{Device: device, Name: h.o.Name, Mode: blk.ReadWrite, ReadOnly: readOnly, Generation: h.generation}
	if readOnly {
		r.Mode = blk.ReadOnly
	}
	if h.o.Path != "" {
		f, err := openPath(h.o.Path)
		h.must("open", err)
		defer f.Close()
		r.File = f
	}
	h.call("open disk", func(ctx context.Context) (err error) {
		l, err = h.Process.OpenDisk(ctx, r)
		return err
	})
	return l
}

func openPath(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Close closes the disk.
func (h *IO) Close() {
	h.tb.Helper()
	h.call("close disk", func(ctx context.Context) error { return h.Process.CloseDisk(ctx, Device) })
	h.isOpen = false
}

func (h *IO) stop() {
	if h.isOpen {
		h.Close()
	}
	h.call("stop", h.Process.Stop)
	h.must("close ring", h.Ring.Close())
	h.must("close arena", h.Memory.Close())
}

func (h *IO) call(what string, f func(context.Context) error) {
	h.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	h.must(what, f(ctx))
}

func (h *IO) must(what string, err error) {
	h.tb.Helper()
	if err != nil {
		h.tb.Fatalf("plugintest: %s: %v", what, err)
	}
}

// Do runs one request and returns its answer. Device and Arena are filled in
// if they are 0; Tag is not used.
func (h *IO) Do(e shm.SQE) blk.Errno {
	h.tb.Helper()
	return h.All([]shm.SQE{e})[0]
}

// answerTime is how long requests may take.
const answerTime = 20 * time.Second

// All runs requests, as many at once as the ring takes, and returns their
// answers in the order of the requests. Every one must be answered exactly
// once.
func (h *IO) All(es []shm.SQE) []blk.Errno {
	h.tb.Helper()
	errnos := make([]blk.Errno, len(es))
	answered := make([]bool, len(es))
	var cqes [64]shm.CQE
	deadline := time.Now().Add(answerTime)
	for pushed, done := 0, 0; done < len(es); {
		for pushed < len(es) && h.push(es[pushed], uint64(pushed)) {
			pushed++
		}
		h.Submitter.Publish()
		n := h.Submitter.Pop(cqes[:])
		for _, c := range cqes[:n] {
			if c.Tag >= uint64(pushed) || answered[c.Tag] {
				h.tb.Fatalf("plugintest: answer to tag %d, which is not in flight", c.Tag)
			}
			answered[c.Tag], errnos[c.Tag] = true, blk.Errno(c.Errno)
		}
		if done += n; n == 0 {
			h.wait(deadline, pushed-done)
		}
	}
	return errnos
}

func (h *IO) push(e shm.SQE, tag uint64) bool {
	e.Tag = tag
	if e.Device == 0 {
		e.Device = Device
	}
	if e.Arena == 0 {
		e.Arena = Arena
	}
	return h.Submitter.Push(&e)
}

// wait sleeps until an answer may be there.
func (h *IO) wait(deadline time.Time, inFlight int) {
	h.tb.Helper()
	if err := h.Submitter.Err(); err != nil {
		h.tb.Fatalf("plugintest: the plugin broke the ring: %v", err)
	}
	if err := h.Process.ExitError(); err != nil {
		h.tb.Fatalf("plugintest: the plugin died with %d requests in flight: %v", inFlight, err)
	}
	if time.Now().After(deadline) {
		h.tb.Fatalf("plugintest: %d requests are not answered after %v", inFlight, answerTime)
	}
	if h.Submitter.Arm() {
		p := []unix.PollFd{{Fd: int32(h.Submitter.FD()), Events: unix.POLLIN}}
		_, _ = unix.Poll(p, 100)
		h.Submitter.Disarm()
	}
}
