package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
)

// listChoices lists the front ends to try for a name, in order.
func (c *Client) listChoices(name string) ([]frontendChoice, error) {
	if name == "" {
		name = c.cfg.Frontend
	}
	var out []frontendChoice
	try := func(plugin string, settings map[string]string) {
		for _, f := range c.frontends {
			if f.cfg.Name == plugin {
				out = append(out, frontendChoice{f, settings})
			}
		}
	}
	attach, loop := map[string]string{settingAttach: "auto"}, map[string]string{settingLoop: loopYes}
	switch name {
	case FrontendNone:
		return nil, nil
	case FrontendAuto:
		try(frontendUblk, nil)
		if c.hasLoops() { // a disk before a socket
			try(frontendNBD, map[string]string{settingAttach: "yes"})
			try(frontendFuse, loop)
			try(frontendNBD, map[string]string{settingAttach: "no"})
		} else {
			try(frontendNBD, attach)
		}
		startingFirst(out)
		if len(out) == 0 && len(c.frontends) > 0 { // only plugins with other names are configured
			out = append(out, frontendChoice{fe: c.frontends[0]})
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

// startingFirst puts the front ends whose process does not start behind the others.
func startingFirst(all []frontendChoice) {
	rank := func(ch frontendChoice) int {
		if ch.fe.fails() {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(all, func(a, b frontendChoice) int { return rank(a) - rank(b) })
}

// hasLoops reports whether the front end "fuse-loop" may work here.
func (c *Client) hasLoops() bool {
	return len(c.cfg.LoopTool) > 0 && slices.ContainsFunc(c.frontends, func(f *frontend) bool { return f.cfg.Name == frontendFuse && f.cfg.MountDir != "" })
}

// name is the word of users for the choice.
func (c frontendChoice) name() string {
	switch {
	case c.settings[settingLoop] == loopYes:
		return FrontendFuseLoop
	case c.settings[settingAttach] == "no":
		return FrontendNBDSocket
	}
	return c.fe.cfg.Name
}

// showToUsers shows d to users by the first choice that works on this host.
func (d *Device) showToUsers(ctx context.Context) error {
	if len(d.choices) == 0 {
		return nil
	}
	for {
		fe := d.choices[0].fe
		d.fe.Store(fe)
		err := fe.addDevice(ctx, d)
		if err == nil {
			d.choices = d.choices[:1] // the one that serves d
			d.makeLink()
			return nil
		}
		if len(d.choices) == 1 || !isUnavailable(err) {
			return err
		}
		d.log.Info("front end does not work here, trying the next", "frontend", d.choices[0].name(), "cause", err)
		d.mu.Lock()
		d.passedOver = append(d.passedOver, fmt.Sprintf("%s: %v", d.choices[0].name(), err))
		d.mu.Unlock()
		fe.releaseDevice(d)
		d.choices = d.choices[1:]
	}
}

// removeFromUsers removes d from its front end, after its last request. Its link stays where the
// next process goes on with it.
func (d *Device) removeFromUsers() {
	if !d.leaves.Load() {
		d.removeLink()
	}
	if fe := d.fe.Load(); fe != nil {
		fe.releaseDevice(d)
	}
}

// isUnavailable reports whether err means that this host does not offer the
// front end, and not that the front end refuses the device.
func isUnavailable(err error) bool {
	for _, errno := range []error{syscall.ENODEV, syscall.ENOSYS, syscall.EACCES, syscall.EPERM} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}
