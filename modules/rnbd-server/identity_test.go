package server

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// sysfs is a tree with disks as the kernel shows them.
type sysfs struct {
	t    *testing.T
	root string
}

// disk makes the disk or partition with that number in dir, below devices, with
// attributes in pairs of name and text. A name "device" links to that folder.
func (s sysfs) disk(number, dir string, attributes ...string) {
	s.t.Helper()
	full := filepath.Join(s.root, "devices", dir)
	for k := 0; k < len(attributes); k += 2 {
		file := filepath.Join(full, attributes[k])
		must(s.t, os.MkdirAll(filepath.Dir(file), 0o755))
		if attributes[k] == "device" {
			must(s.t, os.MkdirAll(filepath.Join(s.root, "devices", attributes[k+1]), 0o755))
			must(s.t, os.Symlink(filepath.Join(s.root, "devices", attributes[k+1]), file))
			continue
		}
		must(s.t, os.WriteFile(file, []byte(attributes[k+1]+"\n"), 0o644))
	}
	must(s.t, os.MkdirAll(filepath.Join(s.root, "dev/block"), 0o755))
	must(s.t, os.Symlink(full, filepath.Join(s.root, "dev/block", number)))
}

func TestE019_TheVolumeOfABlockDevice(t *testing.T) {
	const sda, sdb, sda1 = 8 << 8, 8<<8 | 16, 8<<8 | 1
	backing := filepath.Join(t.TempDir(), "image")
	must(t, os.WriteFile(backing, nil, 0o600))
	type tree func(s sysfs)
	disk := func(number, dir string, a ...string) tree { return func(s sysfs) { s.disk(number, dir, a...) } }
	both := func(a, b tree) tree { return func(s sysfs) { a(s); b(s) } }
	for _, tt := range []struct {
		name        string
		before      tree
		rdev        uint64
		after       tree
		again       uint64
		wantTheSame bool
	}{
		{"a disk under another number is the same",
			disk("8:0", "ata1/block/sda", "device/wwid", "naa.1"), sda, disk("8:16", "ata2/block/sdb", "device/wwid", "naa.1"), sdb, true},
		{"another disk under its number is another",
			disk("8:0", "ata1/block/sda", "device/wwid", "naa.1"), sda, disk("8:0", "ata1/block/sda", "device/wwid", "naa.2"), sda, false},
		{"a size does not count",
			disk("8:0", "a/block/sda", "wwid", "eui.1", "size", "8"), sda, disk("8:0", "a/block/sda", "wwid", "eui.1", "size", "16"), sda, true},
		{"a mapping is known by its UUID",
			disk("8:0", "virtual/block/dm-0", "dm/uuid", "LVM-a"), sda, disk("8:16", "virtual/block/dm-9", "dm/uuid", "LVM-a"), sdb, true},
		{"another mapping is another",
			disk("8:0", "virtual/block/dm-0", "dm/uuid", "LVM-a"), sda, disk("8:0", "virtual/block/dm-0", "dm/uuid", "LVM-b"), sda, false},
		{"a partition is not its disk",
			both(disk("8:0", "a/block/sda", "wwid", "eui.1"), disk("8:1", "a/block/sda/sda1", "partition", "1", "start", "2048")), sda,
			both(disk("8:0", "a/block/sda", "wwid", "eui.1"), disk("8:1", "a/block/sda/sda1", "partition", "1", "start", "2048")), sda1, false},
		{"a partition of the same disk elsewhere",
			both(disk("8:0", "a/block/sda", "wwid", "eui.1"), disk("8:1", "a/block/sda/sda1", "partition", "1", "start", "2048")), sda1,
			both(disk("8:16", "b/block/sdb", "wwid", "eui.1"), disk("8:1", "b/block/sdb/sdb1", "partition", "1", "start", "2048")), sda1, true},
		{"a loop device of the same file",
			disk("8:0", "virtual/block/loop0", "loop/backing_file", backing, "loop/offset", "0", "diskseq", "3"), sda,
			disk("8:16", "virtual/block/loop1", "loop/backing_file", backing, "loop/offset", "0", "diskseq", "4"), sdb, true},
		{"a loop device of another part of it",
			disk("8:0", "virtual/block/loop0", "loop/backing_file", backing, "loop/offset", "0"), sda,
			disk("8:0", "virtual/block/loop0", "loop/backing_file", backing, "loop/offset", "512"), sda, false},
		{"a disk without a name of its own is known by its place",
			disk("8:0", "pci/block/vda", "device", "pci/0000:00:02.0", "diskseq", "1"), sda,
			disk("8:16", "pci/block/vdb", "device", "pci/0000:00:02.0", "diskseq", "2"), sdb, true},
		{"in another place is another",
			disk("8:0", "pci/block/vda", "device", "pci/0000:00:02.0", "diskseq", "1"), sda,
			disk("8:0", "pci/block/vda", "device", "pci/0000:00:03.0", "diskseq", "1"), sda, false},
		{"a RAM disk is known by its number",
			disk("8:0", "virtual/block/ram0", "diskseq", "1"), sda, disk("8:0", "virtual/block/ram0", "diskseq", "1"), sda, true},
		{"a RAM disk that was made anew is another",
			disk("8:0", "virtual/block/ram0", "diskseq", "1"), sda, disk("8:0", "virtual/block/ram0", "diskseq", "2"), sda, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			look := func(tree func(sysfs), rdev uint64) uint64 {
				s := sysfs{t, t.TempDir()}
				tree(s)
				return volumeOfDisk(s.root, rdev)
			}
			a, b := look(tt.before, tt.rdev), look(tt.after, tt.again)
			if a == 0 || b == 0 || (a == b) != tt.wantTheSame {
				t.Errorf("%016x and %016x: the same %t, want %t", a, b, a == b, tt.wantTheSame)
			}
		})
	}
	for name, tree := range map[string]tree{
		"a place with a SCSI host, whose number changes": disk("8:0", "pci/host3/block/sda", "device", "pci/host3/target3:0:0/3:0:0:0", "diskseq", "1"),
		"a disk of NBD":            disk("8:0", "virtual/block/nbd0", "diskseq", "1"),
		"a mapping without a UUID": disk("8:0", "virtual/block/dm-0", "diskseq", "1"),
	} {
		s := sysfs{t, t.TempDir()}
		tree(s)
		if v := volumeOfDisk(s.root, sda); v != 0 {
			t.Errorf("%s is known as volume %x", name, v)
		}
	}
	if v := volumeOfDisk(t.TempDir(), sda); v != 0 {
		t.Errorf("a disk that sysfs does not have is volume %x", v)
	}
}

