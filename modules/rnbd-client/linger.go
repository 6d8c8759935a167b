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

// A device that is removed by force may stay with its front end for a while: the
// process is slow to let go of it, or it is dead and has left a disk in the kernel,
// whose users wait. It lingers until a process has let go, and keeps its index.

const (
	lingerTime  = time.Minute
	lingerPause = 100 * time.Millisecond
	awaitPause  = 10 * time.Millisecond

	clearTime     = 30 * time.Second // to take a disk away, as start has it to show all
	clearTries    = 10
	maxClearPause = 30 * time.Second

	// takeAwayTime is how long the end of a front end waits for it to take away what
	// lingers. Nobody's requests are under way then.
	takeAwayTime = 5 * time.Second
)

// lingerer is such a device, without what an unmap gives back.
type lingerer struct {
	f    *frontend
	spec plugin.DeviceSpec
	left bool // it is to be taken away from the next process too
}

// evict removes d by force. It does not wait for long: what lingers is taken away
// in the background.
func (f *frontend) evict(ctx context.Context, d *Device) {
	ctx, cancel := context.WithTimeout(ctx, forcedClose)
	defer cancel()
	proc, known, missing := f.strike(d)
	if proc == nil || missing {
		if known && f.linger(nil, d, true) {
			f.log.Warn("front end has died, its next process takes the device away", "device", d.name, "location", d.Location())
			f.awaitGone(ctx, d.index)
		}
		return
	}
	if err := proc.RemoveDevice(ctx, d.index, true); err != nil && !errors.Is(err, syscall.ENODEV) {
		f.log.Warn("front end does not let go of the device", "device", d.name, "error", err)
		f.linger(proc, d, known)
	}
}

// strike takes d off the list of what the next process is shown, and returns the
// one there is. known: d was on the list. missing: the process has not got it yet.
func (f *frontend) strike(d *Device) (proc *plugin.Process, known, missing bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if known = f.devices[d.index] == d; known {
		delete(f.devices, d.index)
	}
	_, missing = f.missing[d]
	delete(f.missing, d)
	return f.proc, known, missing
}

// awaitGone waits until nothing lingers at the index. A client that closes has no
// time for it here: stop waits once for all.
func (f *frontend) awaitGone(ctx context.Context, index uint32) {
	for f.lingers(index) && f.client.life.Err() == nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(awaitPause):
		}
	}
}

// linger sees to the end of d at proc, nil: at the next process. left: if proc
// dies, it is the next one's to take away what it leaves. False: the front end
// ends, and what is there stays for the next daemon.
func (f *frontend) linger(proc *plugin.Process, d *Device, left bool) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lingerLocked(proc, d, left)
}

// lingerLocked is linger for callers who hold mu.
func (f *frontend) lingerLocked(proc *plugin.Process, d *Device, left bool) bool {
	if f.stopping {
		return false
	}
	if f.lingering[d.index] {
		return true
	}
	f.lingering[d.index] = true
	l := &lingerer{f: f, spec: d.spec(f.generation), left: left}
	f.leaving.Go(func() {
		l.run(proc)
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.lingering, d.index)
	})
	return true
}

// lingers: the front end still has what was at the index.
func (f *frontend) lingers(index uint32) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lingering[index]
}

// lingers: a front end still has what was at the index.
func (c *Client) lingers(index uint32) bool {
	for _, f := range c.frontends {
		if f.lingers(index) {
			return true
		}
	}
	return false
}

func (l *lingerer) run(proc *plugin.Process) {
	if proc != nil && l.leave(proc) {
		l.f.log.Info("front end has let go of the device", "device", l.spec.Name)
		return
	}
	if l.left && !l.clear() && isNode(l.spec.Location) {
		l.f.log.Error("disk of an unmapped device stays until its driver's own tool deletes it", "device", l.spec.Name, "location", l.spec.Location)
	}
}

