package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// run is the worker. It ends when the attachment is gone, at the latest with
// the front end.
func (a *attachment) run() {
	for a.work() {
	}
	a.fe.leave(a, a.undone)
	close(a.done)
	if a.node {
		a.fe.client.note()
	}
}

// work does the next step. False: the attachment is gone.
func (a *attachment) work() bool {
	h, over := a.fe.now()
	a.mu.Lock()
	step, wait := a.situation(h, over).next(), time.Until(a.due)
	if wait <= 0 && a.busy() && a.host == h {
		wait = comebackPause // nobody tells when requests of a process that lives have ended
	}
	a.mu.Unlock()
	switch step {
	case stepRest:
		return a.rest(wait)
	case stepAttach:
		a.attach(h)
	case stepLose:
		a.lose()
	case stepRemove:
		a.remove(h)
	case stepDismiss:
		a.dismissed(h)
	case stepResize:
		a.resize(h)
	case stepLinger:
		a.mu.Lock()
		a.move(lingering)
		a.due, a.pause = time.Time{}, 0
		a.mu.Unlock()
	case stepClear:
		a.clear(h)
	case stepEnd:
		a.finish()
		return false
	}
	return true
}

// situation is what the next step depends on, while h is the front end's
// process. Caller holds mu.
func (a *attachment) situation(h *host, over bool) situation {
	s := situation{
		state: a.state, want: a.want, busy: a.busy(), due: !time.Now().Before(a.due), left: a.left(),
		asked: a.ask != nil, spent: a.clears >= clearTries, over: over,
		stale: a.state == shown && a.dev != nil && a.dev.Limits() != a.told,
	}
	switch {
	case h == nil:
	case h == a.host:
		s.host = sameHost
	default:
		s.host = otherHost
	}
	return s
}

// rest waits until something changes. False: the front end has ended.
func (a *attachment) rest(wait time.Duration) bool {
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
		a.finish()
		return false
	}
	return true
}

// finish ends the attachment.
func (a *attachment) finish() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == lingering && a.clears >= clearTries {
		a.log.Error("disk of an unmapped device stays until its driver's own tool deletes it", "location", a.spec.Location)
	}
	a.endFirst(fmt.Errorf("front end %s has no process: %w", a.fe.cfg.Name, syscall.EBUSY))
	if a.state != gone {
		a.undone = a.want == wantGone && a.left()
		a.leaveHost()
		a.move(gone)
	}
}

// endFirst tells the map that waits for the first try how it ended, if one
// does. Caller holds mu.
func (a *attachment) endFirst(err error) {
	if a.first != nil {
		a.first.err = err
		close(a.first.ended)
		a.first = nil
	}
}

// leaveHost ends the part of the process that there was. Caller holds mu.
func (a *attachment) leaveHost() {
	if a.dev != nil {
		a.dev.host.CompareAndSwap(a.host, nil)
	}
	a.host = nil
	if a.ask != nil {
		a.ask.answer <- a.missedLocked()
		a.ask = nil
	}
}

// later has the next try wait, longer from one to the next. Caller holds mu.
func (a *attachment) later(first time.Duration) {
	a.pause = min(max(2*a.pause, first), mostPause)
	a.due = time.Now().Add(a.pause)
}

// attach shows the device to h.
func (a *attachment) attach(h *host) {
	if a.first != nil && a.node {
		a.fe.client.note() // a disk that a killed daemon leaves is known to the next one
	}
	d := a.beginAttach(h)
	before := d.Location()
	err := a.show(h, d)
	a.mu.Lock()
	defer a.mu.Unlock()
	again := a.tries > 0
	a.tries++
	a.err = err
	switch {
	case err == nil:
		a.attached(d, before)
		if again {
			a.log.Info("device is back")
		}
		return
	case a.first != nil:
		a.failedFirst(h, err)
		return
	case h.alive() && a.want == wantShown:
		a.later(comebackPause)
		a.log.Error("device does not come back, it is tried again", "pause", a.pause.String(), "error", err)
	}
	a.leaveHost()
	a.host = h // where it was tried
	a.move(away)
}

// beginAttach makes h the process that may send requests for the device.
func (a *attachment) beginAttach(h *host) *Device {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.host != h {
		a.tries, a.pause, a.unsure = 0, 0, false
	}
	a.host = h
	a.spec.Limits, a.spec.Generation = a.dev.Limits(), h.Generation
	a.dev.host.Store(h)
	a.move(attaching)
	return a.dev
}

