package server

// What happens when an io plugin's process dies (docs/decisions, "plugin
// crash"):
//
//	left      intake stops: every queue drops its ring after taking the
//	          completions that are in it, requests without one are parked
//	joined    a new process, new rings, the same arenas
//	reopen    each device is opened again; the plugin's Open returns after the
//	          fence: no I/O of the old process is on its way any more
//	revive    the device's parked requests are sent again
//
// Devices of a plugin that does not keep acknowledged writes fail instead: their
// requests end with EIO, and they stay failed until a client opens them again.
// Devices of a plugin that is given up fail until the plugin is reset. A request
// that the dead process had is never answered before the fence (passFence).

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/fence"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

const (
	// opensAtOnce devices are opened again at a time; one that takes longer than
	// opensQuick makes room for others, and waits on.
	opensAtOnce = 16
	opensQuick  = time.Second
	// reopenTimeout bounds one try.
	reopenTimeout = 30 * time.Second
	// Pauses between tries, to open a device or to find that its fence has passed.
	reopenFirst = 20 * time.Millisecond
	reopenMost  = 5 * time.Second
)

// joined gives the queues the rings of a new process, shows it the arenas, and
// opens the devices again. Supervisor.
func (p *ioPlugin) joined(ctx context.Context, in *supervise.Instance) error {
	for i, q := range p.queues {
		q.resume(in.Rings[i])
	}
	if err := p.showAll(ctx, in); err != nil {
		return err
	}
	current := p.server.currentDevices()
	p.mu.Lock()
	defer p.mu.Unlock()
	if in.Generation == 1 {
		p.info = in.Info()
	}
	p.in = in
	for _, d := range p.devices {
		if d.fails() && d.why == failedPlugin && current[d] { // the plugin was reset
			d.move(devRecovering)
		}
		if !d.fails() || d.why == failedOpen {
			p.work.Go(func() { p.reopen(in, d) })
		}
	}
	return nil
}

// currentDevices are those that a further OPEN would share.
func (s *Server) currentDevices() map[*device]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[*device]bool{}
	for _, d := range s.devices {
		out[d] = true
	}
	return out
}

// left takes the rings away from the queues and lets the devices wait, or fail.
// Supervisor.
func (p *ioPlugin) left(in *supervise.Instance, _ error) {
	keeps := in.Info().Crash == plugin.KeepsAcknowledged
	p.mu.Lock()
	p.in, p.dead = nil, in
	var failing []*device
	for _, d := range p.devices {
		if keeps {
			if d.now() == devOpen {
				d.move(devRecovering)
			}
		} else if d.moveToFailing(failedLost) {
			failing = append(failing, d)
		}
	}
	p.mu.Unlock()
	for _, q := range p.queues {
		q.suspend()
	}
	p.failAll(failing)
}

// gaveUp fails the devices: no process is started any more. Supervisor.
func (p *ioPlugin) gaveUp(error) {
	p.mu.Lock()
	var failing []*device
	for _, d := range p.devices {
		if d.moveToFailing(failedPlugin) {
			failing = append(failing, d)
		} else if d.why == failedOpen && d.fails() {
			d.why = failedPlugin
		}
	}
	p.mu.Unlock()
	p.failAll(failing)
}

// failAll answers the requests of devices that fail from now on.
func (p *ioPlugin) failAll(devices []*device) {
	for _, d := range devices {
		p.log.Error("device failed", "device", d.name, "state", d.state())
		p.mu.Lock()
		d.told = true
		p.mu.Unlock()
		p.server.tellAll(d, rnbdwire.EventFailed)
		p.unpark(d)
		if d.now() == devFailing {
			p.work.Go(func() { p.passFence(d) })
		}
	}
}

// unpark looks at the waiting requests of d again.
func (p *ioPlugin) unpark(d *device) {
	for _, q := range p.queues {
		p.server.pumps[q.pump].pump.Call(func() { q.unpark(d) })
	}
}

