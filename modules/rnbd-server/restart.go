package server

// The end of an io plugin's process. The start of the next one is in reopen.go
// (docs/decisions, "plugin crash").
//
//	left      intake stops: every queue drops its ring after taking the
//	          completions that are in it, requests without one are parked
//
// Devices of a plugin that does not keep acknowledged writes fail: their
// requests end with EIO until a client opens them again. Devices of a plugin
// that is given up fail until the plugin is reset. A request that the dead
// process had is not answered before the fence (passFence).

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/fence"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

const (
	// opensAtOnce devices are opened again at a time. One that takes longer
	// than opensQuick continues without counting.
	opensAtOnce = 16
	opensQuick  = time.Second
	// reopenTimeout bounds one try to open a device.
	reopenTimeout = 30 * time.Second
	// Pauses between tries, to open a device or to find that its fence has passed.
	reopenFirst = 20 * time.Millisecond
	reopenMost  = 5 * time.Second
)

// left takes the rings away from the queues. Devices wait or fail. The
// supervisor calls it.
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

// gaveUp fails the devices: no process is started any more. The supervisor
// calls it.
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

// failAll answers the requests of devices that begin to fail.
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

// passFence waits until no I/O of a dead process of d can reach disk or memory
// any more, and answers the requests that the process had. If the server sees
// no locks of the plugin's, a process that opens the device again finds out. If
// there is no such process, the requests wait for the plugin's reset, or for
// the end of their path.
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

// fenced reports whether the fence of a failing device has passed.
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
	if in == nil || !d.lost() { // reopen opens devices that are not lost
		return false
	}
	if _, err := p.openAgain(in, d); err != nil {
		return false
	}
	return p.closeDisk(in, d) == nil
}

// corrupt kills a plugin that broke its ring. A pump calls it.
func (p *ioPlugin) corrupt(err error) {
	p.mu.Lock()
	in := p.in
	p.mu.Unlock()
	if in != nil {
		in.Kill(err)
	}
}

// suspend takes the ring away. Completions of the dead process count.
// Requests without one are parked, or return to their lane.
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
				r.m.flows[q.pump].ended()
				r.refund()
			}
		})
	})
	q.ring.Close()
	q.ring = nil
}

// each visits the requests in this queue. It runs on the pump, but not on the
// data path.
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
