package plugincheck

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// loop is a loop device over a file of the kit. It detaches itself when its last user has
// gone, also after a SIGKILL of the kit.
type loop struct {
	path string
	dev  *os.File
	made bool // the device node is the kit's
}

// attachLoop puts a free loop device with direct I/O over a file.
func attachLoop(path string) (*loop, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	backing, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	for range 16 { // another process may take the free device first
		var l *loop
		if l, err = configureLoop(control, backing); err == nil {
			return l, nil
		}
		if !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return nil, fmt.Errorf("attach a loop device to %s: %w", path, err)
}

func configureLoop(control, backing *os.File) (*loop, error) {
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return nil, fmt.Errorf("find a free loop device: %w", err)
	}
	l := &loop{path: fmt.Sprintf("/dev/loop%d", n)}
	if _, err := os.Stat(l.path); errors.Is(err, os.ErrNotExist) { // there is no devtmpfs
		if err := unix.Mknod(l.path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, uint32(n)))); err != nil {
			return nil, fmt.Errorf("make %s: %w", l.path, err)
		}
		l.made = true
	}
	if l.dev, err = os.OpenFile(l.path, os.O_RDWR, 0); err != nil {
		return nil, err
	}
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	if err := unix.IoctlLoopConfigure(int(l.dev.Fd()), &config); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *loop) close() {
	_ = l.dev.Close()
	if l.made {
		_ = os.Remove(l.path)
	}
}

// detach gives the device up and waits until it has let the file go.
func (l *loop) detach() {
	l.close()
	backing := fmt.Sprintf("/sys/block/%s/loop/backing_file", l.path[len("/dev/"):])
	for deadline := time.Now().Add(3 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(backing); err != nil {
			return
		}
	}
}
