package main

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

const (
	// maxIO is the largest read or write, in bytes. Files have no limit below
	// that of a system call.
	maxIO = 32 << 20
	// maxRange bounds discard and write-zeroes of one request, in bytes: a ring
	// entry has 32 bits for the length.
	maxRange = 1 << 31

	maxLogicalBlock = 4096
)

// neverBlock are the types of file systems that are on disks and obey
// RWF_NOWAIT and the non-blocking submission of io_uring. Other file systems
// depend on a daemon or a host that may stop answering. FUSE blocks a direct
// write on a page that a read has locked (invalidate_inode_pages2_range, seen
// with Linux 6.18), and with it the thread that submits the write.
var neverBlock = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC}

// ioAlignment is the alignment for direct I/O on a file, in bytes.
type ioAlignment struct {
	direct bool   // direct I/O is possible, as far as is known
	memory uint32 // of addresses
	offset uint32 // of offsets and lengths
}

// lookAtFile finds out the properties of I/O on the file. It does no I/O.
func (d *fileDisk) lookAtFile() error {
	fd := int(d.cachedFD)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return fmt.Errorf("file system of %q: %w", d.name, err)
	}
	switch int64(fs.Type) {
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
		d.memory = true
	case unix.FUSE_SUPER_MAGIC:
		d.noDsync, d.blocks = true, true
	default:
		d.blocks = !slices.Contains(neverBlock, int64(fs.Type))
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("look at %q: %w", d.name, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return d.lookAtDevice(st.Rdev)
	}
	d.align = directAlignment(fd)
	d.canPunch = !d.readOnly && d.canPunchHoles(st.Dev)
	return nil
}

// lookAtDevice is lookAtFile for a block device.
func (d *fileDisk) lookAtDevice(dev uint64) error {
	block, err := unix.IoctlGetInt(int(d.cachedFD), unix.BLKSSZGET)
	if err != nil {
		return fmt.Errorf("logical block size of %q: %w", d.name, err)
	}
	d.device, d.memory, d.blocks = true, false, false
	d.align = ioAlignment{direct: true, memory: uint32(block), offset: uint32(block)}
	discards := queueAttribute(dev, "discard_max_bytes")
	d.canPunch = !d.readOnly && discards != "" && discards != "0"
	return nil
}

// fileSize returns the size of the file or block device in bytes.
func (d *fileDisk) fileSize() (int64, error) {
	n, err := unix.Seek(int(d.cachedFD), 0, unix.SEEK_END)
	if err != nil {
		return 0, fmt.Errorf("size of %q: %w", d.name, err)
	}
	return n, nil
}

// queueAttribute returns a file of the request queue of the device dev; a partition's
// queue is that of its disk. It returns "" if there is none, as for a file
// system without a device.
func queueAttribute(dev uint64, name string) string {
	dir, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev)))
	if err != nil {
		return ""
	}
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if b, err := os.ReadFile(filepath.Join(d, "queue", name)); err == nil {
			return strings.TrimSpace(string(b))
		}
	}
	return ""
}

// directAlignment returns the alignment that statx reports (Linux 6.1), or
// sectors where it reports none.
func directAlignment(fd int) ioAlignment {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 {
		return ioAlignment{direct: true, memory: blk.SectorSize, offset: blk.SectorSize}
	}
	if st.Dio_offset_align == 0 {
		return ioAlignment{memory: 1, offset: blk.SectorSize}
	}
	return ioAlignment{direct: true, memory: st.Dio_mem_align, offset: st.Dio_offset_align}
}

// readLimits returns the file's limits as a disk.
func (d *fileDisk) readLimits() (blk.Limits, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(d.cachedFD), &st); err != nil {
		return blk.Limits{}, fmt.Errorf("look at %q: %w", d.name, err)
	}
	length, err := d.fileSize()
	if err != nil {
		return blk.Limits{}, err
	}
	block := uint32(blk.SectorSize)
	if d.device {
		block = min(max(d.align.offset, blk.SectorSize), maxLogicalBlock)
	}
	d.length.Store(uint64(length))
	size := padToBlock(uint64(length), uint64(block))
	if size != uint64(length) {
		slog.Warn("file is not a whole number of blocks: the last block is served with zeroes behind the end, and a write of the last block extends the file",
			"file", d.name, "bytes", length, "block", block, "served", size)
	}
	l := blk.Limits{
		Size: size, LogicalBlockSize: block, PhysicalBlockSize: physicalBlock(int64(st.Blksize), block),
		MaxIOSize: maxIO, MaxSegments: 1024, MaxWriteZeroes: maxRange,
		WriteCache: true, FUA: true, ReadOnly: d.readOnly,
	}
	if d.canPunch {
		l.MaxDiscard, l.DiscardGranularity = maxRange, l.PhysicalBlockSize
	}
	dev := st.Dev
	if d.device {
		dev = st.Rdev
	}
	l.Rotational = queueAttribute(dev, "rotational") == "1"
	return l, nil
}

// padToBlock returns n rounded up to whole blocks. A length near the largest, which no
// image has, is rounded down.
func padToBlock(n, block uint64) uint64 {
	if up := n + block - 1; up <= math.MaxInt64 {
		n = up
	}
	return n - n%block
}

// physicalBlock returns the file system's block size if it is plausible, else
// the logical block size.
func physicalBlock(blksize int64, logical uint32) uint32 {
	if blksize < int64(logical) || blksize > 64<<10 || blksize&(blksize-1) != 0 {
		return logical
	}
	return uint32(blksize)
}

// canPunchHoles reports whether the file system can punch holes. It tries with a
// nameless file beside the served one; if there can be none, it returns true and
// the first discard decides. The served file is not touched, since another
// program may be extending it.
func (d *fileDisk) canPunchHoles(dev uint64) bool {
	dir, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", d.cachedFD))
	if err != nil {
		return true
	}
	f, err := os.OpenFile(filepath.Dir(dir), os.O_RDWR|unix.O_TMPFILE, 0o600)
	if err != nil {
		return true
	}
	defer f.Close()
	const length = 64 << 10
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Dev != dev {
		return true // the served file is a mount of its own
	}
	if err := f.Truncate(length); err != nil {
		return true
	}
	const mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	return !errors.Is(unix.Fallocate(int(f.Fd()), mode, 0, length), unix.EOPNOTSUPP)
}