// passFence waits until nothing of a dead process of d can reach disk or memory
// any more, and answers the requests that it had then. Where the server sees no
// locks of the plugin's, a process that has the device open knows; where there is
// none, the requests wait for the plugin's reset, or for the end of their path.
func (p *ioPlugin) passFence(d *device) {
	for pause := reopenFirst; d.now() == devFailing; pause = min(2*pause, reopenMost) {
		if p.fenced(d) {
			p.mu.Lock()
			moved := d.move(devFailed)
			p.mu.Unlock()
			if moved {
				p.unpark(d)
			}
			return
		}
		if !sleep(p.life, pause) {
			return
		}
	}
}

// fenced reports whether the fence of a device that fails has passed.
func (p *ioPlugin) fenced(d *device) bool {
	if d.guard.file != nil {
		free, err := fence.Free(d.guard.file)
		return err == nil && free
	}
	p.mu.Lock()
	in, dead := p.in, p.dead
	p.mu.Unlock()
	if p.info.Crash == plugin.LosesAll { // its I/O ends with the process
		select {
		case <-dead.Reaped():
			return true
		default:
			return false
		}
	}
	if in == nil || !d.lost() { // reopen opens what is not lost
		return false
	}
	if _, err := p.openAgain(in, d); err != nil {
		return false
	}
	return p.closeDisk(in, d) == nil
}

// reopen opens d in a process that follows another one, for as long as that runs
// and d is wanted.
func (p *ioPlugin) reopen(in *supervise.Instance, d *device) {
	late := time.AfterFunc(p.server.cfg.FenceTimeout, func() { p.late(in, d) })
	defer late.Stop()
	begun := time.Now()
	for pause := reopenFirst; p.awaits(in, d); pause = min(2*pause, reopenMost) {
		limits, err := p.openAgain(in, d)
		switch {
		case err == nil:
			p.opened(in, d, limits)
			return
		case in.Context().Err() != nil || errors.Is(err, plugin.ErrExited):
			return // the next process will open it
		case !passing(err) && time.Since(begun) > p.server.cfg.FenceTimeout:
			p.notOpened(in, d, err)
		}
		if !sleep(in.Context(), pause) {
			return
		}
	}
}

// passing reports whether an error of OpenDisk ends by itself: the fence, or a lack
// of something.
func passing(err error) bool {
	for _, e := range []error{context.DeadlineExceeded, syscall.EBUSY, syscall.EAGAIN, syscall.EINTR, syscall.ENOMEM, syscall.ENFILE, syscall.EMFILE, syscall.ETIMEDOUT} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// openAgain asks in to open d, a few devices at a time.
func (p *ioPlugin) openAgain(in *supervise.Instance, d *device) (blk.Limits, error) {
	select {
	case p.opens <- struct{}{}:
	case <-in.Context().Done():
		return blk.Limits{}, plugin.ErrExited
	}
	makeRoom := sync.OnceFunc(func() { <-p.opens })
	defer makeRoom()
	defer time.AfterFunc(opensQuick, makeRoom).Stop()
	ctx, cancel := context.WithTimeout(in.Context(), reopenTimeout)
	defer cancel()
	return in.OpenDisk(ctx, d.request(in.Generation))
}

// awaits reports whether d is open, as far as clients are concerned, and in is the
// process to serve it.
func (p *ioPlugin) awaits(in *supervise.Instance, d *device) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.awaitsLocked(in, d)
}

func (p *ioPlugin) awaitsLocked(in *supervise.Instance, d *device) bool {
	return p.devices[d.index] == d && p.in == in
}

// late is told that d waits for its fence for long.
func (p *ioPlugin) late(in *supervise.Instance, d *device) {
	p.mu.Lock()
	moved := p.awaitsLocked(in, d) && d.move(devStuck)
	p.mu.Unlock()
	if moved {
		p.log.Error("device is stuck: I/O of the dead plugin has not ended", "device", d.name)
	}
}

// notOpened fails d for the time being.
func (p *ioPlugin) notOpened(in *supervise.Instance, d *device, err error) {
	p.mu.Lock()
	moved := p.awaitsLocked(in, d) && d.moveToFailing(failedOpen)
	if moved {
		d.openErr = err.Error()
	}
	p.mu.Unlock()
	if moved {
		p.failAll([]*device{d})
	}
}

