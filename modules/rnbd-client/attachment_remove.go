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

// removeFrom makes h give up the device and its memory, even if the device is
// used. If h does not, it is killed.
func (a *attachment) removeFrom(h *frontendProcess) {
	a.mu.Lock()
	if a.state == shown {
		a.since = time.Now()
		a.setState(removing)
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
		err = detachMemory(ctx, h, a.index)
	} else {
		_, err = letGo(ctx, h, a.index)
	}
	if err != nil && h.isAlive() && !time.Now().Before(end) {
		h.Kill(fmt.Errorf("it does not let go of device %s: %w", a.spec.Name, err))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
	if err == nil {
		a.leaveProcess()
		a.setState(gone)
		return
	}
	a.pause, a.due = 0, time.Now().Add(firstPause)
}

// letGo makes h give up the device at the index and its memory. had reports
// that h had the device.
func letGo(ctx context.Context, h *frontendProcess, index uint32) (had bool, err error) {
	done, err := h.acquireCall(ctx)
	if err != nil {
		return true, err
	}
	defer done()
	err = h.RemoveDevice(ctx, index, true)
	if err != nil && !errors.Is(err, syscall.ENODEV) {
		return true, err
	}
	had = err == nil
	return had, detachMemory(ctx, h, index)
}

// detachMemory makes h unmap the memory of the device at the index, if it has it.
func detachMemory(ctx context.Context, h *frontendProcess, index uint32) error {
	err := h.DetachArena(ctx, index)
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	return err
}

// onDismissal makes h give up the device unless it is used, and answers the
// dismissal. If nothing is left of the attachment, the end of the worker is the
// answer: the index is free then.
func (a *attachment) onDismissal(h *frontendProcess) {
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
	a.cancelCall, a.ask = nil, nil
	if err != nil || kept != nil {
		ask.answer <- err
	}
	switch {
	case err != nil && a.want == wantShown && h.isAlive():
		a.setState(shown)
	case err != nil && !h.isAlive(): // lose follows
	case err != nil:
		a.since, a.due = time.Now(), time.Time{}
	case kept != nil:
		a.want, a.since, a.due = wantGone, time.Now(), time.Time{}
	default:
		a.leaveProcess()
		a.setState(gone)
	}
}

// detachDismissed makes h unmap the memory of a device that it has given up.
// The removal cannot be undone any more, so the caller of dismiss cannot cancel
// this.
func (a *attachment) detachDismissed(h *frontendProcess) error {
	ctx, cancel := a.callContext(h, nil)
	defer cancel()
	ctx, cancelTime := context.WithTimeout(ctx, callTimeout)
	defer cancelTime()
	return detachMemory(ctx, h, a.index)
}

func (a *attachment) beginDismiss(h *frontendProcess) (context.Context, context.CancelFunc, *removeCall) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ctx, cancel := a.callContext(h, a.ask.ctx)
	a.cancelCall = cancel
	a.setState(removing)
	return ctx, cancel, a.ask
}

// knownTo reports whether h has the device. If it does, an ENODEV before came
// from the disk behind it.
func (a *attachment) knownTo(ctx context.Context, h *frontendProcess) bool {
	_, err := h.DeviceStatus(ctx, a.index)
	return !errors.Is(err, syscall.ENODEV)
}

// clearDisk makes h remove the disk of the device from the kernel. h was never
// shown the device.
func (a *attachment) clearDisk(h *frontendProcess) {
	a.mu.Lock()
	a.process = h
	a.setState(removing)
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
	a.leaveProcess()
	a.err = err
	if err == nil {
		a.log.Info("front end is back and the unmapped device is away", "location", a.spec.Location)
		a.setState(gone)
		return
	}
	a.setState(lingering)
	if !h.isAlive() { // the death of a process is no failure of this device
		return
	}
	a.clears++
	a.scheduleTry(firstPause)
	a.log.Warn("front end is back and does not take the unmapped device away yet", "location", a.spec.Location, "err", err)
}

// takeOver shows h the disk and removes it again. The disk gets new memory:
// that of the device is freed, or a server may still write to it.
func (a *attachment) takeOver(ctx context.Context, h *frontendProcess) error {
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
