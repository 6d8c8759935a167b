package client

import (
	"path/filepath"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// The mount of an attachment at the front end "fuse".

// specWithFile returns the description of the device with the mount of the attachment, and
// makes the mount if there is none. Only the worker calls it.
func (a *attachment) specWithFile() (plugin.DeviceSpec, error) {
	spec := a.spec
	if a.fe.cfg.MountDir == "" {
		return spec, nil
	}
	if a.file == nil {
		a.file = a.fe.client.files.take(spec.Identity)
	}
	if a.file == nil {
		m, err := mountDeviceFile(a.fe.cfg.MountDir, spec.Name)
		if err != nil {
			return spec, err
		}
		a.file = m
	}
	spec.Location = ""
	if a.file.served { // the process asks for the requests of the one before
		spec.Location = a.file.path
	}
	a.file.served = true
	spec.Channel = a.file.channel
	spec.Config = withSetting(spec.Config, settingPath, a.file.path)
	return spec, nil
}

// withSetting returns a copy of settings with one more.
func withSetting(settings map[string]string, key, value string) map[string]string {
	out := map[string]string{key: value}
	for k, v := range settings {
		if k != key {
			out[k] = v
		}
	}
	return out
}

// unmountFile removes the mount of the attachment unless the file is in use. Only the
// worker calls it.
func (a *attachment) unmountFile() error {
	if err := a.file.unmountFile(false); err != nil {
		return err
	}
	a.file = nil
	return nil
}

// leaveFile ends the attachment's use of its mount: the mount is kept for the next mapping
// of the device, or removed. Only the worker calls it, at its end.
func (a *attachment) leaveFile() {
	if a.file == nil {
		return
	}
	m := a.file
	a.file = nil
	if a.isLeft() {
		a.fe.client.files.keep(a.spec.Identity, m)
		return
	}
	if err := a.fe.client.endFile(m); err != nil {
		a.log.Error("mount of an unmapped device stays until umount removes it", "err", err)
	}
}

// isLeft reports whether the device is to be mapped again.
func (a *attachment) isLeft() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.want == wantLeft
}

// clearMounts removes the mounts that a killed daemon has left.
func (f *frontend) clearMounts() error {
	if f.cfg.MountDir == "" {
		return nil
	}
	dir, err := filepath.Abs(f.cfg.MountDir)
	if err != nil {
		return err
	}
	f.cfg.MountDir = dir
	return removeDeadMounts(dir, f.client.cfg.LoopTool)
}
