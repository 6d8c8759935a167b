package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/diskio"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// request is the request of a host.
func request(t *testing.T, path string, mode blk.AccessMode) plugin.OpenRequest {
	t.Helper()
	f, err := os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return plugin.OpenRequest{Device: 3, Name: filepath.Base(path), Mode: mode, File: f, Generation: 1}
}

// file makes a sparse file of size bytes.
func file(t *testing.T, dir string, size int64) string {
	t.Helper()
	path := filepath.Join(dir, "disk.img")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return path
}

// tmpfs is a directory on a tmpfs of its own of the given size.
func tmpfs(t *testing.T, size string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a tmpfs")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("needs the right to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

func open(t *testing.T, r plugin.OpenRequest) *fileDisk {
	t.Helper()
	d, err := (&fileBackend{}).Open(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d.(*fileDisk)
}

func TestOpenRefusesWhatIsNotARegularFile(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{"directory": dir, "character device": "/dev/null", "fifo": fifo} {
		t.Run(name, func(t *testing.T) {
			_, err := (&fileBackend{}).Open(context.Background(), request(t, path, blk.ReadWrite))
			if blk.ToErrno(err) != blk.ENOTBLK {
				t.Errorf("%v, want ENOTBLK", err)
			}
		})
	}
}

func TestOpenPassesTheKernelsErrno(t *testing.T) {
	dir := tmpfs(t, "1M")
	path := file(t, dir, 64<<10)
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Skipf("needs the right to remount: %v", err)
	}
	_, err := (&fileBackend{}).Open(context.Background(), request(t, path, blk.ReadWrite))
	if blk.ToErrno(err) != blk.EROFS {
		t.Errorf("read-write on a read-only file system: %v, want EROFS", err)
	}
	d := open(t, request(t, path, blk.ReadOnly))
	if l := d.Limits(); !l.ReadOnly || l.MaxDiscard != 0 || l.Size != 64<<10 {
		t.Errorf("read-only limits %+v", l)
	}
}

func TestLimits(t *testing.T) {
	for _, c := range []struct {
		name       string
		dir        func(*testing.T) string
		size, want int64
		direct     bool
	}{
		{"on ext4", func(t *testing.T) string { return t.TempDir() }, 1 << 20, 1 << 20, true},
		{"the end that is no whole block is padded", func(t *testing.T) string { return t.TempDir() }, 1<<20 + 1, 1<<20 + 512, true},
		{"on tmpfs, in memory", func(t *testing.T) string { return tmpfs(t, "4M") }, 1 << 20, 1 << 20, false},
		{"empty file", func(t *testing.T) string { return t.TempDir() }, 0, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, request(t, file(t, c.dir(t), c.size), blk.ReadWrite))
			l := d.Limits()
			if l.Size != uint64(c.want) || l.LogicalBlockSize != 512 || l.PhysicalBlockSize != 4096 {
				t.Errorf("size %d, blocks %d/%d, want %d, 512/4096", l.Size, l.LogicalBlockSize, l.PhysicalBlockSize, c.want)
			}
			if !l.WriteCache || !l.FUA || l.ReadOnly || l.MaxDiscard == 0 || l.MaxWriteZeroes == 0 {
				t.Errorf("limits %+v", l)
			}
			if (d.direct != nil) != c.direct || d.memory == c.direct {
				t.Errorf("direct %v, memory %v", d.direct != nil, d.memory)
			}
		})
	}
}

func TestResizeSeesTheNewSize(t *testing.T) {
	path := file(t, t.TempDir(), 1<<20)
	d := open(t, request(t, path, blk.ReadWrite))
	if err := os.Truncate(path, 3<<20); err != nil {
		t.Fatal(err)
	}
	l, err := d.Resize(context.Background())
	if err != nil || l.Size != 3<<20 || d.Limits().Size != 3<<20 {
		t.Errorf("resize says %d, %v; limits %d", l.Size, err, d.Limits().Size)
	}
}

func TestOpenIsFencedPerDescription(t *testing.T) {
	path := file(t, t.TempDir(), 1<<20)
	old := open(t, request(t, path, blk.ReadWrite))
	for _, c := range []struct {
		name   string
		leave  func() // removes part of the old generation
		mode   blk.AccessMode
		device uint32
		busy   bool
	}{
		{"the same device of another description waits", func() {}, blk.ReadWrite, 3, true},
		{"so does a writer that calls it another device", func() {}, blk.ReadWrite, 4, true},
		{"a reader does not", func() {}, blk.ReadOnly, 3, false},
		{"one description gone is not enough", func() { old.cached.Close() }, blk.ReadWrite, 3, true},
		{"both are", func() { old.direct.Close() }, blk.ReadWrite, 3, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.leave()
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			r := request(t, path, c.mode)
			r.Device = c.device
			d, err := (&fileBackend{}).Open(ctx, r)
			if err == nil {
				d.Close()
			}
			if got := blk.ToErrno(err) == blk.EBUSY; got != c.busy || (err != nil) != c.busy {
				t.Errorf("open: %v, want EBUSY %v", err, c.busy)
			}
		})
	}
}

