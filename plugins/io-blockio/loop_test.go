package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// loopDevice attaches a free loop device over a new sparse file of size bytes
// and skips the test, saying why, where there is none. The device detaches
// itself when its last user is gone.
func loopDevice(t *testing.T, size int64, flags uint32) (path string, dev *os.File) {
	t.Helper()
	return loopOver(t, t.TempDir(), size, flags)
}

// loopOver is loopDevice with the file in a given directory.
func loopOver(t *testing.T, dir string, size int64, flags uint32) (path string, dev *os.File) {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs loop devices and the right to use them: %v", err)
	}
	defer control.Close()
	backing, err := os.Create(filepath.Join(dir, "backing"))
	if err != nil {
		t.Fatal(err)
	}
	defer backing.Close()
	if err := backing.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for range 16 { // somebody else may take the free device first
		path, dev, err = attach(t, control, backing, flags)
		if !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	if err != nil {
		t.Fatalf("attach a loop device: %v", err)
	}
	t.Cleanup(func() { dev.Close() })
	return path, dev
}

func attach(t *testing.T, control, backing *os.File, flags uint32) (string, *os.File, error) {
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return "", nil, err
	}
	path := fmt.Sprintf("/dev/loop%d", n)
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) { // no devtmpfs
		if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, uint32(n)))); err != nil {
			return "", nil, err
		}
		t.Cleanup(func() { os.Remove(path) })
	}
	access := os.O_RDWR // the device is as writable as its configurer
	if flags&unix.LO_FLAGS_READ_ONLY != 0 {
		access = os.O_RDONLY
	}
	dev, err := os.OpenFile(path, access, 0)
	if err != nil {
		return "", nil, err
	}
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | flags
	if err := unix.IoctlLoopConfigure(int(dev.Fd()), &config); err != nil {
		dev.Close()
		return "", nil, err
	}
	return path, dev, nil
}
