package slowdisk

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// loop is an attached loop device. It detaches itself when its last user is
// gone, even if the test process is killed.
type loop struct {
	t    testing.TB
	path string
	dev  *os.File
	made bool // the device node is ours
}

// Attach returns a loop device over the file at path. The device ends with the
// test. The file is as fast as its file system lets it be.
func Attach(t testing.TB, path string) string {
	t.Helper()
	l := attach(t, path)
	t.Cleanup(l.detach)
	return l.path
}

// attach puts a free loop device with direct I/O over the file at path.
func attach(t testing.TB, path string) *loop {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("slowdisk needs loop devices: %v", err)
	}
	defer control.Close()
	backing, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatalf("open %s for a loop device: %v", path, err)
	}
	defer backing.Close()
	for range 16 { // another process may take the free device first
		l := &loop{t: t}
		err = l.configure(control, backing)
		if err == nil {
			return l
		}
		if !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	t.Fatalf("attach a loop device to %s: %v", path, err)
	return nil
}

func (l *loop) configure(control, backing *os.File) error {
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return fmt.Errorf("find a free loop device: %w", err)
	}
	if err := l.open(n); err != nil {
		return err
	}
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	if err := unix.IoctlLoopConfigure(int(l.dev.Fd()), &config); err != nil {
		l.close()
		return fmt.Errorf("configure %s: %w", l.path, err)
	}
	return nil
}

// open opens /dev/loopN and makes the node where no devtmpfs does.
func (l *loop) open(n int) error {
	l.path = fmt.Sprintf("/dev/loop%d", n)
	if _, err := os.Stat(l.path); errors.Is(err, os.ErrNotExist) {
		if err := unix.Mknod(l.path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, uint32(n)))); err != nil {
			return fmt.Errorf("make %s: %w", l.path, err)
		}
		l.made = true
	}
	dev, err := os.OpenFile(l.path, os.O_RDWR, 0)
	l.dev = dev
	return err
}

func (l *loop) close() {
	l.dev.Close()
	if l.made {
		os.Remove(l.path)
	}
}

// detach drops our reference and waits until the device has let the file go.
func (l *loop) detach() {
	l.close()
	backing := fmt.Sprintf("/sys/block/%s/loop/backing_file", l.path[len("/dev/"):])
	for deadline := time.Now().Add(3 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(backing); err != nil {
			return
		}
	}
	l.t.Logf("%s is still in use at the end of the test", l.path)
}
