package faults

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

const (
	device   = 1
	arenaID  = 1
	slotSize = 8 << 10
	slots    = 64
	enough   = 15 * time.Second // nothing that goes well takes longer
)

var builds struct {
	sync.Mutex
	dir  string
	done map[string]string
}

func TestMain(m *testing.M) {
	if addr := os.Getenv(floodEnv); addr != "" {
		flood(addr)
		os.Exit(0)
	}
	if b := os.Getenv(standIn); b != "" {
		standBetween(b)
	}
	if os.Getenv(nextProcess) != "" {
		actAsNextProcess(filepath.Base(os.Args[0]))
	}
	code := lab.Run(m, core...)
	if builds.dir != "" {
		os.RemoveAll(builds.dir)
	}
	os.Exit(code)
}

// core are the tests of make test: one of each kind of fault.
var core = []string{
	"TestKillingAnIOPluginUnderLoad",
	"TestKillingTheFrontEnd",
	"TestAClientRestartsUnderVerifiedLoads",
	"TestLossQueueCarriesAServerRestart",
	"TestLossFailEndsRequestsAtOnce",
	"TestACutPathIsLeftAtOnce",
	"TestPathsComeAndGoUnderLoad",
	"TestServerUpgradeUnderLoad",
	"TestClientUpgradeUnderLoad",
	"TestADiskThatFails",
	"TestOpenAfterAKillReturnsOnlyWhenTheOldWritesHaveEnded",
}

// executable builds a plugin once.
func executable(t *testing.T, name string) string {
	t.Helper()
	builds.Lock()
	defer builds.Unlock()
	if path := builds.done[name]; path != "" {
		return path
	}
	if builds.dir == "" {
		dir, err := os.MkdirTemp("", "rnbd-faults-")
		if err != nil {
			t.Fatal(err)
		}
		builds.dir, builds.done = dir, map[string]string{}
	}
	path := filepath.Join(builds.dir, name)
	out, err := exec.Command("go", "build", "-o", path, "../../plugins/"+name).CombinedOutput()
	if err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	builds.done[name] = path
	return path
}

// host is a host with one generation of a plugin in a process of its own.
type host struct {
	t     *testing.T
	disk  *slowdisk.Disk
	p     *plugin.Process
	ring  *shm.Ring
	sub   *shm.Submitter
	arena *shm.Arena
	done  map[uint64]blk.Errno

	killed bool
}

func launch(t *testing.T, d *slowdisk.Disk, name, engine string) *host {
	t.Helper()
	if err := uring.Supported(); engine == "uring" && err != nil {
		t.Skipf("no io_uring here: %v", err)
	}
	path := executable(t, name) // the executable may have to be built
	ctx, cancel := context.WithTimeout(context.Background(), enough)
	defer cancel()
	p, err := plugin.Launch(ctx, plugin.Config{
		Path: path, Kind: plugin.KindIO, Env: []string{uring.EngineEnv + "=" + engine},
	})
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, disk: d, p: p, done: map[uint64]blk.Errno{}}
	t.Cleanup(h.stop)
	if h.ring, err = shm.NewRing(shm.DefaultEntries); err != nil {
		t.Fatal(err)
	}
	if h.arena, err = shm.NewArena("faults", (slots+1)*slotSize); err != nil {
		t.Fatal(err)
	}
	h.sub = h.ring.Submitter()
	if err := p.AttachQueue(ctx, 0, h.ring); err != nil {
		t.Fatal(err)
	}
	if err := p.AttachArena(ctx, arenaID, h.arena); err != nil {
		t.Fatal(err)
	}
	return h
}

// stop lets the medium go first: a process with I/O in it does not end.
func (h *host) stop() {
	h.disk.Release()
	select {
	case <-h.p.Exited():
	default:
		ctx, cancel := context.WithTimeout(context.Background(), enough)
		defer cancel()
		if err := h.p.Stop(ctx); err != nil && !h.killed {
			h.t.Errorf("stop: %v", err)
		}
	}
	if h.ring != nil {
		h.ring.Close()
	}
	if h.arena != nil {
		h.arena.Close()
	}
}

func (h *host) open(ctx context.Context, index uint32, path string, mode blk.AccessMode) error {
	f, err := os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = h.p.OpenDisk(ctx, plugin.OpenRequest{
		Device: index, Name: filepath.Base(path), Mode: mode, ReadOnly: mode == blk.ReadOnly, File: f, Generation: 1,
	})
	return err
}

func (h *host) mustOpen(index uint32, path string, mode blk.AccessMode) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), enough)
	defer cancel()
	if err := h.open(ctx, index, path, mode); err != nil {
		h.t.Fatal(err)
	}
}

// kill kills the plugin and waits until no thread of it runs any more. Threads
// that have I/O in the medium live on in the kernel until that has ended: so
// the process cannot be reaped, and its descriptors stay open.
func (h *host) kill() {
	h.t.Helper()
	h.signal()
	for deadline := time.Now().Add(enough); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if !runs(h.p.PID()) {
			return
		}
	}
	h.t.Fatal("the plugin does not die")
}

// signal kills the plugin and does not wait.
func (h *host) signal() {
	h.t.Helper()
	h.killed = true
	if err := unix.Kill(h.p.PID(), unix.SIGKILL); err != nil {
		h.t.Fatal(err)
	}
}

// runs reports whether a thread of the process may come back from the kernel:
// one that is neither dead nor in an uninterruptible sleep.
func runs(pid int) bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, stat := range stats {
		b, err := os.ReadFile(stat)
		if err != nil {
			continue
		}
		_, state, _ := bytes.Cut(b, []byte(") "))
		if len(state) > 0 && !bytes.ContainsAny(state[:1], "DZX") {
			return true
		}
	}
	return false
}

// request is one 4 KiB I/O of slot tag at block tag, skew bytes off alignment.
func request(op blk.Op, tag uint64, skew uint64) shm.SQE {
	return shm.SQE{
		Op: op, Tag: tag, Device: device, Arena: arenaID, Len: 4096,
		Offset: tag * 4096, ArenaOff: tag*slotSize + skew,
	}
}

// write starts a write of fill.
func (h *host) write(tag uint64, fill byte, skew uint64) {
	h.t.Helper()
	mem := h.arena.Bytes()[tag*slotSize:][:slotSize]
	for i := range mem {
		mem[i] = fill
	}
	h.start(request(blk.Write, tag, skew))
}

func (h *host) start(e shm.SQE) {
	h.t.Helper()
	delete(h.done, e.Tag)
	if !h.sub.Push(&e) {
		h.t.Fatal("the ring is full")
	}
	h.sub.Publish()
}

// poll takes the answers that are there and returns all so far.
func (h *host) poll() map[uint64]blk.Errno {
	var cqes [slots]shm.CQE
	for _, c := range cqes[:h.sub.Pop(cqes[:])] {
		h.done[c.Tag] = blk.Errno(c.Errno)
	}
	return h.done
}

// wait waits for the answer to tag.
func (h *host) wait(tag uint64) blk.Errno {
	h.t.Helper()
	for deadline := time.Now().Add(enough); time.Now().Before(deadline); time.Sleep(200 * time.Microsecond) {
		if e, ok := h.poll()[tag]; ok {
			return e
		}
	}
	h.t.Fatalf("no answer to request %d in %v", tag, enough)
	return 0
}