func TestE019_TheVolumeOfAFile(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	look := func(name string) uint64 {
		n, err := jail{searchPath: dir}.openName("s", name)
		must(t, err)
		defer n.close()
		return n.volume
	}
	must(t, os.WriteFile(path("a"), make([]byte, 4096), 0o600))
	must(t, os.WriteFile(path("b"), make([]byte, 4096), 0o600))
	a := look("a")
	if a == 0 || a == look("b") {
		t.Errorf("two files are the volumes %x and %x", a, look("b"))
	}
	must(t, os.Truncate(path("a"), 1<<20))
	must(t, os.Rename(path("a"), path("c")))
	if c := look("c"); c != a {
		t.Errorf("with another name and size it is volume %x, was %x", c, a)
	}
	must(t, os.Remove(path("c")))
	must(t, os.WriteFile(path("a"), make([]byte, 4096), 0o600)) // often the inode of the one before
	if next := look("a"); next == a {
		t.Errorf("a file that was made anew is still volume %x", a)
	}
}

// OPEN_RSP has the same volume in every mode, session and server.
func TestE018_E020_OpenTellsVolumeAndProperties(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "vol"), make([]byte, 1<<20), 0o600))
	var volumes []uint64
	var props []uint16
	for _, cached := range []bool{true, false} {
		mem := newMemory()
		mem.names = plugin.NamesPath
		mem.add("vol", 1<<20, func(l *blk.Limits) { l.WriteCache, l.FUA = cached, cached })
		i := newRig(t, mem, func(c *Config) { c.SearchPath = dir }).connect("s")
		for _, mode := range []blk.AccessMode{blk.ReadOnly, blk.ReadWrite} {
			dev, err := i.open("vol", mode)
			must(t, err)
			volumes, props = append(volumes, dev.Volume), append(props, dev.Properties)
			must(t, i.closeDevice(dev.DeviceID))
		}
	}
	if volumes[0] == 0 || volumes[0] != volumes[1] || volumes[0] != volumes[2] || volumes[0] != volumes[3] {
		t.Errorf("one volume is %x", volumes)
	}
	if props[0] == 0 || props[2] == 0 || props[0] == props[2] || props[1] != props[0] {
		t.Errorf("E-020: properties with a write cache %x, without %x", props[:2], props[2:])
	}
}

