package devices

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/devices/filemodel"
	"github.com/rnbd-go/rnbd/test/lab"
)

// fileSystem is one to make, use and check on a disk.
type fileSystem struct {
	name  string
	size  int64 // of the disk
	mkfs  []string
	check []string
}

var fileSystems = []fileSystem{
	{"ext4", 64 << 20, []string{"mkfs.ext4", "-q", "-F"}, []string{"e2fsck", "-f", "-n"}},
	{"xfs", 310 << 20, []string{"mkfs.xfs", "-q", "-f"}, []string{"xfs_repair", "-n"}}, // mkfs refuses less than 300 MiB
}

// mount mounts node on a new folder until the end of the test.
func (fs fileSystem) mount(t *testing.T, node string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	fs.mountAt(t, node, dir)
	t.Cleanup(func() { exec.Command("umount", dir).Run() }) // most tests have done so
	return dir
}

func (fs fileSystem) mountAt(t *testing.T, node, dir string) {
	t.Helper()
	run(t, "mount", "-t", fs.name, node, dir)
}

// make makes it on node and mounts it.
func (fs fileSystem) make(t *testing.T, node string) (dir string) {
	t.Helper()
	run(t, append(fs.mkfs, node)...)
	return fs.mount(t, node)
}

// remount empties the page cache of it.
func (fs fileSystem) remount(t *testing.T, node, dir string) {
	t.Helper()
	run(t, "umount", dir)
	fs.mountAt(t, node, dir)
}

// end unmounts it and has it checked.
func (fs fileSystem) end(t *testing.T, node, dir string) {
	t.Helper()
	run(t, "umount", dir)
	run(t, append(fs.check, node)...)
}

// tree is the source that is copied onto file systems.
func tree() string {
	return filepath.Join(lab.Root(), pick("modules/rnbd-sdk/shm", "modules"))
}

// testFileSystems unpacks a source tree and compares.
func testFileSystems(t *testing.T, s *stack) {
	for _, fs := range fileSystems {
		t.Run(fs.name, func(t *testing.T) {
			if fs.name == "xfs" && !*long {
				t.Skip("long form")
			}
			d, node := s.disk(t, s.image(t, fs.size))
			if got := queue(node, "write_cache"); got != "write back" || !d.Limits.WriteCache {
				t.Errorf("write cache is %q", got)
			}
			dir := fs.make(t, node)
			run(t, "sh", "-c", `tar -C "$0" -cf - . | tar -C "$1" -xf -`, tree(), dir)
			fs.remount(t, node, dir)
			run(t, "diff", "-r", tree(), dir, "-x", "lost+found")
			run(t, "rm", "-r", filepath.Join(dir, pick("ring.go", "rnbd-sdk")))
			run(t, "fstrim", dir)
			fs.end(t, node, dir)
		})
	}
}

// onEach runs test on every file system on a mapped disk, and in the long form
// on a loop device: a failure there is no fault of the stack. They run at the
// same time.
func (s *stack) onEach(t *testing.T, test func(t *testing.T, fs fileSystem, node, dir string)) {
	for _, fs := range fileSystems {
		t.Run(fs.name, func(t *testing.T) {
			_, node := s.disk(t, s.image(t, fs.size))
			t.Parallel()
			test(t, fs, node, fs.make(t, node))
		})
	}
	if !*long {
		return
	}
	t.Run("ext4 on a loop device", func(t *testing.T) {
		fs := fileSystems[0]
		node := strings.TrimSpace(run(t, "losetup", "--find", "--show", s.image(t, fs.size)))
		t.Cleanup(func() { run(t, "losetup", "-d", node) })
		t.Parallel()
		test(t, fs, node, fs.make(t, node))
	})
}

