package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
)

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
	attach, loop := map[string]string{settingAttach: "auto"}, map[string]string{settingLoop: loopYes}
	switch name {
	case FrontendNone:
		return nil, nil
	case FrontendAuto:
		try(frontendUblk, nil)
		try(frontendNBD, attach)
		if len(out) > 1 && out[0].fe.fails() {
			slices.Reverse(out)
		}
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
	case FrontendFuseLoop:
		if try(frontendFuse, loop); len(out) == 0 {
			return nil, errNoLoop
		}
	default:
		try(name, nil)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("there is no front end %q: %w", name, syscall.EINVAL)
	}
	return out, nil
}

// frontendAsAsked returns the name by which users ask for a front end that shows a device at
// a location.
func frontendAsAsked(name, location string) string {
	switch {
	case name == frontendNBD && !isNode(location):
		return FrontendNBDSocket
	case name == frontendFuse && isNode(location):
		return FrontendFuseLoop
	}
	return name
}

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

// vanish removes d from its front end, after its last request. Its link stays where the
// next process goes on with it.
func (d *Device) vanish() {
	if !d.leaves.Load() {
		d.unlink()
	}
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