// leave waits for proc to let go of the device. One that does not is killed: a
// dead process holds nothing, and the next one takes over its other devices.
func (l *lingerer) leave(proc *plugin.Process) bool {
	ctx, cancel := context.WithTimeout(l.f.life, lingerTime)
	defer cancel()
	for {
		_, err := l.remove(ctx, proc)
		if err == nil {
			return true
		}
		select {
		case <-proc.Exited():
			return false
		case <-ctx.Done():
			l.kill(proc, err)
			return false
		case <-time.After(lingerPause):
		}
	}
}

// kill ends a process that does not let go, unless the front end ends anyway.
func (l *lingerer) kill(proc *plugin.Process, cause error) {
	if l.f.life.Err() != nil {
		return
	}
	l.f.log.Error("front end does not let go of the device, it is killed", "device", l.spec.Name, "error", cause)
	proc.Kill()
	select {
	case <-proc.Exited():
	case <-l.f.life.Done():
	}
}

// remove makes proc let go of the device and of its memory. had: it had the device.
func (l *lingerer) remove(ctx context.Context, proc *plugin.Process) (had bool, err error) {
	err = proc.RemoveDevice(ctx, l.spec.Index, true)
	if err != nil && !errors.Is(err, syscall.ENODEV) {
		return true, err
	}
	had = err == nil
	err = proc.DetachArena(ctx, l.spec.Index)
	if errors.Is(err, syscall.ENOENT) { // or somebody else has detached it
		err = nil
	}
	return had, err
}

// clear takes away what a dead process has left, as soon as there is another.
func (l *lingerer) clear() bool {
	pause := lingerPause
	for tries := 0; tries < clearTries; {
		proc := l.f.awaitProcess()
		if proc == nil {
			return false
		}
		if l.takeAway(proc) {
			return true
		}
		select {
		case <-proc.Exited(): // which is no failure of this device
		default:
			tries++
		}
		select {
		case <-l.f.life.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, maxClearPause)
	}
	return false
}

// awaitProcess waits for a process that has all devices. nil: the front end ends.
func (f *frontend) awaitProcess() *plugin.Process {
	for {
		if proc, err := f.process(); err == nil {
			return proc
		}
		select {
		case <-f.life.Done():
			return nil
		case <-time.After(awaitPause):
		}
	}
}

// takeAway tells whether proc has let go of the device, which it may have been
// shown. A disk that it was not shown is in the kernel still: it takes it over before.
func (l *lingerer) takeAway(proc *plugin.Process) bool {
	ctx, cancel := context.WithTimeout(l.f.life, clearTime)
	defer cancel()
	log := l.f.log.With("device", l.spec.Name, "location", l.spec.Location)
	had, err := l.remove(ctx, proc)
	if err == nil && !had && isNode(l.spec.Location) {
		err = l.takeOver(ctx, proc)
	}
	if err != nil {
		log.Warn("front end is back and does not take the unmapped device away yet", "error", err)
		return false
	}
	log.Info("front end is back and the unmapped device is away")
	return true
}

// takeOver shows proc the disk and takes it away again. It gets memory of its own:
// that of the device is given back, or a server may still write to it.
func (l *lingerer) takeOver(ctx context.Context, proc *plugin.Process) error {
	arena, err := shm.NewArena("rnbd-"+l.spec.Name, l.spec.Slots*l.spec.SlotSize, shm.Plain)
	if err != nil {
		return err
	}
	defer arena.Close()
	if err := proc.AttachArena(ctx, l.spec.ArenaID, arena); err != nil {
		return fmt.Errorf("memory to take it over: %w", err)
	}
	spec := l.spec
	spec.Name += " (removed)" // the name may be another's by now
	if err = proc.AddDevice(ctx, spec); err != nil {
		err = fmt.Errorf("take it over: %w", err)
	}
	_, rerr := l.remove(ctx, proc)
	return errors.Join(err, rerr)
}
