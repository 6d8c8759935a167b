package client

import (
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blockdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/loopdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// The loop device on the file of an attachment at the front end "fuse-loop". A tool makes
// and removes it, since a thread of the daemon must not wait in the kernel for a file of
// the daemon (package loopdev).

// hasLoop reports whether users get a loop device on the file.
func (a *attachment) hasLoop() bool { return hasLoop(a.fe.cfg.MountDir, a.spec.Config) }

// hasLoop reports whether a device with such settings is a loop device, at a front end
// that mounts below dir.
func hasLoop(dir string, settings map[string]string) bool {
	return dir != "" && settings[settingLoop] == loopYes
}

// findLocation returns the location of the device for users, given that of the process. A loop
// device is made if there is none. Only the worker calls it.
func (a *attachment) findLocation(ctx context.Context, location string) (string, error) {
	if a.file == nil || !a.hasLoop() {
		return location, nil
	}
	if a.file.node != "" {
		return a.file.node, nil
	}
	a.mu.Lock()
	d := loopdev.Device{File: a.file.path, BlockSize: a.spec.Limits.LogicalBlockSize, ReadOnly: a.spec.Limits.ReadOnly}
	if isNode(a.spec.Location) { // users know the device by that node
		d.Node = a.spec.Location
	}
	a.mu.Unlock()
	a.file.disk = true
	node, err := a.fe.client.cfg.LoopTool.Attach(ctx, d)
	if err != nil {
		return "", fmt.Errorf("loop device of %s: %w", a.file.path, err)
	}
	a.file.node = node
	return node, nil
}

// takeFile removes the loop device and the mount unless they are in use. Only the worker
// calls it.
func (a *attachment) takeFile(ctx context.Context) error {
	if a.file == nil {
		return nil
	}
	had := a.file.node != ""
	if had {
		if err := a.fe.client.cfg.LoopTool.Detach(ctx, a.file.path, false); err != nil {
			return err
		}
		a.file.node = ""
	}
	err := a.unmountFile()
	if err != nil && had { // users of the file stay, so does the disk
		if _, lerr := a.findLocation(ctx, ""); lerr != nil {
			a.log.Error("loop device of a device in use is lost; unmap the device", "err", lerr)
		}
	}
	return err
}

// resizeLoop gives the loop device the size of the file.
func (a *attachment) resizeLoop(ctx context.Context, l blk.Limits) error {
	if a.file == nil || a.file.node == "" {
		return nil
	}
	return a.fe.client.cfg.LoopTool.Resize(ctx, a.file.path, l.Size&^uint64(l.LogicalBlockSize-1))
}

// statusOfLoop returns the status of d as users of its loop device see it. st is the
// status of the file, which the loop device has open.
func (d *Device) statusOfLoop(st plugin.DeviceStatus) plugin.DeviceStatus {
	node := d.Location()
	if fe := d.fe.Load(); fe == nil || !isNode(node) || !hasLoop(fe.cfg.MountDir, d.frontendSettings()) {
		return st
	}
	st.Location = node
	users, err := blockdev.Users(node)
	if err != nil {
		d.log.Warn("asking for a device's users failed", "node", node, "err", err)
		return st
	}
	st.Openers = users
	return st
}

// errNoLoop is the error of the front end "fuse-loop" without the front end "fuse".
var errNoLoop = fmt.Errorf("the front end %s needs a folder for its files (--fuse-dir): %w", FrontendFuseLoop, syscall.EINVAL)
