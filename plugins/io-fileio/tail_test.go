package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// ends is a file whose 10,000 bytes are not zero: 19 blocks of 512 bytes, and 272 bytes of
// the last block.
func ends(t *testing.T, dir string) (path string, content []byte) {
	t.Helper()
	path, content = file(t, dir, 0), bytes.Repeat([]byte("tail"), 2500)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, content
}

// blocks4K is a directory on an ext4 file system on a device with blocks of 4096 bytes.
func blocks4K(t *testing.T) string {
	t.Helper()
	image, mnt := file(t, t.TempDir(), 64<<20), t.TempDir()
	out, err := exec.Command("losetup", "--find", "--show", "--sector-size", "4096", image).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device with large blocks here: %v: %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "--detach", dev).Run() })
	if out, err := exec.Command("mkfs.ext4", "-q", dev).CombinedOutput(); err != nil {
		t.Skipf("mkfs.ext4: %v: %s", err, out)
	}
	if out, err := exec.Command("mount", dev, mnt).CombinedOutput(); err != nil {
		t.Skipf("mount: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return mnt
}

// ramfs is a directory on a file system without holes.
func ramfs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("ramfs", dir, "ramfs", 0, ""); err != nil {
		t.Skipf("needs the right to mount a ramfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// folders are folders on the kinds of file systems that differ at the end of a file.
var folders = map[string]func(*testing.T) string{
	"on a disk":                     func(t *testing.T) string { return t.TempDir() },
	"in memory":                     func(t *testing.T) string { return tmpfs(t, "16M") },
	"on a disk with blocks of 4096": blocks4K,
	"where no range can be zeroed":  func(t *testing.T) string { return mounted(t, "ext2") },
	"where nothing has holes":       ramfs,
}

func TestTheEndOfAFileIsServed(t *testing.T) {
	for name, dir := range folders {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T) {
				path, content := ends(t, dir(t))
				h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: path})
				if size := open(t, request(t, path, blk.ReadOnly)).Limits().Size; size != 10240 {
					t.Fatalf("%d bytes are served, want 10240", size)
				}
				mem := h.Memory.Bytes()
				want := append(bytes.Clone(content), make([]byte, 240)...)
				for _, from := range []uint64{0, 9216, 9728} {
					n := 10240 - from
					copy(mem, bytes.Repeat([]byte{0xff}, 10240))
					if e := h.Do(shm.SQE{Op: blk.Read, Offset: from, Len: uint32(n)}); e != blk.OK {
						t.Fatalf("read of %d bytes at %d: %v", n, from, e)
					}
					if !bytes.Equal(mem[:n], want[from:]) {
						t.Errorf("read of %d bytes at %d: other bytes", n, from)
					}
				}
				if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, content) {
					t.Errorf("reads have changed the file to %d bytes (%v)", len(now), err)
				}
				last := bytes.Repeat([]byte("new!"), 128)
				copy(mem, last)
				if e := h.Do(shm.SQE{Op: blk.Write, Offset: 9728, Len: 512}); e != blk.OK {
					t.Fatalf("write of the last block: %v", e)
				}
				if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, append(content[:9728:9728], last...)) {
					t.Errorf("after a write of the last block the file has %d bytes (%v)", len(now), err)
				}
			})
		})
	}
}

func TestTheEndOfAFile_Zeroes(t *testing.T) {
	for name, dir := range folders {
		t.Run(name, func(t *testing.T) {
			path, content := ends(t, dir(t))
			h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: path})
			for _, e := range []shm.SQE{
				{Op: blk.WriteZeroes, Offset: 9216, Len: 1024},
				{Op: blk.WriteZeroes, Offset: 9216, Len: 1024, Flags: blk.NoUnmap | blk.FUA},
				{Op: blk.Flush},
				{Op: blk.Read, Offset: 8192, Len: 2048},
			} {
				if errno := h.Do(e); errno != blk.OK {
					t.Fatalf("%v at %d: %v", e.Op, e.Offset, errno)
				}
			}
			if want := append(bytes.Clone(content[8192:9216]), make([]byte, 1024)...); !bytes.Equal(h.Memory.Bytes()[:2048], want) {
				t.Error("other bytes than data and zeroes")
			}
		})
	}
}

// A file that has become shorter by more than its last block is damaged.
func TestTheEndOfAFile_IsNoTruncation(t *testing.T) {
	path, _ := ends(t, t.TempDir())
	h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: path})
	if err := os.Truncate(path, 9728); err != nil {
		t.Fatal(err)
	}
	if e := h.Do(shm.SQE{Op: blk.Read, Offset: 9216, Len: 1024}); e != blk.EIO {
		t.Errorf("read across the new end: %v, want EIO", e)
	}
}

// A discard of a file whose file system turns out to have no holes does nothing.
func TestDiscardWhereNothingHasHoles(t *testing.T) {
	path := file(t, ramfs(t), 1<<20)
	d := open(t, request(t, path, blk.ReadWrite))
	r := plugin.Request{Op: blk.Discard, Len: 4096}
	step := d.Plan(&r)
	if d.canPunch || step.Op != uring.PunchHole {
		t.Fatalf("holes are offered: %t, first step %+v", d.canPunch, step)
	}
	errno := unix.Fallocate(int(d.cachedFD), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
	step, ok := d.Fallback(&r, step, blk.ToErrno(errno))
	if !ok || step.Op != uring.Nop || d.Plan(&r).Op != uring.Nop {
		t.Errorf("after %v: %+v (%t), and then %+v", errno, step, ok, d.Plan(&r))
	}
}

func TestZeroesAreHolesUnlessForbidden(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags blk.Flags
		holes bool
	}{
		{"R-190 zeroes give space back", 0, true},
		{"R-190 zeroes that must stay allocated do", blk.NoUnmap, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := file(t, t.TempDir(), 4<<20)
			h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: path})
			for _, e := range []shm.SQE{
				{Op: blk.Write, Len: 1 << 20},
				{Op: blk.WriteZeroes, Flags: c.flags, Len: 1 << 20},
				{Op: blk.WriteZeroes, Flags: c.flags, Offset: 2 << 20, Len: 1 << 20}, // of a hole
			} {
				if errno := h.Do(e); errno != blk.OK {
					t.Fatalf("%v at %d: %v", e.Op, e.Offset, errno)
				}
			}
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil {
				t.Fatal(err)
			}
			if got := st.Blocks * 512; c.holes && got != 0 || !c.holes && got < 2<<20 {
				t.Errorf("%s: %d bytes are allocated", filepath.Base(path), got)
			}
		})
	}
}
