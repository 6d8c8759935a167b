package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"syscall"
)

// Names of front ends beside those of plugins.
const (
	// FrontendAuto is the first of these that works on the host: a ublk disk,
	// a disk of the kernel's NBD client, an NBD export on the daemon's
	// sockets.
	FrontendAuto = "auto"
	// FrontendNBDSocket is the plugin "nbd" with sockets only, without a disk.
	FrontendNBDSocket = "nbd-socket"
	// FrontendNone is no front end: NewIO gives access to the device.
	FrontendNone = "none"

	frontendUblk = "ublk"
	frontendNBD  = "nbd"

	// settingAttach is the setting of the plugin "nbd" for the kernel's
	// client: "auto" uses it if there is one, "no" does not.
	settingAttach = "attach"
)

// choice is a front end that may serve a device, with its settings.
type choice struct {
	fe       *frontend
	settings map[string]string
}

// choose lists the front ends to try for a name, in order.
func (c *Client) choose(name string) ([]choice, error) {
	if name == "" {
		name = c.cfg.Frontend
	}
	var out []choice
	try := func(plugin string, settings map[string]string) {
		for _, f := range c.frontends {
			if f.cfg.Name == plugin {
				out = append(out, choice{f, settings})
			}
		}
	}
	attach := map[string]string{settingAttach: "auto"}
	switch name {
	case FrontendNone:
		return nil, nil
	case FrontendAuto:
		try(frontendUblk, nil)
		try(frontendNBD, attach)
		if len(out) == 0 && len(c.frontends) > 0 { // only plugins with other names are configured
			out = append(out, choice{fe: c.frontends[0]})
		}
		if len(out) == 0 {
			return nil, fmt.Errorf("no front end is configured: %w", syscall.ENODEV)
		}
	case FrontendNBDSocket:
		try(frontendNBD, map[string]string{settingAttach: "no"})
	case frontendNBD:
		try(frontendNBD, attach)
	default:
		try(name, nil)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("there is no front end %q: %w", name, syscall.EINVAL)
	}
	return out, nil
}

// settings returns the settings of d for its front end.
func (d *Device) settings() map[string]string {
	all := maps.Clone(d.options)
	if len(d.choices) > 0 && len(d.choices[0].settings) > 0 {
		if all == nil {
			all = map[string]string{}
		}
		for k, v := range d.choices[0].settings {
			if _, set := all[k]; !set {
				all[k] = v
			}
		}
	}
	return all
}

// mayHaveNode reports whether a front end may make a disk for a device with
// those settings. A disk outlives the front end's process.
func mayHaveNode(settings map[string]string) bool { return settings[settingAttach] != "no" }

// appear shows d to users by the first choice that works on this host.
func (d *Device) appear(ctx context.Context) error {
	if len(d.choices) == 0 {
		return nil
	}
	for {
		fe := d.choices[0].fe
		d.fe.Store(fe)
		err := fe.add(ctx, d)
		if err == nil {
			d.choices = d.choices[:1] // the one that serves d
			d.link()
			return nil
		}
		if len(d.choices) == 1 || !unavailable(err) {
			return err
		}
		d.log.Info("front end does not work here, trying the next", "frontend", fe.cfg.Name, "cause", err)
		fe.release(d)
		d.choices = d.choices[1:]
	}
}

// vanish removes d from its front end, after its last request.
func (d *Device) vanish() {
	d.unlink()
	if fe := d.fe.Load(); fe != nil {
		fe.release(d)
	}
}

// unavailable reports whether err means that this host does not offer the
// front end, and not that the front end refuses the device.
func unavailable(err error) bool {
	for _, errno := range []error{syscall.ENODEV, syscall.ENOSYS, syscall.EACCES, syscall.EPERM} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// isNode reports whether location is the path of a device node, and not a URI.
func isNode(location string) bool { return strings.HasPrefix(location, "/dev/") }

// hasNode reports whether name is the path of d's device node, or its name in
// /dev.
func (d *Device) hasNode(name string) bool {
	l := d.Location()
	return isNode(l) && (l == name || l == "/dev/"+name)
}

// moved handles a change of d's location.
func (c *Client) moved(d *Device) {
	c.mapMu.Lock()
	defer c.mapDone()
	if c.deviceAt(d.index) != d { // it was unmapped meanwhile
		return
	}
	d.link()
	c.save()
}
