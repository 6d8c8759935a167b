package server

// What happens when an io plugin's process dies (docs/decisions, "plugin
// crash"):
//
//	onExit    intake stops: every queue drops its ring after taking the
//	          completions that are in it, requests without one are parked
//	start     a new process, new rings, the same arenas
//	reopen    each device is opened again; the plugin's Open returns after the
//	          fence: no I/O of the old process is on its way any more
//	revive    the device's parked requests are sent again
//
// Devices of a plugin that does not keep acknowledged writes fail instead:
// their requests end with EIO, and they stay failed until opened anew.

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// onExit is told by the process's watcher that generation gen has ended.
func (p *ioPlugin) onExit(gen uint32, cause error) {
	p.mu.Lock()
	if gen != p.generation || p.proc == nil || p.stopping {
		p.mu.Unlock()
		return
	}
	p.proc = nil
	p.wg.Add(1)
	devices := p.openDevices()
	p.mu.Unlock()
	p.log.Warn("plugin died", "error", cause)
	for _, d := range devices {
		d.ready.Store(false)
	}
	go func() {
		defer p.wg.Done()
		p.life.Lock() // the process may have died while its queues were being resumed
		for _, q := range p.queues {
			q.suspend()
		}
		p.life.Unlock()
		p.recover(devices)
	}()
}

// openDevices lists them. Caller holds mu.
func (p *ioPlugin) openDevices() (out []*device) {
	for _, d := range p.devices {
		out = append(out, d)
	}
	return out
}

func (p *ioPlugin) recover(devices []*device) {
	if p.info.Crash != plugin.KeepsAcknowledged {
		p.fail(devices)
		devices = nil
	}
	for p.mayRestart() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		proc, err := p.startAgain(ctx)
		cancel()
		if err == nil {
			p.reopen(devices, proc)
			return
		}
		p.log.Error("plugin does not start again", "error", err)
		time.Sleep(100 * time.Millisecond)
	}
	p.fail(devices)
}

// mayRestart counts a crash and says whether there were too many.
func (p *ioPlugin) mayRestart() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopping {
		return false
	}
	now := time.Now()
	recent := p.crashes[:0]
	for _, t := range p.crashes {
		if now.Sub(t) < p.server.cfg.CrashWindow {
			recent = append(recent, t)
		}
	}
	p.crashes = append(recent, now)
	if len(p.crashes) >= p.server.cfg.CrashLimit {
		p.gaveUp = true
		p.log.Error("plugin crashes too often and is not started again", "crashes", len(p.crashes), "within", p.server.cfg.CrashWindow)
		return false
	}
	p.restarts++
	return true
}

// startAgain starts a process that knows the arenas of all sessions. Nil without an
// error: it has died again, or is about to, which starts a recovery of its own.
func (p *ioPlugin) startAgain(ctx context.Context) (*plugin.Process, error) {
	if err := p.start(ctx); err != nil {
		return nil, err
	}
	p.mu.Lock()
	proc := p.proc
	var sessions []*session
	for s := range p.sessions {
		sessions = append(sessions, s)
	}
	p.mu.Unlock()
	for _, s := range sessions {
		if proc == nil {
			return nil, nil
		}
		if err := p.attachAgain(ctx, proc, s); err != nil {
			p.log.Error("plugin does not take a session's memory", "session", s.name, "error", err)
			proc.Kill()
			return nil, nil
		}
	}
	return proc, nil
}

// reopen opens the devices again in proc, if there is one, each on its own: one that
// waits for its fence holds up nobody else.
func (p *ioPlugin) reopen(devices []*device, proc *plugin.Process) {
	if proc == nil {
		return
	}
	p.mu.Lock()
	gen := p.generation
	p.mu.Unlock()
	for _, d := range devices {
		p.wg.Add(1)
		go func() {
			defer p.wg.Done()
			p.reopen1(d, gen, proc)
		}()
	}
}

func (p *ioPlugin) reopen1(d *device, gen uint32, proc *plugin.Process) {
	if !p.awaited(d, gen) {
		return
	}
	limits, err := p.passFence(d, gen, proc)
	if errors.Is(err, plugin.ErrExited) {
		return // the next generation will open it
	}
	if err == nil && limits.Size < d.limits.Load().Size {
		err = errors.Join(syscall.EIO, proc.CloseDisk(context.Background(), d.index))
	}
	awaited := p.awaited(d, gen)
	if err != nil {
		if awaited {
			p.log.Error("device does not open again after the plugin's death", "device", d.name, "error", err)
			p.fail([]*device{d})
		}
		return
	}
	if awaited {
		p.server.takeLimits(d, limits)
	}
	if !p.revive(d, gen) {
		_ = proc.CloseDisk(context.Background(), d.index)
	}
}

// passFence opens d in proc. While that takes too long d counts as stuck; not after
// it has returned.
func (p *ioPlugin) passFence(d *device, gen uint32, proc *plugin.Process) (blk.Limits, error) {
	told := make(chan struct{})
	late := time.AfterFunc(p.server.cfg.FenceTimeout, func() {
		defer close(told)
		d.stuck.Store(true)
		p.log.Error("device is stuck: I/O of the dead plugin has not ended", "device", d.name)
	})
	limits, err := proc.OpenDisk(context.Background(), d.request(gen))
	if !late.Stop() {
		<-told
	}
	return limits, err
}

// awaited tells whether d is open, as far as the server is concerned, and the process
// of the generation is the one to serve it.
func (p *ioPlugin) awaited(d *device, gen uint32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.awaitedLocked(d, gen)
}

// awaitedLocked is awaited. Caller holds mu.
func (p *ioPlugin) awaitedLocked(d *device, gen uint32) bool {
	return p.devices[d.index] == d && p.generation == gen && p.proc != nil
}

// revive lets requests of d through again, the parked ones first. False: d was closed
// meanwhile, or the process has died again. Who closes a device takes it from the table
// in mu and looks at ready then: so either that finds it ready, or revive does not find
// it, and it is for the caller to close it in the process.
func (p *ioPlugin) revive(d *device, gen uint32) bool {
	p.mu.Lock()
	awaited := p.awaitedLocked(d, gen)
	if awaited {
		d.stuck.Store(false)
		d.ready.Store(true)
	}
	p.mu.Unlock()
	if !awaited {
		return false
	}
	for _, q := range p.queues {
		p.server.pumps[q.pump].pump.Call(func() { q.unpark(d) })
	}
	p.log.Info("device is back", "device", d.name)
	return true
}

// fail ends the requests of devices with EIO, now and from now on.
func (p *ioPlugin) fail(devices []*device) {
	for _, d := range devices {
		d.failed.Store(true)
		for _, q := range p.queues {
			p.server.pumps[q.pump].pump.Call(func() { q.unpark(d) })
		}
		p.log.Error("device failed", "device", d.name, "state", d.state())
	}
}

// corrupt is told by a pump that the plugin broke its ring: it is as good as
// dead.
func (p *ioPlugin) corrupt(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc != nil {
		p.log.Error("plugin broke its ring, it is killed", "error", err)
		go p.proc.Kill()
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

// unpark sends the parked requests of d again, or fails them. Pump.
func (q *ioQueue) unpark(d *device) {
	q.each(func(r *request) {
		if r.state == reqParked && r.m.dev == d {
			q.admit(r)
		}
	})
	if d.failed.Load() {
		q.feed()
	}
	if q.sub != nil {
		q.sub.Publish()
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
