package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

const (
	// maxIO is the largest I/O of a device that reports no limit, in bytes.
	maxIO = 32 << 20
	// maxRange bounds discard and write-zeroes of one request, in bytes: a ring
	// entry has 32 bits for the length.
	maxRange = 1 << 31
)

// readLimits returns the device's limits: size and block sizes from ioctls, the
// rest from sysfs. Without sysfs it assumes a volatile cache and no discard.
func (d *blockDisk) readLimits() (blk.Limits, error) {
	var l blk.Limits
	var err error
	if l.Size, err = size(d.fd); err != nil {
		return l, fmt.Errorf("size of %q: %w", d.name, err)
	}
	logical, err := unix.IoctlGetInt(int(d.fd), unix.BLKSSZGET)
	if err != nil {
		return l, fmt.Errorf("logical block size of %q: %w", d.name, err)
	}
	physical, err := unix.IoctlGetInt(int(d.fd), unix.BLKPBSZGET)
	if err != nil || physical < logical {
		physical = logical
	}
	readOnly, err := unix.IoctlGetInt(int(d.fd), unix.BLKROGET)
	if err != nil {
		return l, fmt.Errorf("read-only flag of %q: %w", d.name, err)
	}
	if readOnly != 0 && !d.readOnly {
		return l, fmt.Errorf("open %q for writing: the device is read-only: %w", d.name, blk.EACCES)
	}
	l.LogicalBlockSize, l.PhysicalBlockSize = uint32(logical), uint32(physical)
	l.Size -= l.Size % uint64(logical)
	l.ReadOnly = d.readOnly
	d.readQueueLimits(&l)
	return l, nil
}

// readQueueLimits sets the limits that the device's request queue has in sysfs.
func (d *blockDisk) readQueueLimits(l *blk.Limits) {
	q := d.sysfs()
	l.MaxIOSize = uint32(min(q.number("queue/max_hw_sectors_kb", maxIO>>10)<<10, maxIO))
	l.MaxSegments = uint16(min(q.number("queue/max_segments", 128), 1<<16-1))
	l.MaxDiscard = blocks(min(q.number("queue/discard_max_bytes", 0), maxRange), l)
	if l.MaxDiscard > 0 {
		l.DiscardGranularity = uint32(max(q.number("queue/discard_granularity", 0), uint64(l.LogicalBlockSize)))
		l.DiscardAlignment = uint32(q.number("discard_alignment", 0))
		l.SecureErase = !d.readOnly && erases(d.fd)
	}
	// The kernel writes zeroes itself where the device cannot.
	l.MaxWriteZeroes = maxRange
	l.WriteCache = q.text("queue/write_cache") != "write through"
	l.FUA = q.number("queue/fua", 0) != 0
	l.Rotational = q.number("queue/rotational", 0) != 0
}

// blocks rounds n down to whole blocks.
func blocks(n uint64, l *blk.Limits) uint64 { return n - n%uint64(l.LogicalBlockSize) }

// sysfs returns the directories of a device in /sys, and for a partition those
// of its disk too.
type sysfs []string

func (d *blockDisk) sysfs() sysfs {
	var st unix.Stat_t
	if unix.Fstat(int(d.fd), &st) != nil {
		return nil
	}
	dir := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil
	}
	return sysfs{real, filepath.Dir(real)}
}

// text returns the content of the first file of that name, or "".
func (s sysfs) text(name string) string {
	for _, dir := range s {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
			return strings.TrimSpace(string(b))
		}
	}
	return ""
}

func (s sysfs) number(name string, missing uint64) uint64 {
	n, err := strconv.ParseUint(s.text(name), 10, 64)
	if err != nil {
		return missing
	}
	return n
}

// erases reports whether the device has a secure erase. sysfs has no file for
// it, but the kernel checks for support before it refuses a range within a
// sector, so such a range shows it without an erase.
func erases(fd int32) bool {
	within := [2]uint64{1, 0}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.BLKSECDISCARD, uintptr(unsafe.Pointer(&within)))
	return errno == unix.EINVAL
}

// size returns the device's size in bytes, by BLKGETSIZE64.
func size(fd int32) (uint64, error) {
	var n uint64
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.BLKGETSIZE64, uintptr(unsafe.Pointer(&n)))
	if errno != 0 {
		return 0, errno
	}
	return n, nil
}
