package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
)

// quiet are the arguments by which the program that makes a file system says little.
var quiet = map[string][]string{"ext2": {"-q"}, "ext4": {"-q"}, "xfs": {"-q"}}

// mounted is the directory of a new file system of a kind, on a loop device.
func mounted(t *testing.T, kind string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a file system")
	}
	mkfs, err := exec.LookPath("mkfs." + kind)
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	image, mnt := filepath.Join(dir, "fs"), filepath.Join(dir, "mnt")
	for _, err := range []error{os.WriteFile(image, nil, 0o600), os.Truncate(image, 320<<20), os.Mkdir(mnt, 0o700)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(mkfs, append(quiet[kind], image)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", mkfs, err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", image, mnt).CombinedOutput(); err != nil {
		t.Skipf("mount %s: %v: %s", kind, err, strings.TrimSpace(string(out)))
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return mnt
}

func TestOnFileSystems(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			path := file(t, mounted(t, kind), 8<<20)
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil {
				t.Fatal(err)
			}
			d := open(t, request(t, path, blk.ReadWrite))
			if l := d.Limits(); l.MaxDiscard == 0 || d.direct == nil || l.Rotational != sysRotational(t, st.Dev) {
				t.Errorf("direct %v, limits %+v", d.direct != nil, l)
			}
			d.Close()
			plugintest.RunIO(t, &fileBackend{}, plugintest.Options{Path: path, HeapRing: true, Span: 512 << 10})
		})
	}
}

func sysRotational(t *testing.T, dev uint64) bool {
	t.Helper()
	dir, err := filepath.EvalSymlinks("/sys/dev/block/" + strconv.Itoa(int(unix.Major(dev))) + ":" + strconv.Itoa(int(unix.Minor(dev))))
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "queue/rotational"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.HasPrefix(string(b), "1")
}

// A look at the size leaves no trace on the file.
func TestResizeChangesNoTimeStamps(t *testing.T) {
	path := file(t, t.TempDir(), 1<<20)
	d := open(t, request(t, path, blk.ReadWrite))
	before := stampOf(t, path)
	for range 3 {
		if _, err := d.Resize(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if after := stampOf(t, path); after != before {
		t.Errorf("change time %v became %v", before, after)
	}
}

// Another program may be making the file longer: its allocation behind the end,
// or its new data there, are not the plugin's. Opening leaves no trace on the
// file at all.
func TestOpenTouchesNothingBehindTheEnd(t *testing.T) {
	for _, size := range []int64{1 << 20, 1<<20 + 512} {
		path := file(t, t.TempDir(), size)
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, 4<<20); err != nil {
			t.Skipf("the file system cannot allocate behind the end: %v", err)
		}
		blocks := func() int64 {
			var st unix.Stat_t
			if err := unix.Fstat(int(f.Fd()), &st); err != nil {
				t.Fatal(err)
			}
			return st.Blocks
		}
		before, stamp := blocks(), stampOf(t, path)
		d := open(t, request(t, path, blk.ReadWrite))
		if l := d.Limits(); l.MaxDiscard == 0 {
			t.Error("the file system can punch holes, and is not said to")
		}
		if after := blocks(); after != before {
			t.Errorf("a file of %d bytes has %d blocks, had %d", size, after, before)
		}
		if after := stampOf(t, path); after != stamp {
			t.Errorf("change time %v became %v", stamp, after)
		}
		d.Close()
	}
}

func stampOf(t *testing.T, path string) unix.Timespec {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ctim
}