// attached takes over that the process serves the device. Caller holds mu.
func (a *attachment) attached(d *Device, before string) {
	a.pause, a.due = 0, time.Time{}
	a.spec.Location = d.Location()
	if a.first == nil && a.spec.Location != before {
		a.fe.workers.Go(func() { a.fe.client.moved(d) }) // which waits for maps under way
	}
	a.move(shown)
	a.endFirst(nil)
}

// failedFirst ends a first try at h that failed. Caller holds mu.
func (a *attachment) failedFirst(h *host, err error) {
	fresh := a.first.fresh
	a.giveUp(a.first)
	a.endFirst(err)
	switch {
	case h.alive():
		a.since, a.due = time.Now(), time.Time{}
		a.move(removing)
	case fresh && a.node: // it may have died with the disk half made
		a.spec.Location = plugin.LocationUnknown
		a.leaveHost()
		a.move(lingering)
	default:
		a.leaveHost()
		a.move(gone)
	}
}

// show has h show the device, unless it does already: the answer to the last
// try may have been lost.
func (a *attachment) show(h *host, d *Device) error {
	var also context.Context
	if a.first != nil {
		also = a.first.ctx
	}
	ctx, cancel := a.callContext(h, also)
	defer cancel()
	done, err := h.turn(ctx)
	if err != nil {
		return err
	}
	defer done()
	if a.unsure && a.adopt(ctx, h, d) == nil {
		return nil
	}
	a.unsure = true
	if err = a.present(ctx, h, d); err != nil && a.first == nil {
		_ = h.DetachArena(ctx, a.index) // which the next try attaches
	}
	return err
}

// adopt takes the device as shown if h has it.
func (a *attachment) adopt(ctx context.Context, h *host, d *Device) error {
	st, err := h.DeviceStatus(ctx, a.index)
	if err == nil {
		a.know(d, st.Location, blk.Limits{})
	}
	return err
}

func (a *attachment) present(ctx context.Context, h *host, d *Device) error {
	name := a.fe.cfg.Name
	if err := h.AttachArena(ctx, a.index, d.arena); err != nil {
		return fmt.Errorf("front end %s: memory of %s: %w", name, d.name, err)
	}
	if err := h.AddDevice(ctx, a.spec); err != nil {
		return fmt.Errorf("front end %s: device %s: %w", name, d.name, err)
	}
	st, err := h.DeviceStatus(ctx, a.index)
	if err != nil {
		return fmt.Errorf("front end %s: device %s: %w", name, d.name, err)
	}
	a.know(d, st.Location, a.spec.Limits)
	return nil
}

// know takes over where users find the device, and what the process knows of
// it.
func (a *attachment) know(d *Device, location string, l blk.Limits) {
	a.mu.Lock()
	a.told = l
	a.mu.Unlock()
	d.setLocation(location)
}

// callContext ends with h, with the front end, and with also, which may be nil.
func (a *attachment) callContext(h *host, also context.Context) (context.Context, context.CancelFunc) {
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

// lose takes over that the process is gone.
func (a *attachment) lose() {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.state
	a.leaveHost()
	a.tries, a.unsure, a.pause, a.due = 0, false, 0, time.Time{}
	switch {
	case a.want == wantGone && a.left():
		a.move(lingering)
	case was == removing && a.want != wantShown:
		a.move(gone) // and the worker finds nothing to do
	default:
		a.move(away)
	}
}

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

// resize tells h the limits of the device. One that refuses them is told the
// next ones only.
func (a *attachment) resize(h *host) {
	a.mu.Lock()
	if a.dev == nil {
		a.mu.Unlock()
		return
	}
	l := a.dev.Limits()
	ctx, cancel := a.callContext(h, nil)
	defer cancel()
	a.give = cancel
	a.mu.Unlock()
	ctx, cancelTime := context.WithTimeout(ctx, callTimeout)
	defer cancelTime()
	err := h.ResizeDevice(ctx, a.index, l)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.give = nil
	if errors.Is(ctx.Err(), context.Canceled) { // somebody wants something else first
		return
	}
	if err != nil {
		a.log.Warn("telling the device's size failed", "error", err)
	}
	a.told = l
	a.move(a.state) // for those who wait for it
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
	a.log.Warn("front end is back and does not take the unmapped device away yet", "location", a.spec.Location, "error", err)
}

// takeOver shows h the disk and takes it away again. It gets memory of its own:
// that of the device is given back, or a server may still write to it.
func (a *attachment) takeOver(ctx context.Context, h *host) error {
	spec := a.spec
	spec.Generation = h.Generation
	spec.Name += " (removed)" // the name may be another's by now
	arena, err := shm.NewArena("rnbd-"+spec.Name, spec.Slots*spec.SlotSize, shm.Plain)
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
