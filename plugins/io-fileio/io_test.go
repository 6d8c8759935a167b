package main

import (
	"bytes"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
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
		t.Run("on a disk's file system", func(t *testing.T) {
			plugintest.RunIO(t, &fileBackend{}, plugintest.Options{Path: file(t, t.TempDir(), 8<<20), HeapRing: true, Span: 512 << 10})
		})
		t.Run("in memory", func(t *testing.T) {
			plugintest.RunIO(t, &fileBackend{}, plugintest.Options{Path: file(t, tmpfs(t, "16M"), 8<<20), HeapRing: true, Span: 512 << 10})
		})
		t.Run("on a block device", func(t *testing.T) {
			plugintest.RunIO(t, &fileBackend{}, plugintest.Options{Path: loopDevice(t), HeapRing: true, Span: 512 << 10})
		})
	})
}

// loopDevice is a block device of 8 MiB.
func loopDevice(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("losetup", "--find", "--show", file(t, t.TempDir(), 8<<20)).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device here: %v: %s", err, out)
	}
	path := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", path).CombinedOutput(); err != nil {
			t.Errorf("detach %s: %v: %s", path, err, out)
		}
	})
	return path
}

func TestConformance_AsProcess(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	plugintest.RunIO(t, nil, plugintest.Options{
		Executable: exe, Path: file(t, t.TempDir(), 8<<20), Configure: map[string]string{"engine": "auto"},
	})
}

func TestConfigureRefusesWhatItDoesNotKnow(t *testing.T) {
	for _, settings := range []map[string]string{{"engine": "steam"}, {"size": "1"}} {
		if err := (&fileBackend{}).Configure(settings); blk.ToErrno(err) != blk.EINVAL {
			t.Errorf("%v: %v, want EINVAL", settings, err)
		}
	}
}

func TestNoSpaceFailsTheWriteAndNothingElse(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		dir := tmpfs(t, "1M")
		h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: file(t, dir, 16<<20)})
		const n = 64 << 10
		var writes []shm.SQE
		for i := range uint64(64) { // 4 MiB
			writes = append(writes, shm.SQE{Op: blk.Write, Offset: i * n, Len: n})
		}
		good := -1
		var full int
		for i, e := range h.All(writes) {
			switch e {
			case blk.OK:
				good = i
			case blk.ENOSPC:
				full++
			default:
				t.Fatalf("write %d: %v, want success or ENOSPC", i, e)
			}
		}
		if full == 0 || good < 0 {
			t.Fatalf("%d of 64 writes found no space", full)
		}
		if e := h.Do(shm.SQE{Op: blk.WriteZeroes, Flags: blk.NoUnmap, Offset: 8 << 20, Len: 4 << 20}); e != blk.ENOSPC {
			t.Errorf("zeroes that must be allocated: %v, want ENOSPC", e)
		}
		if e := h.Do(shm.SQE{Op: blk.Discard, Offset: 0, Len: 16 << 20}); e != blk.OK {
			t.Fatalf("discard: %v", e)
		}
		if e := h.Do(writes[0]); e != blk.OK {
			t.Errorf("write after a discard made room: %v", e)
		}
	})
}

func TestDiscardGivesSpaceBack(t *testing.T) {
	path := file(t, t.TempDir(), 4<<20)
	h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: path})
	allocated := func() int64 {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	if e := h.Do(shm.SQE{Op: blk.Write, Len: 1 << 20}); e != blk.OK {
		t.Fatal(e)
	}
	if got := allocated(); got < 1<<20 {
		t.Fatalf("%d bytes allocated after a write of 1 MiB", got)
	}
	if e := h.Do(shm.SQE{Op: blk.Discard, Len: 1 << 20}); e != blk.OK {
		t.Fatal(e)
	}
	if got := allocated(); got >= 1<<20 {
		t.Errorf("%d bytes allocated after the discard", got)
	}
	if e := h.Do(shm.SQE{Op: blk.WriteZeroes, Flags: blk.NoUnmap, Len: 1 << 20}); e != blk.OK {
		t.Fatal(e)
	}
	if got := allocated(); got < 1<<20 {
		t.Errorf("%d bytes allocated after zeroes that must not be unmapped", got)
	}
}

