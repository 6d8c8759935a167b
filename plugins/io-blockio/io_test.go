package main

import (
	"bytes"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

func TestMain(m *testing.M) { plugintest.Main(m, main) }

// onBothEngines runs f with each engine that works here.
func onBothEngines(t *testing.T, f func(t *testing.T)) {
	for _, engine := range []string{"uring", "threads"} {
		t.Run(engine, func(t *testing.T) {
			if err := uring.Supported(); engine == "uring" && err != nil {
				t.Skipf("no io_uring here: %v", err)
			}
			t.Setenv(uring.EngineEnv, engine)
			f(t)
		})
	}
}

func TestConformance(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		path, _ := loopDevice(t, 8<<20, 0)
		plugintest.RunIO(t, &blockBackend{}, plugintest.Options{Path: path, HeapRing: true, Span: 512 << 10})
	})
}

func TestConformance_AsProcess(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path, _ := loopDevice(t, 8<<20, 0)
	plugintest.RunIO(t, nil, plugintest.Options{Executable: exe, Path: path, Configure: map[string]string{"engine": "auto"}})
}

func TestMisalignedMemoryIsBouncedAndCounted(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		path, _ := loopDevice(t, 1<<20, 0)
		b := &blockBackend{}
		t.Cleanup(func() { // after the plugin has stopped
			if got := b.Counters().BouncedBytes.Load(); got != 2*8192 {
				t.Errorf("%d bytes bounced, want %d", got, 2*8192)
			}
		})
		h := plugintest.StartIO(t, b, plugintest.Options{Path: path})
		want := bytes.Repeat([]byte("misalign"), 1024)
		copy(h.Memory.Bytes()[7:], want)
		if e := h.Do(shm.SQE{Op: blk.Write, Offset: 4096, Len: 8192, ArenaOff: 7}); e != blk.OK {
			t.Fatal(e)
		}
		if e := h.Do(shm.SQE{Op: blk.Read, Offset: 4096, Len: 8192, ArenaOff: 65536}); e != blk.OK {
			t.Fatal(e)
		}
		if !bytes.Equal(h.Memory.Bytes()[65536:][:8192], want) {
			t.Error("an aligned read returns other bytes")
		}
		if e := h.Do(shm.SQE{Op: blk.Read, Offset: 4096, Len: 8192, ArenaOff: 131075}); e != blk.OK {
			t.Fatal(e)
		}
		if !bytes.Equal(h.Memory.Bytes()[131075:][:8192], want) {
			t.Error("a misaligned read returns other bytes")
		}
	})
}

func TestADeviceThatShrinksFailsOnlyWhatItLost(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		path, dev := loopDevice(t, 8<<20, 0)
		h := plugintest.StartIO(t, &blockBackend{}, plugintest.Options{Path: path})
		setSizeLimit(t, dev, 1<<20)
		got := h.All([]shm.SQE{
			{Op: blk.Read, Offset: 4 << 20, Len: 4096},
			{Op: blk.Write, Offset: 4 << 20, Len: 4096},
			{Op: blk.Write, Offset: 0, Len: 4096},
			{Op: blk.Read, Offset: 0, Len: 4096},
		})
		if got[0] == blk.OK || got[1] == blk.OK {
			t.Errorf("I/O behind the new end: %v", got[:2])
		}
		if got[2] != blk.OK || got[3] != blk.OK {
			t.Errorf("I/O before the new end: %v", got[2:])
		}
	})
}

func setSizeLimit(t *testing.T, dev *os.File, size uint64) {
	t.Helper()
	info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	info.Sizelimit = size
	if err := unix.IoctlLoopSetStatus64(int(dev.Fd()), info); err != nil {
		t.Fatal(err)
	}
}

func TestADeviceThatFailsFailsOnlyItsRequests(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		// A loop device over a sparse file on a full file system.
		dir := t.TempDir()
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1M"); err != nil {
			t.Skipf("needs the right to mount a tmpfs: %v", err)
		}
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
		path, _ := loopOver(t, dir, 16<<20, 0)
		h := plugintest.StartIO(t, &blockBackend{}, plugintest.Options{Path: path})
		const n = 64 << 10
		var writes []shm.SQE
		for i := range uint64(64) {
			writes = append(writes, shm.SQE{Op: blk.Write, Offset: i * n, Len: n})
		}
		var bad, good []int
		for i, e := range h.All(writes) {
			switch e {
			case blk.OK:
				good = append(good, i)
			case blk.EIO, blk.ENOSPC:
				bad = append(bad, i)
			default:
				t.Fatalf("write %d: %v", i, e)
			}
		}
		if len(bad) == 0 || len(good) == 0 {
			t.Fatalf("%d writes failed, %d did not: the test wants both", len(bad), len(good))
		}
		if e := h.Do(writes[good[0]]); e != blk.OK {
			t.Errorf("a write of what is there already: %v", e)
		}
	})
}

func TestNothingIsAllocatedPerRequest(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		path, _ := loopDevice(t, 8<<20, 0)
		h := plugintest.StartIO(t, &blockBackend{}, plugintest.Options{Path: path})
		var es []shm.SQE
		for i := range uint64(2000) {
			e := shm.SQE{Op: blk.Op(i % 2), Offset: i % 512 * 4096, Len: 4096, ArenaOff: i % 512 * 4096}
			if i%50 == 0 {
				e = shm.SQE{Op: blk.Flush}
			}
			es = append(es, e)
		}
		h.All(es)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		h.All(es)
		runtime.ReadMemStats(&after)
		if n := after.Mallocs - before.Mallocs; n > uint64(len(es))/10 {
			t.Errorf("%d allocations for %d requests, host and test included", n, len(es))
		}
	})
}