// opened takes d back into use.
func (p *ioPlugin) opened(in *supervise.Instance, d *device, limits blk.Limits) {
	if limits.Size < d.limits.Load().Size {
		p.unfit(in, d, failedShrunk, "")
		return
	}
	if err := errors.Join(d.sameVolume(), compatible(d.limits.Load(), &limits)); err != nil {
		p.unfit(in, d, failedChanged, err.Error())
		return
	}
	if p.awaits(in, d) {
		p.server.takeLimits(d, limits)
	}
	if !p.revive(in, d) {
		if err := p.closeDisk(in, d); err != nil && in.Context().Err() == nil {
			p.log.Warn("closing a device failed", "device", d.name, "err", err)
		}
	}
}

// unfit fails d, whose requests may lie beyond its end now, or for which its users
// were told something else.
func (p *ioPlugin) unfit(in *supervise.Instance, d *device, why failure, text string) {
	if err := p.closeDisk(in, d); err != nil && in.Context().Err() == nil {
		p.log.Warn("closing a device failed", "device", d.name, "err", err)
	}
	p.mu.Lock()
	moved := p.awaitsLocked(in, d) && (d.moveToFailing(why) || d.fails())
	if moved {
		d.why, d.openErr = why, text
		d.move(devFailed)
	}
	p.mu.Unlock()
	if moved {
		p.failAll([]*device{d})
	}
}

// revive lets requests of d through again, the parked ones first. False: d was closed
// meanwhile, or the process has died again. Who closes a device takes it from the table
// in mu and looks at its state then: so either that finds it open, or revive does not
// find it, and it is for the caller to close it in the process.
func (p *ioPlugin) revive(in *supervise.Instance, d *device) bool {
	p.mu.Lock()
	revived := p.awaitsLocked(in, d) && d.move(devOpen)
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
		p.server.tellAll(d, rnbdwire.EventBack)
	}
	p.log.Info("device is back", "device", d.name)
	return true
}

// corrupt is told by a pump that the plugin broke its ring: it is killed.
func (p *ioPlugin) corrupt(err error) {
	p.mu.Lock()
	in := p.in
	p.mu.Unlock()
	if in != nil {
		in.Kill(err)
	}
}

// suspend takes the ring away. What the dead process had answered counts;
// requests without an answer are parked, or go back to their lane's turn.
func (q *ioQueue) suspend() {
	p := q.server.pumps[q.pump].pump
	if q.ring == nil {
		return
	}
	p.Remove(q)
	p.Call(func() {
		q.reap()
		q.sub = nil
		q.each(func(r *request) {
			if r.state == reqSent {
				r.state = reqParked
				r.m.flows[q.pump].leave()
			}
		})
	})
	q.ring.Close()
	q.ring = nil
}

// resume gives the queue a ring of the next process.
func (q *ioQueue) resume(r *shm.Ring) {
	p := q.server.pumps[q.pump].pump
	q.ring = r
	p.Call(func() { q.sub = r.Submitter() })
	p.Add(q)
}

// unpark sends the parked requests of d again, or fails them; those that a dead
// process had stay while d's fence has not passed. Pump.
func (q *ioQueue) unpark(d *device) {
	unfenced := d.now() == devFailing
	q.each(func(r *request) {
		if r.state == reqParked && r.m.dev == d && !(unfenced && r.sent != 0) {
			q.sendParked(r)
		}
	})
	if d.fails() {
		q.feed()
	}
	if q.sub != nil {
		q.sub.Publish()
	}
}

// sendParked lets a parked request go on. A write that a dead process had may have been
// carried out.
func (q *ioQueue) sendParked(r *request) {
	if r.sent == 0 || !r.sqe.Op.Modifies() || r.m.dev.fails() || q.beginRepeat(r, r.sent) {
		q.admit(r)
	}
}

// each visits the requests that are in this queue. Pump; not the data path.
func (q *ioQueue) each(visit func(*request)) {
	for i := range q.server.sessions {
		s := q.server.sessions[i].Load()
		if s == nil {
			continue
		}
		for c := range s.reqs {
			if r := &s.reqs[c]; r.owner.Load() == q.owner() {
				visit(r)
			}
		}
	}
}
