package client

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// attachment is one device at one front end, from the first try to show it
// until no process and no driver has any part of it. It outlives processes, and
// it may outlive the device: after an unmap by force a slow process may still
// have the device, or the kernel may still have the disk of a dead process,
// with users that wait. Until it is gone it keeps its index.
//
// One goroutine, the worker (attachment_work.go), makes all its state changes
// and all calls to the process about it. Other goroutines only change its
// want and wake the worker. So a call that hangs delays this attachment and
// no other.
type attachment struct {
	fe    *frontend
	index uint32
	log   *slog.Logger
	node  bool          // users may have a disk: one that outlives the process
	wake  chan struct{} // holds a token when something has changed for the worker
	done  chan struct{} // closed when the attachment is gone

	// mu guards the rest. It is taken after frontend.mu and before Device.mu.
	// Calls that may wait are made without it.
	mu      sync.Mutex
	state   attState
	changed chan struct{} // closed and replaced at every state change
	want    want
	dev     *Device           // nil: the device has ended
	spec    plugin.DeviceSpec // as last told to the process
	host    *host             // the process that has the device, may have it, or is asked to remove it
	ask     *dismissal
	give    context.CancelFunc // cancels the call under way, if that can be cancelled
	told    blk.Limits         // limits that the process knows

	// Written by the worker; others read with mu held.
	first  *firstTry // under way or to be made; nil: it has ended
	tries  int       // failed tries to show it, at host
	unsure bool      // host may have it although the last try failed
	clears int       // failed tries to remove its disk
	since  time.Time // since when host is asked to remove it
	pause  time.Duration
	due    time.Time // time of the next try
	err    error     // of the last try
	undone bool      // it has ended and its disk is left
}

// attState is the state of an attachment.
//
//	        first try                 shown                asked to let go
//	absent -----------> attaching ----------> shown <---------------------> removing
//	   |                 | |   ^                |      refused: it is used   | | |
//	   |                 | |   | next process,  | process has died           | | |
//	   |                 | |   | slots free     v                            | | |
//	   |                 | |   `------------- away <-------------------------' | |
//	   |                 | `----------------> |  process has died, not forced  | |
//	   |                 |    failed          |                                | |
//	   |                 |                    | unmapped by force              | |
//	   |     first try   |                    v       process has died         | |
//	   |     failed      |                lingering <--------------------------' |
//	   |                 |                 |  |  ^                               |
//	   |                 |                 |  |  | next process is asked         |
//	   |                 `-----------------|--|--`-----> removing                |
//	   | no process                        v  |              | has let go       |
//	   `---------------------------------> gone <------------'------------------'
//
// At the end of the front end every state leads to gone. Disks in the kernel
// are left to the next daemon.
type attState uint8

const (
	absent    attState = iota // no process knows the device
	attaching                 // a process is being shown it, and uses its memory
	shown                     // a process serves it
	away                      // the process has died, or could not take it over: it is to be shown again
	removing                  // a process is asked to remove it
	lingering                 // no process has it, the kernel may have its disk
	gone                      // nothing is left of it
)

var attNames = [...]string{"absent", "attaching", "shown", "away", "removing", "lingering", "gone"}

func (s attState) String() string { return attNames[s] }

// attMoves are the transitions of the diagram.
var attMoves = map[attState][]attState{
	absent:    {attaching, lingering, gone},
	attaching: {shown, away, removing, lingering, gone},
	shown:     {shown, removing, away, lingering, gone}, // shown: the process has learnt other limits
	away:      {attaching, lingering, gone},
	removing:  {shown, away, lingering, gone},
	lingering: {removing, gone},
}

// want is the aim of the attachment.
type want uint8

const (
	wantShown want = iota
	wantGone       // even if it is used; its disk is removed from the kernel
	wantLeft       // no process serves it; its disk stays for the next mapping of it
)

// firstTry is the first try to show a device. A map waits for its end.
type firstTry struct {
	ctx   context.Context
	fresh bool          // a new disk, not one of the last daemon
	ended chan struct{} // closed after err is set
	err   error
}

// dismissal is a request to remove the device unless it is used.
type dismissal struct {
	ctx    context.Context
	answer chan error // buffered, for one error
}

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

// newAttachment adds d to the front end and begins the first try, bounded by
// ctx. The error wraps EBUSY if no process runs or the index is not free.
func (f *frontend) newAttachment(ctx context.Context, d *Device) (*attachment, *firstTry, error) {
	if _, err := f.current(); err != nil {
		return nil, nil, err
	}
	slot := d.slotSize()
	a := f.makeAttachment(plugin.DeviceSpec{
		Index: d.index, Name: d.name, ArenaID: d.index, SlotSize: slot, Slots: d.arena.Size() / slot,
		Config: d.settings(), Identity: d.identity, Location: d.Location(), Limits: d.Limits(),
	})
	first := &firstTry{ctx: ctx, fresh: d.Location() == "", ended: make(chan struct{})}
	a.dev, a.first = d, first
	d.att.Store(a)
	if err := f.addAttachment(a); err != nil {
		d.att.Store(nil)
		return nil, nil, err
	}
	return a, first, nil
}

