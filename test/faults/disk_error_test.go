package faults

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// smallFilesystem mounts a tmpfs of size bytes in dir, until the test ends.
func smallFilesystem(t *testing.T, dir, size string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("rnbd-faults", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("mounting a small file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
}

// TestAFullFilesystem exports a sparse image that has no room to grow.
func TestAFullFilesystem(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("other.img", 16<<20)
	small := filepath.Join(dir, "small")
	smallFilesystem(t, small, "4m")
	image := filepath.Join(small, "disk.img")
	if err := os.WriteFile(image, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 64<<20); err != nil {
		t.Fatal(err)
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	full, other := l.Map(c, "small/disk.img", s), l.Map(c, "other.img", s)
	w := startLoad(t, c, other.Name, loadOptions{})
	n := mustDial(t, c, full.Name)

	const piece = 64 << 10
	written := int64(0)
	for ; ; written += piece {
		if written > 4<<20 {
			t.Fatal("a file system of 4 MiB took more than that")
		}
		if _, err := n.WriteAt(bytes.Repeat([]byte{byte(written/piece) + 1}, piece), written); err != nil {
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatalf("write without room: %v, want ENOSPC", err)
			}
			break
		}
	}
	if written < 1<<20 {
		t.Errorf("it was full after %d bytes", written)
	}
	keepsWhatItHas(t, n, written, piece)
	if err := n.Trim(0, piece); err != nil {
		t.Fatalf("trim: %v", err)
	}
	if _, err := n.WriteAt(make([]byte, piece), 32<<20); err != nil {
		t.Errorf("write with room again: %v", err)
	}
	if err := n.Flush(); err != nil {
		t.Errorf("flush: %v", err)
	}
	w.awaitProgress(100)
	w.stop()
	t.Logf("ENOSPC after %d KiB", written>>10)
}

// keepsWhatItHas reads the data written before the disk was full.
func keepsWhatItHas(t *testing.T, n *nbdclient.Client, written, piece int64) {
	t.Helper()
	got := make([]byte, piece)
	for off := int64(0); off < written; off += piece {
		if _, err := n.ReadAt(got, off); err != nil {
			t.Fatalf("read at %d of the full disk: %v", off, err)
		}
		if want := bytes.Repeat([]byte{byte(off/piece) + 1}, int(piece)); !bytes.Equal(got, want) {
			t.Fatalf("at %d the full disk holds %#x, want %#x", off, got[0], want[0])
		}
	}
}

// TestADiskThatFails checks that users of a failing disk get its error while it
// fails, and that users of other disks get none.
func TestADiskThatFails(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOSPC} {
		t.Run(errno.Error(), func(t *testing.T) { diskThatFails(t, errno) })
	}
}

func diskThatFails(t *testing.T, errno syscall.Errno) {
	bad, good := slowdisk.New(t, 4<<20), slowdisk.New(t, 4<<20)
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{Plugins: []string{"blockio"}})
	c := l.Client(lab.ClientOptions{})
	failing, other := l.Map(c, bad.Loop(), s), l.Map(c, good.Loop(), s)
	w := startLoad(t, c, other.Name, loadOptions{workers: 4, blocks: 64})
	n := mustDial(t, c, failing.Name)
	data := bytes.Repeat([]byte{5}, 4096)
	if _, err := n.WriteAt(data, 8192); err != nil {
		t.Fatal(err)
	}
	bad.SetError(errno)
	for range 3 {
		if _, err := n.WriteAt(make([]byte, 4096), 8192); !errors.Is(err, errno) {
			t.Errorf("write to the failing disk: %v, want %v", err, errno)
		}
		if _, err := n.ReadAt(make([]byte, 4096), 8192); !errors.Is(err, errno) {
			t.Errorf("read of the failing disk: %v, want %v", err, errno)
		}
	}
	bad.SetError(0)
	got := make([]byte, 4096)
	if _, err := n.ReadAt(got, 8192); err != nil || !bytes.Equal(got, data) {
		t.Errorf("read after the failure: %v, %#x", err, got[0])
	}
	if _, err := n.WriteAt(got, 0); err != nil {
		t.Errorf("write after the failure: %v", err)
	}
	w.awaitProgress(100)
	w.stop()
}

// TestAFlushThatFailsForADeadPlugin kills a plugin within an fsync that fails then. The
// kernel has told the dead process, and would tell no other one that opens the device.
func TestAFlushThatFailsForADeadPlugin(t *testing.T) {
	d := slowdisk.New(t, 4<<20)
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	dev := l.Map(c, d.Loop(), s, func(r *controlpb.MapRequest) { r.IoMode = "fileio" })
	n := mustDial(t, c, dev.Name)
	if _, err := n.WriteAt(bytes.Repeat([]byte{5}, 4096), 8192); err != nil {
		t.Fatal(err)
	}
	d.HoldWrites()
	flushed := make(chan error, 1)
	go func() { flushed <- n.Flush() }()
	d.WaitHeld(1)
	d.SetError(syscall.EIO)
	killPlugin(t, s, "fileio")
	d.Release()
	if err := <-flushed; !errors.Is(err, syscall.EIO) {
		t.Errorf("a flush whose data did not arrive: %v, want EIO", err)
	}
	d.SetError(0)
	if err := n.Flush(); err != nil {
		t.Errorf("the next flush: %v", err)
	}
}
