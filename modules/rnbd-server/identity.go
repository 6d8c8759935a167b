package server

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// The identity of a volume in OPEN_RSP: docs/extend/protocol/rnbd.md, "Identity". A
// client that opens a device again compares it.

// bootIDFile has the number that Linux draws when it starts (random(4)). A container
// reads that of its host.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// readBootID returns the boot id of this host, empty if it cannot be read.
func readBootID() string {
	text, err := os.ReadFile(bootIDFile)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// volumeID returns a checksum over facts about a volume, never 0.
func volumeID(facts ...string) uint64 {
	sum := sha256.Sum256([]byte(strings.Join(facts, "\x00")))
	return max(binary.LittleEndian.Uint64(sum[:]), 1)
}

// propertiesChecksum returns a checksum over the limits, without the size, and the
// mode of the open. It is never 0.
func propertiesChecksum(l *blk.Limits) uint16 {
	flat := *l
	flat.Size, flat.ReadOnly = 0, false
	sum := sha256.Sum256(fmt.Appendf(nil, "%+v", flat))
	return max(binary.LittleEndian.Uint16(sum[:]), 1)
}

// volumeOf identifies the node behind an O_PATH descriptor. It returns 0 if it
// cannot. It blocks for ever on a network file system that does not answer.
func volumeOf(f *os.File, st *unix.Stat_t) uint64 {
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return volumeOfDisk("/sys", st.Rdev)
	}
	facts := fileFacts(int(f.Fd()), "", st)
	if facts == nil {
		return 0
	}
	return volumeID(append([]string{"file"}, facts...)...)
}

// lastingInodes are the file systems whose inode numbers, times of birth and ids stay as
// they are when a file is written to, and when the file system is mounted again. An
// overlay shows other ones after its first write to a file, FUSE and network file systems
// may do so after each mount.
var lastingInodes = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC, unix.TMPFS_MAGIC, zfsMagic}

// zfsMagic is the number of ZFS in statfs(2).
const zfsMagic = 0x2fc12fc1

// fileFacts returns the facts of a file, or of the file at path below fd: the
// file system, the inode, and the time of birth, since inode numbers are used
// again. It returns nil where these do not last.
func fileFacts(fd int, path string, st *unix.Stat_t) []string {
	var fs unix.Statfs_t
	err := unix.Fstatfs(fd, &fs)
	if path != "" {
		err = unix.Statfs(path, &fs)
	}
	var x unix.Statx_t
	born := unix.Statx(fd, path, unix.AT_EMPTY_PATH, unix.STATX_BTIME, &x) == nil && x.Mask&unix.STATX_BTIME != 0
	if err != nil || !born || !slices.Contains(lastingInodes, int64(fs.Type)) {
		return nil
	}
	facts := []string{fmt.Sprint("inode ", st.Ino), fmt.Sprintf("born %d.%09d", x.Btime.Sec, x.Btime.Nsec)}
	if fs.Fsid != (unix.Fsid{}) && fs.Type != unix.XFS_SUPER_MAGIC { // the fsid of XFS is the device's number, and that changes
		facts = append(facts, fmt.Sprintf("file system %x %08x%08x", fs.Type, uint32(fs.Fsid.Val[0]), uint32(fs.Fsid.Val[1])))
	}
	return facts
}

// volumeOfDisk identifies a block device by its files in the tree at sys. It returns 0 if
// the kernel has no fact of it that outlasts a reboot.
func volumeOfDisk(sys string, rdev uint64) uint64 {
	number := fmt.Sprintf("%d:%d", unix.Major(rdev), unix.Minor(rdev))
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, "dev/block", number))
	if err != nil {
		return 0
	}
	var facts []string
	if part := sysfsAttribute(dir, "partition"); part != "" {
		facts = []string{"partition " + part, "from " + sysfsAttribute(dir, "start")}
		dir = filepath.Dir(dir)
	}
	disk := diskFacts(sys, dir, number)
	if disk == nil {
		return 0
	}
	return volumeID(append(facts, disk...)...)
}

// scsiHost is the part of a device's place that the kernel numbers in the order in which it
// finds hosts. The order may be another one after a reboot.
var scsiHost = regexp.MustCompile(`/host[0-9]+(/|$)`)

// inMemory are the disks whose contents end with the kernel, and whose numbers may, too.
var inMemory = regexp.MustCompile(`^(ram|zram|brd|nullb)[0-9]+$`)

// diskFacts returns the facts of the disk with the folder dir in sysfs, nil if none lasts.
// number is that of the disk or of its partition.
func diskFacts(sys, dir, number string) []string {
	for _, name := range []string{"wwid", "device/wwid", "uuid", "dm/uuid", "md/uuid", "serial", "device/serial", "device/cid"} {
		if id := sysfsAttribute(dir, name); id != "" {
			return []string{name, id}
		}
	}
	if file := sysfsAttribute(dir, "loop/backing_file"); file != "" {
		facts := []string{"loop", "from " + sysfsAttribute(dir, "loop/offset")}
		var st unix.Stat_t
		if err := unix.Stat(file, &st); err == nil {
			lasting := fileFacts(unix.AT_FDCWD, file, &st)
			if lasting == nil {
				return nil
			}
			return append(facts, lasting...)
		}
		return append(facts, "file "+file)
	}
	if device, err := filepath.EvalSymlinks(filepath.Join(dir, "device")); err == nil {
		if place, err := filepath.Rel(sys, device); err == nil && !scsiHost.MatchString(place) { // the place where it is plugged in
			return []string{"place", place}
		}
	}
	if !inMemory.MatchString(filepath.Base(dir)) {
		return nil
	}
	boot, _ := os.ReadFile(bootIDFile) // with its newline, as in the volumes of earlier versions
	return []string{"number", number, sysfsAttribute(dir, "diskseq"), string(boot)}
}

// sysfsAttribute returns the contents of a file in a folder of sysfs, empty if there
// is none.
func sysfsAttribute(dir, name string) string {
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// diskSeq returns the sequence number of a disk. The kernel gives it to no
// other disk until it starts again. It is empty before Linux 5.15, and for a
// partition.
func diskSeq(rdev uint64) string {
	return sysfsAttribute(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(rdev), unix.Minor(rdev)), "diskseq")
}

// checkCompatible returns EIO if users know the limits old and cannot use l instead.
// It does not compare sizes.
func checkCompatible(old, l *blk.Limits) error {
	var errs []error
	refuse := func(bad bool, format string, a ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, a...))
		}
	}
	refuse(l.WriteCache && !old.WriteCache, "it has a write cache now, and nobody would flush it")
	refuse(old.WriteCache && l.WriteCache && old.FUA && !l.FUA, "it has no FUA any more")
	refuse(l.LogicalBlockSize > old.LogicalBlockSize, "its logical block size was %d bytes and is %d", old.LogicalBlockSize, l.LogicalBlockSize)
	refuse(l.MaxIOSize < old.MaxIOSize, "its largest request was of %d bytes and is of %d", old.MaxIOSize, l.MaxIOSize)
	refuse(l.ReadOnly && !old.ReadOnly, "it is read-only now")
	if len(errs) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %w", errors.Join(errs...), syscall.EIO)
}