// makeAttachment makes an attachment without a worker.
func (f *frontend) makeAttachment(spec plugin.DeviceSpec) *attachment {
	return &attachment{
		fe: f, index: spec.Index, log: f.log.With("device", spec.Name), spec: spec, node: mayHaveNode(spec.Config),
		wake: make(chan struct{}, 1), done: make(chan struct{}), changed: make(chan struct{}),
	}
}

// move changes the state. Only the worker calls it, with mu held.
func (a *attachment) move(to attState) {
	if !slices.Contains(attMoves[a.state], to) {
		panic(fmt.Sprintf("attachment %d of front end %s: no way from %s to %s", a.index, a.fe.cfg.Name, a.state, to))
	}
	a.state = to
	close(a.changed)
	a.changed = make(chan struct{})
}

// poke wakes the worker. It may be called on a thread of the data path.
func (a *attachment) poke() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// await waits until is returns true. It returns false if ctx ends before. is
// is called with mu held.
func (a *attachment) await(ctx context.Context, is func() bool) bool {
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
	a.poke()
	return fmt.Errorf("front end %s: device %s: %w", a.fe.cfg.Name, a.spec.Name, context.Cause(first.ctx))
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

// dismiss removes the device. It fails with EBUSY if the device is in use. It
// also fails with EBUSY if no process serves the device, because then its users
// are not known.
func (a *attachment) dismiss(ctx context.Context) error {
	ask := &dismissal{ctx: ctx, answer: make(chan error, 1)}
	if err := a.accept(ask); err != nil || a.isGone() {
		return err
	}
	a.poke()
	select {
	case err := <-ask.answer:
		return err
	case <-a.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("front end %s: remove device %s: %w", a.fe.cfg.Name, a.spec.Name, context.Cause(ctx))
	}
}

func (a *attachment) accept(ask *dismissal) error {
	if _, err := a.fe.current(); err != nil && !a.isGone() {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.state == gone:
		return nil
	case a.ask != nil, a.state == removing && a.host.alive():
		return fmt.Errorf("front end %s is asked to remove %s already: %w", a.fe.cfg.Name, a.spec.Name, syscall.EBUSY)
	case a.state != shown || !a.host.alive():
		return a.missedLocked()
	}
	if a.give != nil {
		a.give()
	}
	a.ask = ask
	return nil
}

// missedLocked returns the error of a removal without force while no process
// serves the device. The caller holds mu.
func (a *attachment) missedLocked() error {
	return fmt.Errorf("front end %s has died, and its next process has not got %s back yet; wait for that, or force it: %w", a.fe.cfg.Name, a.spec.Name, syscall.EBUSY)
}

// evict removes the device even if it is used. It returns soon; the worker
// does the rest.
func (a *attachment) evict(ctx context.Context) {
	a.setWant(wantGone)
	if !a.fe.alive() && a.fe.client.life.Err() != nil {
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

// setWant changes the aim if it is still wantShown. It cancels the call under
// way.
func (a *attachment) setWant(w want) {
	a.mu.Lock()
	if a.want == wantShown {
		a.want = w
	}
	if a.give != nil {
		a.give()
	}
	a.mu.Unlock()
	a.poke()
}

// release ends the device's part after its last request, when no process is
// being shown the device. Its memory may be freed then.
func (a *attachment) release() {
	a.mu.Lock()
	a.dev = nil
	a.mu.Unlock()
	a.setWant(wantGone)
}

// shows reports whether a process is being shown the device and so uses its
// memory.
func (a *attachment) shows() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state == attaching
}

// lingers reports whether the attachment keeps its index although its device
// has ended.
func (a *attachment) lingers() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.want != wantShown && a.state != gone
}

// settled reports whether waiting for h to serve the device is pointless: h
// serves it, h has failed to once, or requests of an earlier process keep the
// device. The caller holds mu.
func (a *attachment) settled(h *host) bool {
	return a.want != wantShown || a.host == h && a.tries > 0 && a.state != attaching || a.busy()
}

// busy reports whether requests of the device are under way. They own its
// slots. The caller holds mu.
func (a *attachment) busy() bool { return a.dev != nil && a.dev.inflight() > 0 }

// left reports whether the kernel may have a disk of it without a process.
// The caller holds mu.
func (a *attachment) left() bool {
	return isNode(a.spec.Location) || a.spec.Location == plugin.LocationUnknown
}
