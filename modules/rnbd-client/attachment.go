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

// attachment is the place of one device at one front end, from the first try to
// show it until no process and no driver has anything of it. It outlives
// processes, and it may outlive the device: what is unmapped by force can stay
// with a process that is slow to let go of it, or in the kernel, where a dead
// process has left a disk whose users wait. Until it is gone it keeps its index.
//
// One goroutine, the worker (attachment_work.go), makes all its moves and all
// calls to the process about it. Everybody else changes what is wanted and
// wakes the worker, so what hangs holds up this attachment and no other.
type attachment struct {
	fe    *frontend
	index uint32
	log   *slog.Logger
	node  bool          // users may have a disk: one that outlives the process
	wake  chan struct{} // holds a token when something has changed for the worker
	done  chan struct{} // closed when the attachment is gone

	// mu guards the rest. It comes after frontend.mu and before Device.mu. Nothing
	// is called with it held but what only computes.
	mu      sync.Mutex
	state   attState
	changed chan struct{} // closed and replaced at every move
	want    want
	dev     *Device           // nil: it takes no part any more
	spec    plugin.DeviceSpec // as the process was told last
	host    *host             // that has the device, may have it, or is asked to let go of it
	ask     *dismissal
	give    context.CancelFunc // gives up the call under way, if that may be given up
	told    blk.Limits         // what the process knows

	// Of the worker; others look with mu held.
	first  *firstTry // under way or to be made; nil: it has ended
	tries  int       // to show it, at host
	unsure bool      // host may have it although the last try failed
	clears int       // tries to take it away that failed
	since  time.Time // host is asked to let go of it
	pause  time.Duration
	due    time.Time // of the next try
	err    error     // of the last try
	undone bool      // it ended, and its disk is left
}

// attState is where an attachment is in its life.
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
// When the front end ends, every state leads to gone, and what is in the kernel
// is left to the next daemon.
type attState uint8

const (
	absent    attState = iota // no process knows the device
	attaching                 // a process is being shown it, and uses its memory
	shown                     // a process serves it
	away                      // the process is gone, or could not take it over: it is shown again
	removing                  // a process is asked to let go of it
	lingering                 // no process has it, the kernel may have its disk
	gone                      // nothing is left of it
)

var attNames = [...]string{"absent", "attaching", "shown", "away", "removing", "lingering", "gone"}

func (s attState) String() string { return attNames[s] }

// attMoves are those of the drawing.
var attMoves = map[attState][]attState{
	absent:    {attaching, lingering, gone},
	attaching: {shown, away, removing, lingering, gone},
	shown:     {shown, removing, away, lingering, gone}, // shown: what the process knows has changed
	away:      {attaching, lingering, gone},
	removing:  {shown, away, lingering, gone},
	lingering: {removing, gone},
}

// want is what the attachment is to become.
type want uint8

const (
	wantShown want = iota
	wantGone       // also if it is used; its disk is taken out of the kernel
	wantLeft       // no process serves it; its disk stays for whoever maps it next
)

// firstTry is what a map waits for.
type firstTry struct {
	ctx   context.Context
	fresh bool          // a new disk, not one of the last daemon
	ended chan struct{} // closed when err is set
	err   error
}

// dismissal asks to take the device away unless it is used.
type dismissal struct {
	ctx    context.Context
	answer chan error // has room for one
}

const (
	// firstPause is before the second try, to show a device as well as to take
	// one away; the next ones double.
	firstPause = 100 * time.Millisecond
	mostPause  = 30 * time.Second
	// comebackPause is that of a device which a new process does not take over.
	comebackPause = time.Second
	// lingerTime is for a process to let go of a device that is taken away by
	// force, retractTime for one to give up a take-over. Then it is killed: a
	// dead process holds nothing, and the next one takes over its other devices.
	lingerTime  = time.Minute
	retractTime = 5 * time.Second
	// clearTime bounds one try to take away what a dead process has left.
	clearTime  = 30 * time.Second
	clearTries = 10
	// callTimeout bounds calls to a process that only inform.
	callTimeout = 10 * time.Second
)

// newAttachment enters d at the front end, for the first try, which ends with
// ctx. EBUSY in the chain: no process runs, or the index is not free.
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
	if err := f.enter(a); err != nil {
		d.att.Store(nil)
		return nil, nil, err
	}
	return a, first, nil
}

// makeAttachment makes one that has no worker yet.
func (f *frontend) makeAttachment(spec plugin.DeviceSpec) *attachment {
	return &attachment{
		fe: f, index: spec.Index, log: f.log.With("device", spec.Name), spec: spec, node: mayHaveNode(spec.Config),
		wake: make(chan struct{}, 1), done: make(chan struct{}), changed: make(chan struct{}),
	}
}

// move changes the state. Caller holds mu, and is the worker.
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

// await waits until is says true of the attachment, or ctx ends: false. is is
// called with mu held.
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

// awaitGone waits until nothing is left of the attachment, or ctx ends: false.
func (a *attachment) awaitGone(ctx context.Context) bool {
	select {
	case <-a.done:
		return true
	case <-ctx.Done():
		return a.isGone()
	}
}

// isShown waits for the end of the first try and returns its error. If ctx ends
// before, the device is not wanted any more.
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

// giveUp decides what becomes of a device whose first try is in vain. A new
// disk is taken away again. One of the last daemon must not be, since it may be
// in use: the process has to give up the take-over. Caller holds mu.
func (a *attachment) giveUp(first *firstTry) {
	a.want = wantLeft
	if first.fresh {
		a.want = wantGone
	}
}

// dismiss takes the device away. It fails with EBUSY if the device is in use, or
// if no process serves it, since then its users are not known.
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
	case a.ask != nil:
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

// missedLocked is the error of a removal without force while no process serves
// the device. Caller holds mu.
func (a *attachment) missedLocked() error {
	return fmt.Errorf("front end %s has died, and its next process has not got %s back yet; wait for that, or force it: %w", a.fe.cfg.Name, a.spec.Name, syscall.EBUSY)
}

// evict takes the device away from its users. It does not wait for long: what
// is left then is taken away by the worker.
func (a *attachment) evict(ctx context.Context) {
	a.setWant(wantGone)
	if !a.fe.alive() && a.fe.client.life.Err() != nil {
		return // stop waits once for all
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

// setWant changes what is wanted. Only the end of the device or of the front
// end takes wantShown back.
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

// release ends the device's part, whose last request has ended and which is
// not being shown: its memory is given back.
func (a *attachment) release() {
	a.mu.Lock()
	a.dev = nil
	a.mu.Unlock()
	a.setWant(wantGone)
}

// shows reports whether a process is being shown the device, and so uses its
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

// settled reports whether there is no use in waiting for h to serve the device:
// it does, or it has failed to once, or requests of an earlier process keep it.
// Caller holds mu.
func (a *attachment) settled(h *host) bool {
	return a.want != wantShown || a.host == h && a.tries > 0 && a.state != attaching || a.busy()
}

// busy reports whether requests of the device are under way, which own its
// slots. Caller holds mu.
func (a *attachment) busy() bool { return a.dev != nil && a.dev.inflight() > 0 }

// left reports whether the kernel may have a disk of it that no process
// serves. Caller holds mu.
func (a *attachment) left() bool {
	return isNode(a.spec.Location) || a.spec.Location == plugin.LocationUnknown
}
