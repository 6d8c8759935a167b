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

// takeOver takes over the device at s.Location. If the error wraps errGone, the
// caller makes a new device. Any other error leaves the disk as it is and can be
// retried: the disk may be mounted, and its requests wait.
func (d *ublkDevice) takeOver(ctx context.Context, s *plugin.DeviceSpec, queues []*queue) (err error) {
	defer func() {
		if err != nil && len(d.parts) == 0 {
			d.closeCharDevice() // the driver allows one opener; the next attempt needs it
		}
	}()
	id, ok := d.findDevice(s)
	if !ok {
		return fmt.Errorf("%w: %q is no ublk device", errGone, s.Location)
	}
	if d.info, err = d.ctl.deviceInfo(id); d.ctl.noDevice(err) {
		return fmt.Errorf("%w: %s: %w", errGone, s.Location, err)
	}
	if err != nil {
		return fmt.Errorf("the ublk driver does not tell whether %s is there still, so it is left as it is: %w", s.Location, err)
	}
	if d.info.private != identityToken(s.Identity) {
		return fmt.Errorf("%w: %s is somebody else's now", errGone, s.Location)
	}
	if d.info.flags&featUserRecovery == 0 || d.info.state == stateDead {
		return errors.Join(fmt.Errorf("%w: %s has ended with the process", errGone, s.Location), d.removeDevice())
	}
	if err := d.checkSlots(s); err != nil {
		return err
	}
	if err := d.awaitQuiesced(ctx); err != nil {
		return err
	}
	if err := d.serveTags(ctx, queues); err != nil {
		return err
	}
	if err := d.ctl.endRecovery(id, remainingTime(ctx, startTime)); err != nil {
		return d.withCause("end the recovery", err)
	}
	d.adoptSize(s.Limits.Size)
	return nil
}

// findDevice returns the number of the device at s.Location. If the location is not
// known, the device is found by its token.
func (d *ublkDevice) findDevice(s *plugin.DeviceSpec) (id uint32, ok bool) {
	if s.Location != plugin.LocationUnknown {
		return idOf(s.Location)
	}
	for _, id := range d.ctl.devices() {
		if info, err := d.ctl.deviceInfo(id); err == nil && info.private == identityToken(s.Identity) {
			return id, true
		}
	}
	return 0, false
}

// noDevice reports whether err is the driver's answer for a number without a
// device: ENODEV, or EINVAL before Linux 6.3.
func (c *ctrlDevice) noDevice(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) && !c.encoded
}

// adoptSize resizes the disk of an earlier process to its current size.
func (d *ublkDevice) adoptSize(want uint64) {
	size, err := d.ctl.deviceSize(d.info.id)
	if err != nil {
		d.log.Warn("the driver does not tell the size of the disk", "device", d.name, "path", d.diskPath(), "err", err)
	}
	d.ending.Lock()
	d.size = size
	d.ending.Unlock()
	if err := d.resizeDisk(want); err != nil {
		d.log.Warn("the disk keeps its size", "device", d.name, "path", d.diskPath(), "size", size, "wanted", want, "err", err)
	}
}

// checkSlots checks that the daemon offers enough slots for the disk's tags.
func (d *ublkDevice) checkSlots(s *plugin.DeviceSpec) error {
	need := int(d.info.queues) * int(d.info.depth)
	if need > s.Slots || int64(d.info.maxIO) > int64(s.SlotSize) {
		return fmt.Errorf("%s has %d requests of %d bytes, the daemon offers %d slots of %d now; start it with the settings of before, or unmap: %w",
			s.Location, need, d.info.maxIO, s.Slots, s.SlotSize, blk.EINVAL)
	}
	return nil
}

// awaitQuiesced waits until the driver has seen the end of the earlier process.
func (d *ublkDevice) awaitQuiesced(ctx context.Context) error {
	for end := time.Now().Add(remainingTime(ctx, quiesceTime)); ; {
		err := d.ctl.startRecovery(d.info.id)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return d.withCause("take over the device", err)
		}
		if time.Now().After(end) {
			return d.withCause("the earlier process still has the device", err)
		}
		time.Sleep(quiesceLook)
	}
}
