package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// How an attachment is removed from a process and from the kernel.

// remove makes h give up the device and its memory, even if the device is
// used. If h does not, it is killed.
func (a *attachment) remove(h *host) {
	a.mu.Lock()
	if a.state == shown {
		a.since = time.Now()
		a.move(removing)
	}
	retract, limit := a.want == wantLeft, lingerTime
	if retract {
		limit = retractTime
	}
	end := a.since.Add(limit)
	a.mu.Unlock()
	ctx, cancel := a.callContext(h, nil)
	defer cancel()
	ctx, cancelTime := context.WithDeadline(ctx, end)
	defer cancelTime()
	var err error
	if retract {
		err = detach(ctx, h, a.index)
	} else {
		_, err = letGo(ctx, h, a.index)
	}
	if err != nil && h.alive() && !time.Now().Before(end) {
		h.Kill(fmt.Errorf("it does not let go of device %s: %w", a.spec.Name, err))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
	if err == nil {
		a.leaveHost()
		a.move(gone)
		return
	}
	a.pause, a.due = 0, time.Now().Add(firstPause)
}

// letGo makes h give up the device at the index and its memory. had reports
// that h had the device.
func letGo(ctx context.Context, h *host, index uint32) (had bool, err error) {
	done, err := h.turn(ctx)
	if err != nil {
		return true, err
	}
	defer done()
	err = h.RemoveDevice(ctx, index, true)
	if err != nil && !errors.Is(err, syscall.ENODEV) {
		return true, err
	}
	had = err == nil
	return had, detach(ctx, h, index)
}

// detach makes h unmap the memory of the device at the index, if it has it.
func detach(ctx context.Context, h *host, index uint32) error {
	err := h.DetachArena(ctx, index)
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	return err
}

// dismissed makes h give up the device unless it is used, and answers the
// dismissal. If nothing is left of the attachment, the end of the worker is the
// answer: the index is free then.
func (a *attachment) dismissed(h *host) {
	ctx, cancel, ask := a.beginDismiss(h)
	defer cancel()
	unmounted := a.file != nil // then no user has the device open, though the process may not know of the last close yet
	err := a.takeFile(ctx)
	if err == nil {
		err = h.RemoveDevice(ctx, a.index, unmounted)
	}
	if errors.Is(err, syscall.ENODEV) && !a.knownTo(ctx, h) {
		err = nil // an earlier call was cancelled but has succeeded
	}
	var kept error
	if err == nil {
		kept = a.detachDismissed(h)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.give, a.ask = nil, nil
	if err != nil || kept != nil {
		ask.answer <- err
	}
	switch {
	case err != nil && a.want == wantShown && h.alive():
		a.move(shown)
	case err != nil && !h.alive(): // lose follows
	case err != nil:
		a.since, a.due = time.Now(), time.Time{}
	case kept != nil:
		a.want, a.since, a.due = wantGone, time.Now(), time.Time{}
	default:
		a.leaveHost()
		a.move(gone)
	}
}

// detachDismissed makes h unmap the memory of a device that it has given up.
// The removal cannot be undone any more, so the caller of dismiss cannot cancel
// this.
func (a *attachment) detachDismissed(h *host) error {
	ctx, cancel := a.callContext(h, nil)
	defer cancel()
	ctx, cancelTime := context.WithTimeout(ctx, callTimeout)
	defer cancelTime()
	return detach(ctx, h, a.index)
}

func (a *attachment) beginDismiss(h *host) (context.Context, context.CancelFunc, *dismissal) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ctx, cancel := a.callContext(h, a.ask.ctx)
	a.give = cancel
	a.move(removing)
	return ctx, cancel, a.ask
}

// knownTo reports whether h has the device. If it does, an ENODEV before came
// from the disk behind it.
func (a *attachment) knownTo(ctx context.Context, h *host) bool {
	_, err := h.DeviceStatus(ctx, a.index)
	return !errors.Is(err, syscall.ENODEV)
}

// clear makes h remove the disk of the device from the kernel. h was never
// shown the device.
func (a *attachment) clear(h *host) {
	a.mu.Lock()
	a.host = h
	a.move(removing)
	a.mu.Unlock()
	ctx, cancel := a.callContext(h, nil)
	defer cancel()
	ctx, cancelTime := context.WithTimeout(ctx, clearTime)
	defer cancelTime()
	had, err := letGo(ctx, h, a.index)
	if err == nil && !had {
		err = a.takeOver(ctx, h)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leaveHost()
	a.err = err
	if err == nil {
		a.log.Info("front end is back and the unmapped device is away", "location", a.spec.Location)
		a.move(gone)
		return
	}
	a.move(lingering)
	if !h.alive() { // the death of a process is no failure of this device
		return
	}
	a.clears++
	a.later(firstPause)
	a.log.Warn("front end is back and does not take the unmapped device away yet", "location", a.spec.Location, "err", err)
}

// takeOver shows h the disk and removes it again. The disk gets new memory:
// that of the device is freed, or a server may still write to it.
func (a *attachment) takeOver(ctx context.Context, h *host) error {
	spec := a.spec
	spec.Generation = h.Generation
	spec.Name += " (removed)" // another device may have the name by now
	arena, err := shm.NewArena("rnbd-"+spec.Name, spec.Slots*spec.SlotSize)
	if err != nil {
		return err
	}
	defer arena.Close()
	if err := h.AttachArena(ctx, spec.ArenaID, arena); err != nil {
		return fmt.Errorf("memory to take it over: %w", err)
	}
	err = h.AddDevice(ctx, spec)
	if errors.Is(err, syscall.ENODEV) && spec.Location == plugin.LocationUnknown {
		err = nil // there is no disk
	}
	if err != nil {
		err = fmt.Errorf("take it over: %w", err)
	}
	_, rerr := letGo(ctx, h, a.index)
	return errors.Join(err, rerr)
}