// testModel does random things to files, and looks at all of them again after
// each mount.
func testModel(t *testing.T, s *stack) {
	seed := rand.Uint64()
	s.onEach(t, func(t *testing.T, fs fileSystem, node, dir string) {
		t.Logf("seed %d", seed)
		m, err := filemodel.New(filemodel.Config{Dir: dir, Seed: seed, MaxSize: 256 << 10})
		must(t, err)
		t.Cleanup(func() { m.Close() })
		for range pick(1, 10) {
			end := time.Now().Add(pick(8*time.Second, time.Minute))
			must(t, m.Run(func() bool { return time.Now().After(end) }))
			must(t, m.Close())
			fs.remount(t, node, dir)
			must(t, m.Check())
		}
		must(t, m.Close())
		fs.end(t, node, dir)
		t.Logf("%d steps", m.Steps())
	})
}

// testStress has stress-ng verify its own writes.
func testStress(t *testing.T, s *stack) {
	if !*long {
		t.Skip("long form")
	}
	lab.Tool(t, "stress-ng")
	s.onEach(t, func(t *testing.T, fs fileSystem, node, dir string) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		const seconds = 90
		out, err := attemptIn(ctx, "stress-ng", "--hdd", "1", "--hdd-bytes", "8m", "--iomix", "1", "--iomix-bytes", "8m",
			"--verify", "--temp-path", dir, "--timeout", fmt.Sprint(seconds), "--metrics-brief")
		must(t, err)
		t.Log(out)
		fs.end(t, node, dir)
	})
}

// testGrowing makes an image larger under a mounted file system, while all is
// well and while the processes that serve the disk die.
func testGrowing(t *testing.T, s *stack) {
	const before, step = 16 << 20, 16 << 20
	ext4 := fileSystems[0]
	size := int64(before)
	image := s.image(t, size)
	d, node := s.disk(t, image, queueing)
	dir := ext4.make(t, node)
	run(t, "cp", "-r", tree(), filepath.Join(dir, "tree"))
	data := filepath.Join(t.TempDir(), "data")
	run(t, "dd", "if=/dev/urandom", "of="+data, "bs=1M", fmt.Sprint("count=", step*3/4>>20))
	larger := func() { size += step; must(t, os.Truncate(image, size)) }
	copies := 0
	fill := func() {
		eventually(t, "the disk has the new size", func() bool { return sizeOf(t, node) == size })
		run(t, "resize2fs", node)
		copies++
		run(t, "cp", data, filepath.Join(dir, fmt.Sprint("data", copies))) // there was no room for that
	}
	larger()
	eventually(t, "the client knows the new size", func() bool {
		now, err := s.client.Device(d.Name)
		return err == nil && now.Limits.Size == uint64(size)
	})
	if !s.resizes(t) { // the new size comes with the next mapping
		if got := sizeOf(t, node); got != before {
			t.Errorf("the disk has %d bytes without a new mapping", got)
		}
		run(t, "umount", dir)
		must(t, s.client.Unmap(d.Name, false))
		d, node = s.disk(t, image)
		ext4.mountAt(t, node, dir)
	}
	fill()
	if s.resizes(t) && (s.frontend == "ublk" || *long) { // the kernel's nbd takes its time after a death
		killFrontend(t, s, node)
		larger()
		fill()
		// The next daemon is not told the events meanwhile.
		must(t, s.client.Kill())
		larger()
		must(t, s.client.Start())
		fill()
	}
	ext4.remount(t, node, dir)
	for i := range copies {
		run(t, "cmp", data, filepath.Join(dir, fmt.Sprint("data", i+1)))
	}
	run(t, "diff", "-r", tree(), filepath.Join(dir, "tree"))
	ext4.end(t, node, dir)
}

// resizes: disks of this front end change their size on this kernel. nbd always
// could.
func (s *stack) resizes(t *testing.T) bool {
	if s.frontend != "ublk" {
		return true
	}
	var name unix.Utsname
	must(t, unix.Uname(&name))
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatalf("release %q: %v", name.Release, err)
	}
	return major > 6 || major == 6 && minor >= 16
}

func sizeOf(t *testing.T, node string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(strings.TrimSpace(run(t, "blockdev", "--getsize64", node)), 10, 64)
	must(t, err)
	return n
}
