package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
)

// blkpgPartition is struct blkpg_partition, blkpgArg struct blkpg_ioctl_arg of
// linux/blkpg.h.
type blkpgPartition struct {
	start, length int64 // bytes
	number        int32
	_             [64 + 64]byte
	_             [4]byte
}

type blkpgArg struct {
	op, flags, size int32
	_               int32
	data            unsafe.Pointer
}

const (
	blkpgAdd    = 1
	blkpgDelete = 2
)

// partition makes part of a disk a partition, without a table, until the end of
// the test, and returns its node.
func partition(t *testing.T, disk string, dev *os.File, number int, start, length int64) string {
	t.Helper()
	p := blkpgPartition{start: start, length: length, number: int32(number)}
	ioctl := func(op int32) error {
		arg := blkpgArg{op: op, size: int32(unsafe.Sizeof(p)), data: unsafe.Pointer(&p)}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dev.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg))); errno != 0 {
			return errno
		}
		return nil
	}
	if err := ioctl(blkpgAdd); err != nil {
		t.Skipf("no partitions on %s: %v", disk, err)
	}
	t.Cleanup(func() {
		if err := ioctl(blkpgDelete); err != nil {
			t.Errorf("remove partition %d: %v", number, err)
		}
	})
	name := fmt.Sprintf("%sp%d", filepath.Base(disk), number)
	text, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(disk), name, "dev"))
	if err != nil {
		t.Fatal(err)
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(strings.TrimSpace(string(text)), "%d:%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	node := filepath.Join(t.TempDir(), name) // nobody may make one in /dev for us
	if err := unix.Mknod(node, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor))); err != nil {
		t.Fatal(err)
	}
	return node
}

func TestAPartitionHasItsSizeAndItsDisksQueue(t *testing.T) {
	path, dev := loopDevice(t, 8<<20, 0)
	node := partition(t, path, dev, 1, 1<<20, 2<<20)
	whole := open(t, request(t, path, blk.ReadOnly)).Limits()
	part := open(t, request(t, node, blk.ReadOnly)).Limits()
	if part.Size != 2<<20 {
		t.Errorf("size %d", part.Size)
	}
	part.Size, part.DiscardAlignment = whole.Size, whole.DiscardAlignment
	if part != whole {
		t.Errorf("limits %+v, its disk's %+v", part, whole)
	}
	h := plugintest.StartIO(t, &blockBackend{}, plugintest.Options{Path: node})
	if got := h.Limits.Size; got != 2<<20 {
		t.Errorf("served %d bytes", got)
	}
}

// Clients get the limits of the queue in sysfs.
func TestLimitsAreThoseOfSysfs(t *testing.T) {
	path, _ := loopDevice(t, 8<<20, 0)
	l := open(t, request(t, path, blk.ReadWrite)).Limits()
	queue := func(name string) string {
		b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(path), "queue", name))
		if err != nil {
			t.Skipf("sysfs: %v", err)
		}
		return strings.TrimSpace(string(b))
	}
	for name, x := range map[string]struct{ got, want string }{
		"write cache":         {map[bool]string{true: "write back", false: "write through"}[l.WriteCache], queue("write_cache")},
		"FUA":                 {map[bool]string{true: "1", false: "0"}[l.FUA], queue("fua")},
		"rotational":          {map[bool]string{true: "1", false: "0"}[l.Rotational], queue("rotational")},
		"discard granularity": {fmt.Sprint(l.DiscardGranularity), queue("discard_granularity")},
		"physical block":      {fmt.Sprint(l.PhysicalBlockSize), queue("physical_block_size")},
		"logical block":       {fmt.Sprint(l.LogicalBlockSize), queue("logical_block_size")},
		"segments":            {fmt.Sprint(l.MaxSegments), queue("max_segments")},
	} {
		if x.got != x.want {
			t.Errorf("%s: %s, sysfs says %s", name, x.got, x.want)
		}
	}
	if l.SecureErase {
		t.Error("a loop device has no secure erase")
	}
}
