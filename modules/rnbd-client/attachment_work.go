package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// The worker of an attachment: its begin, its steps and its end.

// newAttachment adds d to the front end and begins the first try, bounded by
// ctx. The try waits for the next process if none runs. The error wraps EBUSY
// if the index is not free, ECANCELED if the front end ends.
func (f *frontend) newAttachment(ctx context.Context, d *Device) (*attachment, *firstTry, error) {
	slot := d.slotSize()
	a := f.makeAttachment(plugin.DeviceSpec{
		Index: d.index, Name: d.name, ArenaID: d.index, SlotSize: slot, Slots: d.arena.Size() / slot,
		Config: d.frontendSettings(), Identity: d.identity, Location: d.Location(), Limits: d.Limits(),
	})
	first := &firstTry{ctx: ctx, fresh: d.Location() == "" && !f.client.files.has(d.identity), ended: make(chan struct{})}
	a.dev, a.first = d, first
	d.att.Store(a)
	if err := f.addAttachment(a); err != nil {
		d.att.Store(nil)
		return nil, nil, err
	}
	return a, first, nil
}

// addAttachment adds a and starts its worker.
func (f *frontend) addAttachment(a *attachment) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.over:
		return fmt.Errorf("front end %s ends: %w", f.cfg.Name, syscall.ECANCELED)
	case f.attachments[a.index] != nil:
		return fmt.Errorf("front end %s still has device %d: %w", f.cfg.Name, a.index, syscall.EBUSY)
	}
	f.attachments[a.index] = a
	f.workers.Go(a.run)
	return nil
}

// run is the worker. It ends when the attachment is gone, or with the front
// end.
func (a *attachment) run() {
	for a.takeStep() {
	}
	a.leaveFile()
	a.fe.removeAttachment(a, a.undone)
	close(a.done)
	if a.node {
		a.fe.client.saveLeftovers()
	}
}

// removeAttachment removes a when its worker ends. undone reports that its disk is left.
func (f *frontend) removeAttachment(a *attachment, undone bool) {
	l, ok := a.leftoverLocked() // it does not change after the end of the worker
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.attachments, a.index)
	if undone && ok {
		f.undone = append(f.undone, l)
	}
}

// takeStep takes the next step. It returns false when the attachment is gone.
func (a *attachment) takeStep() bool {
	h, over := a.fe.currentProcess()
	a.mu.Lock()
	step, wait := a.currentInput(h, over).nextStep(), time.Until(a.due)
	if wait <= 0 && a.hasRequests() && a.process == h {
		wait = takeOverPause // the end of a live process's requests causes no event
	}
	a.mu.Unlock()
	switch step {
	case stepRest:
		return a.awaitChange(wait)
	case stepAttach:
		a.attachTo(h)
	case stepLose:
		a.onProcessLost()
	case stepRemove:
		a.removeFrom(h)
	case stepDismiss:
		a.onDismissal(h)
	case stepResize:
		a.tellLimits(h)
	case stepLinger:
		a.mu.Lock()
		a.setState(lingering)
		a.due, a.pause = time.Time{}, 0
		a.mu.Unlock()
	case stepClear:
		a.clearDisk(h)
	case stepEnd:
		a.endWork()
		return false
	}
	return true
}

// currentInput returns the input of the next decision, with h as the front end's
// process. The caller holds mu.
func (a *attachment) currentInput(h *frontendProcess, over bool) workerInput {
	s := workerInput{
		state: a.state, want: a.want, busy: a.hasRequests(), due: !time.Now().Before(a.due), left: a.leftInKernel(),
		asked: a.ask != nil, spent: a.clears >= clearTries, over: over,
		stale: a.state == shown && a.dev != nil && a.dev.Limits() != a.told,
	}
	switch {
	case h == nil:
	case h == a.process:
		s.process = sameProcess
	default:
		s.process = otherProcess
	}
	return s
}

// awaitChange waits until something changes. It returns false when the front end has
// ended.
func (a *attachment) awaitChange(wait time.Duration) bool {
	var due <-chan time.Time
	if wait > 0 {
		t := time.NewTimer(wait)
		defer t.Stop()
		due = t.C
	}
	select {
	case <-a.wake:
	case <-due:
	case <-a.fe.life.Done():
		a.endWork()
		return false
	}
	return true
}

// endWork ends the attachment.
func (a *attachment) endWork() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == lingering && a.clears >= clearTries {
		a.log.Error("disk of an unmapped device stays until its driver's own tool deletes it", "location", a.spec.Location)
	}
	a.endFirst(fmt.Errorf("front end %s has no process: %w", a.fe.cfg.Name, syscall.EBUSY))
	if a.state != gone {
		a.undone = a.want == wantGone && a.leftInKernel()
		a.leaveProcess()
		a.setState(gone)
	}
}

// onProcessLost records that the process has died.
func (a *attachment) onProcessLost() {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.state
	a.leaveProcess()
	a.tries, a.unsure, a.pause, a.due = 0, false, 0, time.Time{}
	switch {
	case a.want == wantGone && a.leftInKernel():
		a.setState(lingering)
	case was == removing && a.want != wantShown:
		a.setState(gone) // the worker finds nothing to do
	default:
		a.setState(away)
	}
}

// tellLimits tells h the limits of the device. If h refuses them it is told only
// later ones.
func (a *attachment) tellLimits(h *frontendProcess) {
	a.mu.Lock()
	if a.dev == nil {
		a.mu.Unlock()
		return
	}
	l := a.dev.Limits()
	ctx, cancel := a.callContext(h, nil)
	defer cancel()
	a.cancelCall = cancel
	a.mu.Unlock()
	ctx, cancelTime := context.WithTimeout(ctx, callTimeout)
	defer cancelTime()
	err := h.ResizeDevice(ctx, a.index, l)
	if err == nil {
		err = a.resizeLoop(ctx, l)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cancelCall = nil
	if errors.Is(ctx.Err(), context.Canceled) { // a more urgent step is due
		return
	}
	if err != nil {
		a.log.Warn("telling the device's size failed", "err", err)
	}
	a.told = l
	a.setState(a.state) // wakes the callers of await
}
