package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// When the process of a device dies, the driver quiesces the device: its disk
// stays, requests wait, and those that were in flight are issued again to the
// next process (features USER_RECOVERY and USER_RECOVERY_REISSUE, Linux 6.1).

const (
	quiesceTime = 20 * time.Second // until the driver has noticed the death; before Linux 6.8 it looks every 5 s
	quiesceLook = 5 * time.Millisecond
)

// errGone means that there is no device of this daemon to take over.
var errGone = errors.New("the device of the earlier process is gone")

// recover takes over the device at s.Location. If the error wraps errGone, the
// caller makes a new device. Any other error leaves the disk as it is and can be
// retried: the disk may be mounted, and its requests wait.
func (d *device) recover(ctx context.Context, s *plugin.DeviceSpec, queues []*queue) (err error) {
	defer func() {
		if err != nil && len(d.parts) == 0 {
			d.release() // the driver allows one opener; the next attempt needs it
		}
	}()
	id, ok := d.locate(s)
	if !ok {
		return fmt.Errorf("%w: %q is no ublk device", errGone, s.Location)
	}
	if d.info, err = d.ctl.info(id); d.ctl.noDevice(err) {
		return fmt.Errorf("%w: %s: %w", errGone, s.Location, err)
	}
	if err != nil {
		return fmt.Errorf("the ublk driver does not tell whether %s is there still, so it is left as it is: %w", s.Location, err)
	}
	if d.info.private != token(s.Identity) {
		return fmt.Errorf("%w: %s is somebody else's now", errGone, s.Location)
	}
	if d.info.flags&featUserRecovery == 0 || d.info.state == stateDead {
		return errors.Join(fmt.Errorf("%w: %s has ended with the process", errGone, s.Location), d.destroy())
	}
	if err := d.fits(s); err != nil {
		return err
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	if err := d.serve(ctx, queues); err != nil {
		return err
	}
	if err := d.ctl.endRecovery(id, within(ctx, startTime)); err != nil {
		return d.because("end the recovery", err)
	}
	d.adopt(s.Limits.Size)
	return nil
}

// locate returns the number of the device at s.Location. If the location is not
// known, the device is found by its token.
func (d *device) locate(s *plugin.DeviceSpec) (id uint32, ok bool) {
	if s.Location != plugin.LocationUnknown {
		return idOf(s.Location)
	}
	for _, id := range d.ctl.devices() {
		if info, err := d.ctl.info(id); err == nil && info.private == token(s.Identity) {
			return id, true
		}
	}
	return 0, false
}

// noDevice reports whether err is the driver's answer for a number without a
// device: ENODEV, or EINVAL before Linux 6.3.
func (c *control) noDevice(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) && !c.encoded
}

// adopt resizes the disk of an earlier process to its current size.
func (d *device) adopt(want uint64) {
	size, err := d.ctl.size(d.info.id)
	if err != nil {
		d.log.Warn("the driver does not tell the size of the disk", "device", d.name, "path", d.path(), "err", err)
	}
	d.ending.Lock()
	d.size = size
	d.ending.Unlock()
	if err := d.resize(want); err != nil {
		d.log.Warn("the disk keeps its size", "device", d.name, "path", d.path(), "size", size, "wanted", want, "err", err)
	}
}

// fits checks that the daemon offers enough slots for the disk's tags.
func (d *device) fits(s *plugin.DeviceSpec) error {
	need := int(d.info.queues) * int(d.info.depth)
	if need > s.Slots || int64(d.info.maxIO) > int64(s.SlotSize) {
		return fmt.Errorf("%s has %d requests of %d bytes, the daemon offers %d slots of %d now; start it with the settings of before, or unmap: %w",
			s.Location, need, d.info.maxIO, s.Slots, s.SlotSize, blk.EINVAL)
	}
	return nil
}

// begin waits until the driver has seen the end of the earlier process.
func (d *device) begin(ctx context.Context) error {
	for end := time.Now().Add(within(ctx, quiesceTime)); ; {
		err := d.ctl.startRecovery(d.info.id)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return d.because("take over the device", err)
		}
		if time.Now().After(end) {
			return d.because("the earlier process still has the device", err)
		}
		time.Sleep(quiesceLook)
	}
}
