package client

import (
	"context"
	"fmt"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// How an attachment is shown to a process.

// attachTo shows the device to h.
func (a *attachment) attachTo(h *frontendProcess) {
	if a.first != nil && a.node {
		a.fe.client.saveLeftovers() // a disk that a killed daemon leaves is known to the next one
	}
	d := a.beginAttach(h)
	if d == nil {
		return
	}
	before := d.Location()
	err := a.showIn(h, d)
	a.mu.Lock()
	defer a.mu.Unlock()
	again := a.tries > 0
	a.tries++
	a.err = err
	switch {
	case err == nil:
		a.onAttached(d, before)
		if again {
			a.log.Info("device is back")
		}
		return
	case a.first != nil:
		a.failedFirst(h, err)
		return
	case h.isAlive() && a.want == wantShown:
		a.scheduleTry(takeOverPause)
		a.log.Error("device does not come back, it is tried again", "pause", a.pause.String(), "err", err)
	}
	a.leaveProcess()
	a.process = h // the process of the last try
	a.setState(away)
}

// beginAttach makes h the process that may send requests for the device. It
// returns nil if the device is not wanted any more, because then its memory may
// be freed.
func (a *attachment) beginAttach(h *frontendProcess) *Device {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.want != wantShown || a.dev == nil {
		return nil
	}
	if a.process != h {
		a.tries, a.pause, a.unsure = 0, 0, false
	}
	a.process = h
	a.spec.Limits, a.spec.Generation = a.dev.Limits(), h.Generation
	a.dev.host.Store(h)
	a.setState(attaching)
	return a.dev
}

// onAttached records that the process serves the device. The caller holds mu.
func (a *attachment) onAttached(d *Device, before string) {
	a.pause, a.due = 0, time.Time{}
	a.spec.Location = d.Location()
	if a.first == nil && a.spec.Location != before {
		a.fe.workers.Go(func() { a.fe.client.onLocationChange(d) }) // moved waits for maps under way
	}
	a.setState(shown)
	a.endFirst(nil)
}

// failedFirst ends a failed first try at h. The caller holds mu.
func (a *attachment) failedFirst(h *frontendProcess, err error) {
	fresh := a.first.fresh
	a.giveUp(a.first)
	a.endFirst(err)
	switch {
	case h.isAlive():
		a.since, a.due = time.Now(), time.Time{}
		a.setState(removing)
	case fresh && a.node: // it may have died during the making of the disk
		a.spec.Location = plugin.LocationUnknown
		a.leaveProcess()
		a.setState(lingering)
	default:
		a.leaveProcess()
		a.setState(gone)
	}
}

// showIn makes h show the device. If h shows it already, because the answer to
// the last try was lost, that is success.
func (a *attachment) showIn(h *frontendProcess, d *Device) error {
	var also context.Context
	if a.first != nil {
		also = a.first.ctx
	}
	ctx, cancel := a.callContext(h, also)
	defer cancel()
	done, err := h.acquireCall(ctx)
	if err != nil {
		return err
	}
	defer done()
	if a.unsure && a.adoptShown(ctx, h, d) == nil {
		return nil
	}
	a.unsure = true
	if err = a.presentTo(ctx, h, d); err != nil && a.first == nil {
		_ = h.DetachArena(ctx, a.index) // the next try attaches it again
	}
	return err
}

// adoptShown records the device as shown if h has it.
func (a *attachment) adoptShown(ctx context.Context, h *frontendProcess, d *Device) error {
	st, err := h.DeviceStatus(ctx, a.index)
	if err != nil {
		return err
	}
	location, err := a.findLocation(ctx, st.Location)
	if err == nil {
		a.storeLocation(d, location, blk.Limits{})
	}
	return err
}

func (a *attachment) presentTo(ctx context.Context, h *frontendProcess, d *Device) error {
	name := a.fe.cfg.Name
	if err := h.AttachArena(ctx, a.index, d.arena); err != nil {
		return fmt.Errorf("front end %s: memory of %s: %w", name, d.name, err)
	}
	spec, err := a.specWithFile()
	if err != nil {
		return fmt.Errorf("front end %s: device %s: %w", name, d.name, err)
	}
	if err := h.AddDevice(ctx, spec); err != nil {
		return fmt.Errorf("front end %s: device %s: %w", name, d.name, err)
	}
	st, err := h.DeviceStatus(ctx, a.index)
	if err != nil {
		return fmt.Errorf("front end %s: device %s: %w", name, d.name, err)
	}
	location, err := a.findLocation(ctx, st.Location)
	if err != nil {
		return fmt.Errorf("front end %s: device %s: %w", name, d.name, err)
	}
	a.storeLocation(d, location, a.spec.Limits)
	return nil
}

// storeLocation stores the location of the device and the limits known to the process.
func (a *attachment) storeLocation(d *Device, location string, l blk.Limits) {
	a.mu.Lock()
	a.told = l
	a.mu.Unlock()
	d.setLocation(location)
}
