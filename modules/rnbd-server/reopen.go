package server

// The start of an io plugin's process after the death of one. The end of that
// one is in restart.go.
//
//	joined    a new process, new rings, the same arenas
//	reopen    each device is opened again; the plugin's Open returns after the
//	          fence: no I/O of the old process is on its way any more
//	revive    the device's parked requests are sent again

import (
	"context"
	"errors"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// onProcess gives the queues the rings of a new process, shows it the arenas, and
// opens the devices again. The supervisor calls it.
func (p *ioPlugin) onProcess(ctx context.Context, in *supervise.Instance) error {
	for i, q := range p.queues {
		q.resumeWith(in.Rings[i])
	}
	if err := p.showAll(ctx, in); err != nil {
		return err
	}
	current := p.server.currentDevices()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.told.Load() == nil {
		info := in.Info()
		p.told.Store(&info)
	}
	p.in = in
	for _, d := range p.devices {
		if d.isFailing() && d.why == failedPlugin && current[d] { // the plugin was reset
			d.setState(devRecovering)
		}
		if !d.isFailing() || d.why == failedOpen {
			p.work.Go(func() { p.reopenDevice(in, d) })
		}
	}
	return nil
}

// currentDevices returns the devices that another OPEN would share.
func (s *Server) currentDevices() map[*device]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[*device]bool{}
	for _, d := range s.devices {
		out[d] = true
	}
	return out
}

// resumeWith gives the queue a ring of the next process.
func (q *ioQueue) resumeWith(r *shm.Ring) {
	p := q.server.pumps[q.pump].pump
	q.ring = r
	p.Call(func() { q.sub = r.Submitter() })
	p.Add(q)
}

// reopenDevice opens d in a new process. It tries while the process runs and d is in
// use.
func (p *ioPlugin) reopenDevice(in *supervise.Instance, d *device) {
	late := time.AfterFunc(p.server.cfg.FenceTimeout, func() { p.onFenceLate(in, d) })
	defer late.Stop()
	begun := time.Now()
	for pause := reopenFirst; p.isAwaited(in, d); pause = min(2*pause, reopenMost) {
		opened, err := p.openAgain(in, d)
		switch {
		case err == nil:
			p.onReopened(in, d, &opened)
			return
		case in.Context().Err() != nil || errors.Is(err, plugin.ErrExited):
			return // the next process will open it
		case !isTransient(err) && time.Since(begun) > p.server.cfg.FenceTimeout:
			p.notOpened(in, d, err)
		}
		if !sleepFor(in.Context(), pause) {
			return
		}
	}
}

// isAwaited reports whether d has users and in is the process to serve it.
func (p *ioPlugin) isAwaited(in *supervise.Instance, d *device) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.awaitsLocked(in, d)
}

func (p *ioPlugin) awaitsLocked(in *supervise.Instance, d *device) bool {
	return p.devices[d.index] == d && p.in == in
}

// onFenceLate moves d to stuck: it waits for its fence for longer than FenceTimeout.
func (p *ioPlugin) onFenceLate(in *supervise.Instance, d *device) {
	p.mu.Lock()
	moved := p.awaitsLocked(in, d) && d.setState(devStuck)
	p.mu.Unlock()
	if moved {
		p.log.Error("device is stuck: I/O of the dead plugin has not ended", "device", d.name)
	}
}

// notOpened fails d until a later try succeeds.
func (p *ioPlugin) notOpened(in *supervise.Instance, d *device, err error) {
	p.mu.Lock()
	moved := p.awaitsLocked(in, d) && d.moveToFailing(failedOpen, err.Error())
	p.mu.Unlock()
	if moved {
		p.failAll([]*device{d})
	}
}

// onReopened puts d back into use.
func (p *ioPlugin) onReopened(in *supervise.Instance, d *device, onReopened *plugin.OpenedDisk) {
	limits := onReopened.Limits
	if limits.Size < d.limits.Load().Size {
		p.failUnfit(in, d, failedShrunk, "")
		return
	}
	if err := errors.Join(d.sameVolume(), checkCompatible(d.limits.Load(), &limits)); err != nil {
		p.failUnfit(in, d, failedChanged, err.Error())
		return
	}
	if !p.server.syncGuard(in.Context(), d.guard, d.key.id, d.name) {
		return // the next process will open it
	}
	p.noteIncarnation(in, d, onReopened)
	if p.isAwaited(in, d) {
		p.server.takeLimits(d, limits)
	}
	if !p.reviveDevice(in, d) {
		if err := p.closeDisk(in, d); err != nil && in.Context().Err() == nil {
			p.log.Warn("closing a device failed", "device", d.name, "err", err)
		}
	}
}

// failUnfit fails d for good: its requests may lie beyond its end, or its users
// know other facts about it.
func (p *ioPlugin) failUnfit(in *supervise.Instance, d *device, why failureReason, text string) {
	if err := p.closeDisk(in, d); err != nil && in.Context().Err() == nil {
		p.log.Warn("closing a device failed", "device", d.name, "err", err)
	}
	p.mu.Lock()
	moved := p.awaitsLocked(in, d) && (d.moveToFailing(why, text) || d.isFailing())
	if moved {
		d.why, d.openErr = why, text
		d.setState(devFailed)
	}
	p.mu.Unlock()
	if moved {
		p.failAll([]*device{d})
	}
}

// reviveDevice lets requests of d through again, parked ones first. It returns false
// if d was closed meanwhile, or the process has died again. close removes a
// device from the table under mu and then reads its state. So either close
// finds it open, or revive does not find it and the caller of revive closes it
// in the process.
func (p *ioPlugin) reviveDevice(in *supervise.Instance, d *device) bool {
	p.mu.Lock()
	revived := p.awaitsLocked(in, d) && d.setState(devOpen)
	told := d.told
	if revived {
		d.told = false
	}
	p.mu.Unlock()
	if !revived {
		return false
	}
	p.unpark(d)
	if told {
		p.server.notifyUsers(d, rnbdwire.EventBack)
	}
	p.log.Info("device is back", "device", d.name)
	return true
}