func TestMisalignedMemory(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		path := file(t, t.TempDir(), 1<<20)
		h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: path})
		want := bytes.Repeat([]byte("misalign"), 1024)
		copy(h.Memory.Bytes()[7:], want)
		if e := h.Do(shm.SQE{Op: blk.Write, Offset: 4096, Len: 8192, ArenaOff: 7}); e != blk.OK {
			t.Fatal(e)
		}
		if e := h.Do(shm.SQE{Op: blk.Read, Offset: 4096, Len: 8192, ArenaOff: 65539}); e != blk.OK {
			t.Fatal(e)
		}
		if !bytes.Equal(h.Memory.Bytes()[65539:][:8192], want) {
			t.Error("read returns other bytes")
		}
		onDisk, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(onDisk[4096:][:8192], want) {
			t.Errorf("the file holds other bytes (%v)", err)
		}
	})
}

func TestWhatIsCachedIsReadInline(t *testing.T) {
	for name, dir := range map[string]func(*testing.T) string{
		"page cache":        func(t *testing.T) string { return t.TempDir() },
		"memory, no NOWAIT": func(t *testing.T) string { return tmpfs(t, "4M") },
	} {
		t.Run(name, func(t *testing.T) {
			path := file(t, dir(t), 1<<20)
			if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
				t.Fatal(err)
			}
			b := &fileBackend{}
			t.Cleanup(func() { // after the plugin has stopped
				if got := b.Counters().Inline.Load(); got < 90 {
					t.Errorf("%d of 100 cached reads were inline", got)
				}
			})
			h := plugintest.StartIO(t, b, plugintest.Options{Path: path})
			// Sync at Open leaves clean pages in the cache; touch them all.
			if _, err := os.ReadFile(path); err != nil {
				t.Fatal(err)
			}
			for i := range uint64(100) {
				if e := h.Do(shm.SQE{Op: blk.Read, Offset: i * 4096, Len: 4096}); e != blk.OK {
					t.Fatal(e)
				}
			}
		})
	}
}

func TestAFileCutBehindOurBack(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		path := file(t, t.TempDir(), 1<<20)
		h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: path})
		if err := os.Truncate(path, 64<<10); err != nil {
			t.Fatal(err)
		}
		got := h.All([]shm.SQE{
			{Op: blk.Read, Offset: 512 << 10, Len: 4096},
			{Op: blk.Read, Offset: 60 << 10, Len: 8192},
			{Op: blk.Read, Offset: 0, Len: 4096},
		})
		if got[0] != blk.EIO || got[1] != blk.EIO || got[2] != blk.OK {
			t.Errorf("behind, across and before the new end: %v, want EIO, EIO, OK", got)
		}
	})
}

func TestFileSizeLimitIsNoSpaceAndNoDeath(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: file(t, t.TempDir(), 8<<20)})
		var old unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { signal.Reset(unix.SIGXFSZ) })
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1 << 20, Max: old.Max}); err != nil {
			t.Fatal(err)
		}
		defer unix.Setrlimit(unix.RLIMIT_FSIZE, &old)
		if e := h.Do(shm.SQE{Op: blk.Write, Offset: 2 << 20, Len: 4096}); e != blk.ENOSPC {
			t.Errorf("write above the limit: %v, want ENOSPC", e)
		}
		if e := h.Do(shm.SQE{Op: blk.Write, Offset: 0, Len: 4096}); e != blk.OK {
			t.Errorf("write below the limit: %v", e)
		}
	})
}

func TestNothingIsAllocatedPerRequest(t *testing.T) {
	onBothEngines(t, func(t *testing.T) {
		h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: file(t, t.TempDir(), 8<<20)})
		var es []shm.SQE
		for i := range uint64(2000) {
			e := shm.SQE{Op: blk.Op(i % 2), Offset: i % 512 * 4096, Len: 4096, ArenaOff: i % 512 * 4096}
			if i%50 == 0 {
				e = shm.SQE{Op: blk.Flush}
			}
			es = append(es, e)
		}
		h.All(es) // warm up: threads, bounce buffers, timers
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		h.All(es)
		runtime.ReadMemStats(&after)
		if n := after.Mallocs - before.Mallocs; n > uint64(len(es))/10 {
			t.Errorf("%d allocations for %d requests, host and test included", n, len(es))
		}
	})
}
