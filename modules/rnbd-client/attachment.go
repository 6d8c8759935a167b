package client

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const (
	// firstPause is the pause before the second try to show or remove a
	// device. Later pauses double up to mostPause.
	firstPause = 100 * time.Millisecond
	mostPause  = 30 * time.Second
	// takeOverPause is the pause before a new process is asked again to take
	// over a device.
	takeOverPause = time.Second
	// lingerTime is the time for a process to remove a device by force,
	// retractTime that for one to give up a take-over. After it the process is
	// killed: a dead process holds nothing, and the next one takes over its
	// other devices.
	lingerTime  = time.Minute
	retractTime = 5 * time.Second
	// clearTime bounds one try to remove the disk of a dead process.
	clearTime  = 30 * time.Second
	clearTries = 10
	// callTimeout bounds calls to a process that only ask for information.
	callTimeout = 10 * time.Second
)

// errForced is the cause of the end of a map whose device is unmapped by force.
var errForced = fmt.Errorf("the device is unmapped by force: %w", syscall.ECANCELED)

// makeAttachment makes an attachment without a worker.
func (f *frontend) makeAttachment(spec plugin.DeviceSpec) *attachment {
	return &attachment{
		fe: f, index: spec.Index, log: f.log.With("device", spec.Name), spec: spec, node: f.cfg.MountDir == "" && mayHaveNode(spec.Config),
		wake: make(chan struct{}, 1), done: make(chan struct{}), changed: make(chan struct{}),
	}
}

// setState changes the state. Only the worker calls it, with mu held.
func (a *attachment) setState(to attState) {
	if !slices.Contains(attMoves[a.state], to) {
		panic(fmt.Sprintf("attachment %d of front end %s: no way from %s to %s", a.index, a.fe.cfg.Name, a.state, to))
	}
	a.state = to
	close(a.changed)
	a.changed = make(chan struct{})
}

// wakeWorker wakes the worker. It may be called on a thread of the data path.
func (a *attachment) wakeWorker() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// awaitState waits until is returns true. It returns false if ctx ends before. is
// is called with mu held.
func (a *attachment) awaitState(ctx context.Context, is func() bool) bool {
	for {
		a.mu.Lock()
		ok, changed := is(), a.changed
		a.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// mayEnd reports whether the worker has nothing left to do.
func (a *attachment) mayEnd() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state == gone
}

// isGone reports whether nothing is left of the attachment.
func (a *attachment) isGone() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

// awaitGone waits until the attachment is gone. It returns false if ctx ends
// before.
func (a *attachment) awaitGone(ctx context.Context) bool {
	select {
	case <-a.done:
		return true
	case <-ctx.Done():
		return a.isGone()
	}
}

// hasRequests reports whether requests of the device are under way. They own its
// slots. The caller holds mu.
func (a *attachment) hasRequests() bool { return a.dev != nil && a.dev.inFlight() > 0 }

// leftInKernel reports whether the kernel may have a disk of it without a process. The daemon
// itself removes loop devices. The caller holds mu.
func (a *attachment) leftInKernel() bool {
	return a.node && (isNode(a.spec.Location) || a.spec.Location == plugin.LocationUnknown)
}

// allAttachments returns the attachments.
func (f *frontend) allAttachments() []*attachment {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Values(f.attachments))
}

func (f *frontend) pokeAll() {
	for _, a := range f.allAttachments() {
		a.wakeWorker()
	}
}

// setWant changes the aim if it is still wantShown. It cancels the call under
// way.
func (a *attachment) setWant(w attachmentAim) {
	a.mu.Lock()
	if a.want == wantShown {
		a.want = w
	}
	if a.cancelCall != nil {
		a.cancelCall()
	}
	a.mu.Unlock()
	a.wakeWorker()
}

// giveUp handles the failure of a first try. A new disk is removed again. A
// disk of the last daemon is not, because it may be in use: the process must
// give up the take-over. The caller holds mu.
func (a *attachment) giveUp(first *firstTry) {
	a.want = wantLeft
	if first.fresh {
		a.want = wantGone
	}
}

// endFirst ends the first try, if there is one, with err. The caller holds
// mu.
func (a *attachment) endFirst(err error) {
	if a.first != nil {
		a.first.err = err
		close(a.first.ended)
		a.first = nil
	}
}

// leaveProcess ends the use of the current process. The caller holds mu.
func (a *attachment) leaveProcess() {
	if a.dev != nil {
		a.dev.host.CompareAndSwap(a.process, nil)
	}
	a.process = nil
	if a.ask != nil {
		a.ask.answer <- a.missedLocked()
		a.ask = nil
	}
}

// missedLocked returns the error of a removal without force while no process
// serves the device. The caller holds mu.
func (a *attachment) missedLocked() error {
	return fmt.Errorf("front end %s has died, and its next process has not got %s back yet; wait for that, or force it: %w", a.fe.cfg.Name, a.spec.Name, syscall.EBUSY)
}

// scheduleTry sets the time of the next try. Pauses grow from one try to the next.
// The caller holds mu.
func (a *attachment) scheduleTry(first time.Duration) {
	a.pause = min(max(2*a.pause, first), mostPause)
	a.due = time.Now().Add(a.pause)
}

// callContext ends with h, with the front end, and with also. also may be nil.
func (a *attachment) callContext(h *frontendProcess, also context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(h.Context())
	stops := []func() bool{context.AfterFunc(a.fe.life, cancel)}
	if also != nil {
		stops = append(stops, context.AfterFunc(also, cancel))
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel()
	}
}