func TestLimitsThatUsersWereNotTold(t *testing.T) {
	old := blk.Limits{Size: 1 << 20, LogicalBlockSize: 512, MaxIOSize: 1 << 20, MaxDiscard: 1 << 20}
	for _, tt := range []struct {
		name   string
		change func(l *blk.Limits)
		want   error
	}{
		{"another size", func(l *blk.Limits) { l.Size = 1 << 21 }, nil},
		{"larger requests", func(l *blk.Limits) { l.MaxIOSize = 1 << 21 }, nil},
		{"no discard", func(l *blk.Limits) { l.MaxDiscard = 0 }, nil}, // requests are refused one by one
		{"a write cache", func(l *blk.Limits) { l.WriteCache = true }, syscall.EIO},
		{"larger blocks", func(l *blk.Limits) { l.LogicalBlockSize = 4096 }, syscall.EIO},
		{"smaller requests", func(l *blk.Limits) { l.MaxIOSize = 4096 }, syscall.EIO},
		{"read-only", func(l *blk.Limits) { l.ReadOnly = true }, syscall.EIO},
	} {
		l := old
		tt.change(&l)
		if err := checkCompatible(&old, &l); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
}

// The next process of a plugin must open the volume that users know.
func TestADeviceThatHasChangedWhenItsPluginComesBack(t *testing.T) {
	for _, tt := range []struct {
		name  string
		after func(l *blk.Limits)
		want  blk.Errno
	}{
		{"nothing has changed", func(l *blk.Limits) {}, blk.OK},
		{"it has a write cache now", func(l *blk.Limits) { l.WriteCache = true }, blk.EIO},
		{"it has larger blocks", func(l *blk.Limits) { l.LogicalBlockSize = 4096 }, blk.EIO},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mem := newMemory()
			mem.crash = plugin.KeepsAcknowledged
			through := func(l *blk.Limits) { l.WriteCache, l.FUA = false, false }
			mem.add("a", 1<<20, through)
			r := newRig(t, mem)
			i := r.connect("s")
			dev, err := i.open("a", blk.ReadWrite)
			must(t, err)
			mem.mu.Lock()
			mem.add("a", 1<<20, through, tt.after)
			mem.mu.Unlock()
			r.process().Kill()
			if errno := i.rw(dev.DeviceID, blk.Write, 0, make([]byte, 4096)); errno != tt.want {
				t.Errorf("write: errno %d, want %d", errno, tt.want)
			}
			if s := r.deviceState("a"); (s == "open") != (tt.want == blk.OK) {
				t.Errorf("it is shown as %q", s)
			}
		})
	}
}

// A description without a number is not told as one.
func TestVolumeOfANodeWithoutFacts(t *testing.T) {
	if v := volumeOf(nil, &unix.Stat_t{Mode: unix.S_IFBLK, Rdev: unix.Mkdev(4095, 1048575)}); v != 0 {
		t.Errorf("volume %x", v)
	}
}

// Facts of a file that change with its first write are no facts: an overlay copies it up.
func TestE019_FileOfAnOverlayIsNotKnown(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"lower", "upper", "work", "srv"} {
		must(t, os.Mkdir(path(name), 0o700))
	}
	must(t, os.WriteFile(path("lower/a"), make([]byte, 4096), 0o600))
	if err := unix.Mount("overlay", path("srv"), "overlay", 0, "lowerdir="+path("lower")+",upperdir="+path("upper")+",workdir="+path("work")); err != nil {
		t.Skipf("no overlay can be mounted here: %v", err)
	}
	defer unix.Unmount(path("srv"), unix.MNT_DETACH)
	n, err := jail{searchPath: path("srv")}.openName("s", "a")
	must(t, err)
	defer n.close()
	if n.volume != 0 {
		t.Errorf("it is known as volume %x", n.volume)
	}
}
