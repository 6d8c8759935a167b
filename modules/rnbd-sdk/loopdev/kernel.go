package loopdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blockdev"
)

const (
	controlNode = "/dev/loop-control"
	sysBlock    = "/sys/block"
	// attachTries bounds the tries to configure a free device: others look for one, too.
	attachTries = 64
	// sizePause is between two looks at the size of a file.
	sizePause = 10 * time.Millisecond
)

// Of returns the nodes of the loop devices of a file, given its path in the mount
// namespace of the caller. Of does not wait for the file.
func Of(file string) (nodes []string) { return nodesOf(sysBlock, file) }

func nodesOf(sys, file string) (nodes []string) {
	names, _ := filepath.Glob(filepath.Join(sys, "loop*/loop/backing_file")) // fails for a bad pattern only
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err == nil && strings.TrimSuffix(string(text), "\n") == file {
			nodes = append(nodes, filepath.Join("/dev", filepath.Base(filepath.Dir(filepath.Dir(name)))))
		}
	}
	return nodes
}

// attach makes a loop device of a file.
func attach(d Device) (node string, err error) {
	mode := os.O_RDWR
	if d.ReadOnly {
		mode = os.O_RDONLY
	}
	file, err := os.OpenFile(d.File, mode, 0)
	if err != nil {
		return "", err
	}
	defer file.Close()
	if d.Node != "" {
		if err := configure(d, d.Node, file); err == nil {
			return d.Node, nil
		}
	}
	control, err := os.OpenFile(controlNode, os.O_RDWR, 0)
	if errors.Is(err, syscall.ENOENT) {
		return "", fmt.Errorf("there is no %s: load the module loop, or give the container the node: %w", controlNode, syscall.ENODEV)
	}
	if err != nil {
		return "", err
	}
	defer control.Close()
	for range attachTries {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", fmt.Errorf("find a free loop device: %w", err)
		}
		node = fmt.Sprintf("/dev/loop%d", number)
		if err = configure(d, node, file); !errors.Is(err, syscall.EBUSY) {
			return node, err
		}
	}
	return "", fmt.Errorf("other programs take each free loop device: %w", syscall.EBUSY)
}

// configure makes node a loop device of file.
func configure(d Device, node string, file *os.File) error {
	loop, err := os.OpenFile(node, os.O_RDWR, 0)
	if errors.Is(err, syscall.ENOENT) {
		return fmt.Errorf("there is no node %s: %w", node, syscall.ENODEV)
	}
	if err != nil {
		return err
	}
	defer loop.Close()
	c := unix.LoopConfig{Fd: uint32(file.Fd()), Size: d.BlockSize, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_DIRECT_IO}}
	if d.ReadOnly {
		c.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	copy(c.Info.File_name[:len(c.Info.File_name)-1], d.File)
	if err := unix.IoctlLoopConfigure(int(loop.Fd()), &c); err != nil {
		return fmt.Errorf("make %s a loop device of %s: %w", node, d.File, err)
	}
	return nil
}

// detach removes the loop devices of a file.
func detach(ctx context.Context, file string, force bool) error {
	var errs []error
	for _, node := range Of(file) {
		err := detachNode(ctx, node, force)
		if err != nil && !errors.Is(err, syscall.ENXIO) && !errors.Is(err, syscall.ENOENT) { // others have removed it
			errs = append(errs, fmt.Errorf("%s: %w", node, err))
		}
	}
	return errors.Join(errs...)
}

// detachNode removes one loop device. The kernel removes a device that others have open
// at their last close. Without force that is called off again.
func detachNode(ctx context.Context, node string, force bool) error {
	var loop *os.File
	var err error
	if force {
		loop, err = os.OpenFile(node, os.O_RDONLY|unix.O_NONBLOCK, 0)
	} else {
		loop, err = blockdev.Claim(ctx, node)
	}
	if err != nil {
		return err
	}
	defer loop.Close()
	fd := int(loop.Fd())
	if err := unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0); err != nil || force {
		return err
	}
	info, err := unix.IoctlLoopGetStatus64(fd)
	if err != nil { // ENXIO: this process was the only user, and its close removes the device
		return nil
	}
	info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	if err := unix.IoctlLoopSetStatus64(fd, info); err != nil {
		return fmt.Errorf("keep the device in use: %w", err)
	}
	return fmt.Errorf("a process has it open: %w", syscall.EBUSY)
}

// resize gives the loop devices of a file the size of the file, once that is size.
func resize(ctx context.Context, file string, size uint64) error {
	for {
		st, err := os.Stat(file)
		if err != nil {
			return err
		}
		if uint64(st.Size()) == size {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s has %d bytes and not %d: %w", file, st.Size(), size, syscall.ETIMEDOUT)
		case <-time.After(sizePause):
		}
	}
	for _, node := range Of(file) {
		if err := setCapacity(node); err != nil {
			return fmt.Errorf("new size of %s: %w", node, err)
		}
	}
	return nil
}

func setCapacity(node string) error {
	loop, err := os.OpenFile(node, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer loop.Close()
	return unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_SET_CAPACITY, 0)
}