func TestPlan(t *testing.T) {
	d := &fileDisk{cachedFD: 10, directFD: 11, direct: os.Stdin, align: ioAlignment{direct: true, memory: 512, offset: 512}}
	mem := make([]byte, 8192)
	for !diskio.Aligned(mem, 4096) {
		mem = mem[1:]
	}
	write := func(off uint64, buf []byte, flags blk.Flags) plugin.Request {
		return plugin.Request{Op: blk.Write, Off: off, Len: uint32(len(buf)), Buf: buf, Flags: flags}
	}
	for _, c := range []struct {
		name string
		r    plugin.Request
		want diskio.Step
	}{
		{"reads go through the page cache, inline first", plugin.Request{Op: blk.Read},
			diskio.Step{Op: uring.Pread, FD: 10, Inline: diskio.InlineCached}},
		{"aligned writes go past it", write(512, mem[:1024], 0),
			diskio.Step{Op: uring.Pwrite, FD: 11, Align: 512, MemAlign: 512}},
		{"FUA is RWF_DSYNC", write(512, mem[:1024], blk.FUA),
			diskio.Step{Op: uring.Pwrite, FD: 11, Align: 512, MemAlign: 512, RWFlags: unix.RWF_DSYNC}},
		{"misaligned memory goes through the cache and to the device", write(512, mem[1:1025], 0),
			diskio.Step{Op: uring.Pwrite, FD: 10, RWFlags: unix.RWF_DSYNC}},
		{"so does a misaligned offset", write(100, mem[:512], 0),
			diskio.Step{Op: uring.Pwrite, FD: 10, RWFlags: unix.RWF_DSYNC}},
		{"flush", plugin.Request{Op: blk.Flush}, diskio.Step{Op: uring.Fdatasync, FD: 10}},
		{"discard punches a hole", plugin.Request{Op: blk.Discard}, diskio.Step{Op: uring.PunchHole, FD: 10}},
		{"write-zeroes makes a hole", plugin.Request{Op: blk.WriteZeroes}, diskio.Step{Op: uring.PunchHole, FD: 10}},
		{"write-zeroes with FUA flushes", plugin.Request{Op: blk.WriteZeroes, Flags: blk.FUA},
			diskio.Step{Op: uring.PunchHole, FD: 10, Sync: true}},
		{"R-190 write-zeroes that must stay allocated zeroes the range", plugin.Request{Op: blk.WriteZeroes, Flags: blk.NoUnmap},
			diskio.Step{Op: uring.ZeroRange, FD: 10}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := d.Plan(&c.r); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

// Where the file system may block, nothing is tried on the queue's thread.
func TestPlanWhereTheFileSystemMayBlock(t *testing.T) {
	d := &fileDisk{cachedFD: 10, directFD: 11, direct: os.Stdin, align: ioAlignment{direct: true, memory: 1, offset: 512}, blocks: true}
	buf := make([]byte, 1024)
	for _, c := range []struct {
		name string
		r    plugin.Request
		want diskio.Step
	}{
		{"reads", plugin.Request{Op: blk.Read}, diskio.Step{Op: uring.Pread, FD: 10, Blocks: true}},
		{"direct writes", plugin.Request{Op: blk.Write, Len: 1024, Buf: buf},
			diskio.Step{Op: uring.Pwrite, FD: 11, Align: 512, MemAlign: 1, Blocks: true}},
		{"writes through the cache", plugin.Request{Op: blk.Write, Off: 1, Len: 1024, Buf: buf},
			diskio.Step{Op: uring.Pwrite, FD: 10, RWFlags: unix.RWF_DSYNC, Blocks: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := d.Plan(&c.r); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

// A block device's page cache is the only way to it, and pages are whole.
func TestPlanOnABlockDevice(t *testing.T) {
	d := &fileDisk{cachedFD: 10, device: true, align: ioAlignment{direct: true, memory: 512, offset: 512}}
	buf := make([]byte, 4096)
	written := diskio.Step{Op: uring.Pwrite, FD: 10, Zeroes: true}
	for _, c := range []struct {
		name string
		r    plugin.Request
		want diskio.Step
	}{
		{"writes go to the page cache", plugin.Request{Op: blk.Write, Len: 4096, Buf: buf}, diskio.Step{Op: uring.Pwrite, FD: 10}},
		{"and with FUA to the device", plugin.Request{Op: blk.Write, Len: 4096, Buf: buf, Flags: blk.FUA},
			diskio.Step{Op: uring.Pwrite, FD: 10, RWFlags: unix.RWF_DSYNC}},
		{"pages are discarded", plugin.Request{Op: blk.Discard, Off: 4096, Len: 8192}, diskio.Step{Op: uring.PunchHole, FD: 10}},
		{"parts of pages are kept", plugin.Request{Op: blk.Discard, Off: 4096, Len: 512}, diskio.Step{Op: uring.Nop}},
		{"pages are zeroed", plugin.Request{Op: blk.WriteZeroes, Len: 4096}, diskio.Step{Op: uring.PunchHole, FD: 10}},
		{"in parts of pages zeroes are written", plugin.Request{Op: blk.WriteZeroes, Off: 512, Len: 4096}, written},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := d.Plan(&c.r); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

func TestFUAWhereDirectWritesDoNotHeedIt(t *testing.T) {
	d := &fileDisk{cachedFD: 10, directFD: 11, direct: os.Stdin, noDsync: true, align: ioAlignment{direct: true, memory: 1, offset: 512}}
	r := plugin.Request{Op: blk.Write, Len: 512, Buf: make([]byte, 512), Flags: blk.FUA}
	if got := d.Plan(&r); !got.Sync || got.RWFlags != 0 || got.FD != 11 {
		t.Errorf("%+v, want a sync behind the write", got)
	}
}

func TestFallbackLearnsAndEnds(t *testing.T) {
	written := diskio.Step{Op: uring.Pwrite, FD: 10, RWFlags: unix.RWF_DSYNC, Zeroes: true}
	for _, c := range []struct {
		name  string
		r     plugin.Request
		errno blk.Errno
		steps []diskio.Step // each refused in turn
	}{
		{"write-zeroes: hole, zero range, zeroes", plugin.Request{Op: blk.WriteZeroes}, blk.EOPNOTSUPP, []diskio.Step{
			{Op: uring.PunchHole, FD: 10}, {Op: uring.ZeroRange, FD: 10}, written}},
		{"write-zeroes where the mode is invalid", plugin.Request{Op: blk.WriteZeroes}, blk.EINVAL, []diskio.Step{
			{Op: uring.PunchHole, FD: 10}, {Op: uring.ZeroRange, FD: 10}, written}},
		{"write-zeroes that must stay allocated: never a hole", plugin.Request{Op: blk.WriteZeroes, Flags: blk.NoUnmap}, blk.EOPNOTSUPP,
			[]diskio.Step{{Op: uring.ZeroRange, FD: 10}, written}},
		{"read: without RWF_NOWAIT by the engine", plugin.Request{Op: blk.Read}, blk.EOPNOTSUPP, []diskio.Step{
			{Op: uring.Pread, FD: 10, Inline: diskio.InlineCached}, {Op: uring.Pread, FD: 10}}},
		{"direct write with unknown alignment: through the cache", plugin.Request{Op: blk.Write}, blk.EINVAL, []diskio.Step{
			{Op: uring.Pwrite, FD: 11, Align: 512, MemAlign: 512}, {Op: uring.Pwrite, FD: 10, RWFlags: unix.RWF_DSYNC}}},
		{"an error of the device is final", plugin.Request{Op: blk.WriteZeroes}, blk.EIO, []diskio.Step{{Op: uring.PunchHole, FD: 10}}},
		{"no space is final", plugin.Request{Op: blk.Write}, blk.ENOSPC, []diskio.Step{{Op: uring.Pwrite, FD: 11, Align: 512, MemAlign: 512}}},
		{"discard does nothing instead", plugin.Request{Op: blk.Discard}, blk.EOPNOTSUPP, []diskio.Step{
			{Op: uring.PunchHole, FD: 10}, {Op: uring.Nop}}},
		{"discard where the mode is invalid", plugin.Request{Op: blk.Discard}, blk.EINVAL, []diskio.Step{
			{Op: uring.PunchHole, FD: 10}, {Op: uring.Nop}}},
		{"a discard that fails is no advice", plugin.Request{Op: blk.Discard}, blk.EIO, []diskio.Step{{Op: uring.PunchHole, FD: 10}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &fileDisk{cachedFD: 10, directFD: 11, direct: os.Stdin, align: ioAlignment{direct: true, memory: 512, offset: 512}}
			step, ok := d.Plan(&c.r), true
			for i, want := range c.steps {
				if !ok || step != want {
					t.Fatalf("step %d is %+v (%v), want %+v", i, step, ok, want)
				}
				step, ok = d.Fallback(&c.r, step, c.errno)
			}
			if ok {
				t.Errorf("one step more: %+v", step)
			}
			if again := d.Plan(&c.r); c.errno == blk.EOPNOTSUPP && again != c.steps[len(c.steps)-1] {
				t.Errorf("the next request starts with %+v, want %+v", again, c.steps[len(c.steps)-1])
			}
		})
	}
}
