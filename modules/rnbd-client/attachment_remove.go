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

// How an attachment is taken away from a process, and out of the kernel.

// remove has h let go of the device and of its memory, whatever its users do.
// One that does not is killed.
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

// letGo makes h let go of the device at the index, and of its memory. had: it
// had the device.
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

// detach makes h let go of the memory of the device at the index, if it has it.
func detach(ctx context.Context, h *host, index uint32) error {
	err := h.DetachArena(ctx, index)
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	return err
}

// dismissed has h let go of the device unless it is used, and answers.
func (a *attachment) dismissed(h *host) {
	ctx, cancel, ask := a.beginDismiss(h)
	defer cancel()
	err := h.RemoveDevice(ctx, a.index, false)
	if errors.Is(err, syscall.ENODEV) && !a.knownTo(ctx, h) {
		err = nil // an earlier call was given up, and succeeded all the same
	}
	var kept error
	if err == nil {
		kept = detach(ctx, h, a.index)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.give, a.ask = nil, nil
	ask.answer <- err
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

func (a *attachment) beginDismiss(h *host) (context.Context, context.CancelFunc, *dismissal) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ctx, cancel := a.callContext(h, a.ask.ctx)
	a.give = cancel
	a.move(removing)
	return ctx, cancel, a.ask
}

// knownTo reports whether h has the device, and ENODEV is about the disk behind
// it.
func (a *attachment) knownTo(ctx context.Context, h *host) bool {
	_, err := h.DeviceStatus(ctx, a.index)
	return !errors.Is(err, syscall.ENODEV)
}

// clear has h, which was never shown the device, take its disk out of the
// kernel.
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
	if !h.alive() { // which is no failure of this device
		return
	}
	a.clears++
	a.later(firstPause)
	a.log.Warn("front end is back and does not take the unmapped device away yet", "location", a.spec.Location, "err", err)
}

// takeOver shows h the disk and takes it away again. It gets memory of its own:
// that of the device is given back, or a server may still write to it.
func (a *attachment) takeOver(ctx context.Context, h *host) error {
	spec := a.spec
	spec.Generation = h.Generation
	spec.Name += " (removed)" // the name may be another's by now
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
