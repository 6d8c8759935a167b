package client

import (
	"fmt"
	"maps"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Name returns the device's name on this host, such as "rnbd0".
func (d *Device) Name() string { return d.name }

// Limits returns the limits last received from the server.
func (d *Device) Limits() blk.Limits { return *d.limits.Load() }

// State returns the device's state now.
func (d *Device) State() State {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state
}

// setState changes the state if moves has that change. The caller holds mu.
func (d *Device) setState(to State) {
	for _, ok := range moves[d.state] {
		if ok == to {
			d.log.Info("device state", "from", d.state.String(), "to", to.String())
			d.recordState(to)
			d.state = to
			return
		}
	}
	panic(fmt.Sprintf("device %s: no way from %s to %s", d.name, d.state, to))
}

// waitsForPath reports whether requests of d wait while there is no path. Pumps call it,
// too.
func (d *Device) waitsForPath() bool { return d.loss.Queue != 0 || d.session.leaving.Load() }

func (d *Device) wasDenied() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.deniedOpen
}

// failureText returns the reason why requests of d fail on the server, empty if
// they do not.
func (d *Device) failureText() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.failing {
		return ""
	}
	return d.lastError
}

// giveUp leaves d closed until it is remapped. The caller holds mu.
func (d *Device) giveUp(err error) {
	d.stopPatience()
	d.needsRemap, d.expired = true, false
	d.lastError = err.Error()
	d.setGate(gateFail)
	d.log.Error("device stays closed until it is remapped", "err", err)
}

// failWaiting fails the requests of d, whose time of loss=queue has run out. Users have seen
// errors then, so d opens again only when none of them has the device open, or when it is
// remapped. The caller holds mu.
func (d *Device) failWaiting(err error) {
	d.stopPatience()
	d.expired = true
	d.lastError = err.Error()
	d.setGate(gateFail)
	d.log.Error("requests of the device fail; it opens again when no user has it open, or when it is remapped", "err", err)
}

// endUse makes d Unmapped: its requests fail and no OPEN opens it any more. It
// returns the epoch in which the server opened it.
func (d *Device) endUse() (epoch uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopPatience()
	d.setState(Unmapped)
	d.setGate(gateFail)
	return d.openedIn
}

func (d *Device) stopPatience() {
	if d.patience != nil {
		d.patience.Stop()
		d.patience = nil
	}
}

// Location returns the place of the device for users: a path or a URI, empty if
// it is not known.
func (d *Device) Location() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.location
}

// setLocation stores the location reported by a front end.
func (d *Device) setLocation(location string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.location = location
}

func (d *Device) setGate(g deviceGate) {
	d.gate.Store(g)
	d.client.gates.Add(1)
	d.client.wakePumps()
}

func (d *Device) inFlight() (n int64) {
	for i := range d.shares {
		n += d.shares[i].inflight.Load()
	}
	return n
}

// slotSize returns the size of a slot of the arena, in bytes. It is fixed when
// the device is mapped, and a whole number of pages.
func (d *Device) slotSize() int { return d.slot }

// makeArena reserves the memory of the device's slots. The system allocates
// it when it is used.
func (d *Device) makeArena(slots int) error {
	size := int(d.Limits().MaxIOSize)
	if size == 0 {
		return fmt.Errorf("the server's largest request of %d bytes is smaller than a page: %w", d.session.transport.MaxIOSize(), syscall.EINVAL)
	}
	a, err := shm.NewArena("rnbd-"+d.name, slots*size)
	if err != nil {
		return err
	}
	r, err := d.session.transport.Register(a.Bytes())
	if err != nil {
		a.Close()
		return err
	}
	d.arena, d.region, d.slot = a, r, size
	return nil
}

func (d *Device) freeArena() {
	if d.region != nil {
		d.region.Close()
	}
	if d.arena != nil {
		d.arena.Close()
	}
}

func (c *Client) deviceAt(i uint32) *Device {
	if i >= MaxDevices {
		return nil
	}
	return c.devices[i].Load()
}

// Devices returns the mapped devices, by index.
func (c *Client) Devices() (out []*Device) {
	for i := range c.devices {
		if d := c.devices[i].Load(); d != nil {
			out = append(out, d)
		}
	}
	return out
}

// Device returns the mapped device with that name or node. A path on the server
// also names the device if only one mapping has it.
func (c *Client) Device(name string) (*Device, error) {
	var found []*Device
	for _, d := range c.Devices() {
		if d.name == name || d.hasNode(name) {
			return d, nil
		}
		if d.path == name {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, fmt.Errorf("there is no device %q: %w", name, syscall.ENOENT)
	}
	return nil, fmt.Errorf("%d devices have the path %q, name one of them: %w", len(found), name, syscall.EINVAL)
}

// hasNode reports whether name is the path of d's device node, or its name in
// /dev.
func (d *Device) hasNode(name string) bool {
	l := d.Location()
	return isNode(l) && (l == name || l == "/dev/"+name)
}

// isNode reports whether location is the path of a device node, and not a URI.
func isNode(location string) bool { return strings.HasPrefix(location, "/dev/") }

// wakePumps makes the pumps check the gates of parked requests.
func (c *Client) wakePumps() {
	for _, p := range c.pumps {
		p.pump.Do(func() {})
	}
}

// frontendSettings returns the settings of d for its front end.
func (d *Device) frontendSettings() map[string]string {
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
