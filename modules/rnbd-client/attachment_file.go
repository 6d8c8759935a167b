package client

import (
	"context"
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
		m, err := mountDeviceFile(a.fe.cfg.MountDir, spec.Name)
		if err != nil {
			return spec, err
		}
		a.file = m
		spec.Location = "" // the mount is new
	}
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

// unmountFile removes the mount of the attachment, if there is one. Only the worker calls
// it.
func (a *attachment) unmountFile(force bool) error {
	if a.file == nil {
		return nil
	}
	if force && a.hasLoop() {
		ctx, cancel := context.WithTimeout(context.Background(), forcedClose)
		defer cancel()
		if err := a.fe.client.cfg.LoopTool.Detach(ctx, a.file.path, true); err != nil {
			a.log.Warn("loop device of an unmapped device stays until losetup removes it", "file", a.file.path, "err", err)
		}
	}
	if err := a.file.unmount(force); err != nil {
		return err
	}
	a.file = nil
	return nil
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
