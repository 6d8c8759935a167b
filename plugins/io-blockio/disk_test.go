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

func open(t *testing.T, r plugin.OpenRequest) *blockDisk {
	t.Helper()
	d, err := (&blockBackend{}).Open(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d.(*blockDisk)
}

func TestOpenRefusesWhatIsNotABlockDevice(t *testing.T) {
	dir := t.TempDir()
	plain := filepath.Join(dir, "file")
	if err := os.WriteFile(plain, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{"directory": dir, "character device": "/dev/null", "regular file": plain} {
		t.Run(name, func(t *testing.T) {
			_, err := (&blockBackend{}).Open(context.Background(), request(t, path, blk.ReadWrite))
			if blk.ToErrno(err) != blk.ENOTBLK {
				t.Errorf("%v, want ENOTBLK", err)
			}
		})
	}
}

func TestLimitsAreTheDevices(t *testing.T) {
	path, dev := loopDevice(t, 8<<20, 0)
	d := open(t, request(t, path, blk.ReadWrite))
	l := d.Limits()
	if l.Size != 8<<20 || l.LogicalBlockSize != 512 || l.PhysicalBlockSize < 512 {
		t.Errorf("size %d, blocks %d/%d", l.Size, l.LogicalBlockSize, l.PhysicalBlockSize)
	}
	if l.MaxIOSize == 0 || l.MaxIOSize%512 != 0 || l.MaxSegments == 0 || l.MaxWriteZeroes == 0 {
		t.Errorf("transfers: %+v", l)
	}
	if l.MaxDiscard == 0 || l.DiscardGranularity == 0 {
		t.Errorf("a loop device on a file system with holes cannot discard: %+v", l)
	}
	if !l.WriteCache || l.ReadOnly || l.SecureErase {
		t.Errorf("flags: %+v", l)
	}
	if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_BLOCK_SIZE, 4096); err != nil {
		t.Skipf("no larger logical block: %v", err)
	}
	if l, err := d.Resize(context.Background()); err != nil || l.LogicalBlockSize != 4096 {
		t.Errorf("after a change of the block size: %d, %v", l.LogicalBlockSize, err)
	}
}

func TestResizeSeesTheNewSize(t *testing.T) {
	path, dev := loopDevice(t, 1<<20, 0)
	d := open(t, request(t, path, blk.ReadWrite))
	setSizeLimit(t, dev, 512<<10)
	l, err := d.Resize(context.Background())
	if err != nil || l.Size != 512<<10 || d.Limits().Size != 512<<10 {
		t.Errorf("resize says %d, %v; limits %d", l.Size, err, d.Limits().Size)
	}
}

func TestAReadOnlyDevice(t *testing.T) {
	path, _ := loopDevice(t, 1<<20, unix.LO_FLAGS_READ_ONLY)
	_, err := (&blockBackend{}).Open(context.Background(), request(t, path, blk.ReadWrite))
	if blk.ToErrno(err) != blk.EACCES {
		t.Errorf("for writing: %v, want EACCES", err)
	}
	if d := open(t, request(t, path, blk.ReadOnly)); !d.Limits().ReadOnly {
		t.Error("for reading: limits do not say so")
	}
}

func TestOpenIsFenced(t *testing.T) {
	path, _ := loopDevice(t, 1<<20, 0)
	old := open(t, request(t, path, blk.ReadWrite))
	try := func(mode blk.AccessMode) blk.Errno {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		d, err := (&blockBackend{}).Open(ctx, request(t, path, mode))
		if err == nil {
			d.Close()
		}
		return blk.ToErrno(err)
	}
	if got := try(blk.ReadWrite); got != blk.EBUSY {
		t.Errorf("while an earlier description lives: %v, want EBUSY", got)
	}
	if got := try(blk.ReadOnly); got != blk.OK {
		t.Errorf("for reading: %v; readers do not wait for writers", got)
	}
	old.Close()
	if got := try(blk.ReadWrite); got != blk.OK {
		t.Errorf("after it: %v", got)
	}
}

func TestPlan(t *testing.T) {
	d := &blockDisk{fd: 10}
	d.block.Store(512)
	for _, c := range []struct {
		name string
		r    plugin.Request
		want diskio.Step
	}{
		{"read", plugin.Request{Op: blk.Read}, diskio.Step{Op: uring.Pread, FD: 10, Align: 512, MemAlign: 512}},
		{"write", plugin.Request{Op: blk.Write}, diskio.Step{Op: uring.Pwrite, FD: 10, Align: 512, MemAlign: 512}},
		{"FUA is RWF_DSYNC", plugin.Request{Op: blk.Write, Flags: blk.FUA},
			diskio.Step{Op: uring.Pwrite, FD: 10, Align: 512, MemAlign: 512, RWFlags: unix.RWF_DSYNC}},
		{"flush", plugin.Request{Op: blk.Flush}, diskio.Step{Op: uring.Fdatasync, FD: 10}},
		{"discard", plugin.Request{Op: blk.Discard}, diskio.Step{Op: uring.Discard, FD: 10}},
		{"secure erase", plugin.Request{Op: blk.SecureErase}, diskio.Step{Op: uring.SecureErase, FD: 10}},
		{"write-zeroes may unmap", plugin.Request{Op: blk.WriteZeroes}, diskio.Step{Op: uring.PunchHole, FD: 10}},
		{"write-zeroes that must not unmap", plugin.Request{Op: blk.WriteZeroes, Flags: blk.NoUnmap | blk.FUA},
			diskio.Step{Op: uring.ZeroRange, FD: 10, Sync: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := d.Plan(&c.r); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

func TestADeviceThatCannotDiscardIsAskedOnce(t *testing.T) {
	d := &blockDisk{fd: 10}
	r, erase := plugin.Request{Op: blk.Discard}, plugin.Request{Op: blk.SecureErase}
	first := d.Plan(&r)
	if _, ok := d.Fallback(&r, first, blk.EIO); ok {
		t.Error("an error of the device has another way")
	}
	if next, ok := d.Fallback(&r, first, blk.EOPNOTSUPP); !ok || next.Op != uring.Nop || d.Plan(&r).Op != uring.Nop {
		t.Errorf("after a refusal: %+v, %v; then %+v", next, ok, d.Plan(&r))
	}
	if _, ok := d.Fallback(&erase, d.Plan(&erase), blk.EOPNOTSUPP); ok {
		t.Error("a secure erase that did nothing succeeds")
	}
}

func TestADeviceThatCannotPunchIsAskedOnce(t *testing.T) {
	d := &blockDisk{fd: 10}
	r := plugin.Request{Op: blk.WriteZeroes, Flags: blk.FUA}
	first := d.Plan(&r)
	if _, ok := d.Fallback(&r, first, blk.EIO); ok {
		t.Error("an error of the device has another way")
	}
	next, ok := d.Fallback(&r, first, blk.EOPNOTSUPP)
	if !ok || next.Op != uring.ZeroRange || !next.Sync {
		t.Errorf("after a refusal: %+v, %v", next, ok)
	}
	if _, ok := d.Fallback(&r, next, blk.EOPNOTSUPP); ok {
		t.Error("a third way")
	}
	if got := d.Plan(&r); got != next {
		t.Errorf("the next request starts with %+v", got)
	}
}
