package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// What others ask of an attachment. They change its aim, wake its worker and wait.

// isShown waits for the end of the first try and returns its error. If ctx ends
// before, the device is given up.
func (a *attachment) isShown(first *firstTry) error {
	select {
	case <-first.ended:
		return first.err
	case <-first.ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.first == nil {
		return first.err
	}
	a.giveUp(first)
	a.wakeWorker()
	if !a.fe.hasProcess() {
		return fmt.Errorf("%v; no process of it runs yet: %w", a.fe.notThere(), context.Cause(first.ctx))
	}
	return fmt.Errorf("front end %s: device %s: %w", a.fe.cfg.Name, a.spec.Name, context.Cause(first.ctx))
}

// awaitEnd waits after a failed first try, bounded by ctx, for what is left of it: the
// index is free then. A process that was taking over a disk may have got it, and its
// users send requests. They are served until it has given the disk up or is killed, so
// that none fails; the next process gets those that are left.
func (a *attachment) awaitEnd(ctx context.Context, first *firstTry) {
	limit := forcedClose
	switch {
	case !first.fresh && !errors.Is(context.Cause(ctx), errForced):
		ctx, limit = context.WithoutCancel(ctx), retractTime+forcedClose
	case ctx.Err() != nil:
		return
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	a.awaitGone(ctx)
}

// removeUnused removes the device. It fails with EBUSY if the device is in use. It
// also fails with EBUSY if no process serves the device, because then its users
// are not known.
func (a *attachment) removeUnused(ctx context.Context) error {
	ask := &removeCall{ctx: ctx, answer: make(chan error, 1)}
	if err := a.acceptDismissal(ask); err != nil || a.isGone() {
		return err
	}
	a.wakeWorker()
	select {
	case err := <-ask.answer:
		return err
	case <-a.done:
		return nil
	case <-ctx.Done():
	}
	if a.mayEnd() {
		<-a.done
		return nil
	}
	return fmt.Errorf("front end %s: remove device %s: %w", a.fe.cfg.Name, a.spec.Name, context.Cause(ctx))
}

func (a *attachment) acceptDismissal(ask *removeCall) error {
	if _, err := a.fe.requireProcess(); err != nil && !a.isGone() {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.state == gone:
		return nil
	case a.ask != nil, a.state == removing && a.process.isAlive():
		return fmt.Errorf("front end %s is asked to remove %s already: %w", a.fe.cfg.Name, a.spec.Name, syscall.EBUSY)
	case a.state != shown || !a.process.isAlive():
		return a.missedLocked()
	}
	if a.cancelCall != nil {
		a.cancelCall()
	}
	a.ask = ask
	return nil
}

// forceRemove removes the device even if it is used. It returns soon; the worker
// does the rest.
func (a *attachment) forceRemove(ctx context.Context) {
	a.setWant(wantGone)
	if !a.fe.hasProcess() && a.fe.client.life.Err() != nil {
		return // stop waits for all evicted devices together
	}
	ctx, cancel := context.WithTimeout(ctx, forcedClose)
	defer cancel()
	if a.awaitGone(ctx) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == lingering {
		a.log.Warn("front end has died, its next process takes the device away", "location", a.spec.Location)
	} else {
		a.log.Warn("front end does not let go of the device", "state", a.state.String(), "err", a.err)
	}
}

// endAfterRequests ends the device's part after its last request, when no process is
// being shown the device. Its memory may be freed then.
func (a *attachment) endAfterRequests() {
	a.mu.Lock()
	a.dev = nil
	a.mu.Unlock()
	a.setWant(wantGone)
}

// isShowing reports whether a process is being shown the device and so uses its
// memory.
func (a *attachment) isShowing() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state == attaching
}

// keepsIndex reports whether the attachment keeps its index although its device
// has ended.
func (a *attachment) keepsIndex() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.want != wantShown && a.state != gone
}

// settledWith reports whether waiting for h to serve the device is pointless: h
// serves it, h has failed to once, or requests of an earlier process keep the
// device. The caller holds mu.
func (a *attachment) settledWith(h *frontendProcess) bool {
	return a.want != wantShown || a.process == h && a.tries > 0 && a.state != attaching || a.hasRequests()
}
