package server

// The end of an io plugin's process. The start of the next one is in
// reopen.go, devices that fail are in failing.go
// (docs/inside/decisions, "plugin crash").
//
//	left      intake stops: every queue drops its ring after taking the
//	          completions that are in it, requests without one are parked
//
// Devices of a plugin that does not keep acknowledged writes fail: their
// requests end with EIO until a client opens them again. Devices of a plugin
// that is given up fail until the plugin is reset. A request that the dead
// process had is not answered before the fence (passFence).

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// onProcessLeft takes the rings away from the queues. Devices wait or fail. The
// supervisor calls it.
func (p *ioPlugin) onProcessLeft(in *supervise.Instance, _ error) {
	keeps := in.Info().Crash == plugin.KeepsAcknowledged
	p.mu.Lock()
	p.in, p.dead = nil, in
	var failing []*device
	for _, d := range p.devices {
		if keeps {
			if now := d.currentState(); now == devOpen || now == devPaused {
				d.setState(devRecovering)
			}
		} else if d.moveToFailing(failedLost, "") {
			failing = append(failing, d)
		}
	}
	p.mu.Unlock()
	for _, q := range p.queues {
		q.dropRing()
	}
	p.failAll(failing)
}

// gaveUp fails the devices: no process is started any more. The supervisor
// calls it.
func (p *ioPlugin) gaveUp(error) {
	p.mu.Lock()
	var failing []*device
	for _, d := range p.devices {
		if d.moveToFailing(failedPlugin, "") {
			failing = append(failing, d)
		} else if d.why == failedOpen && d.isFailing() {
			d.why = failedPlugin
		}
	}
	p.mu.Unlock()
	p.failAll(failing)
}

// dropRing takes the ring away. Completions of the dead process count.
// Requests without one are parked, or return to their lane.
func (q *ioQueue) dropRing() {
	p := q.server.pumps[q.pump].pump
	if q.ring == nil {
		return
	}
	p.Remove(q)
	p.Call(func() {
		q.reapCompletions()
		q.sub = nil
		q.eachRequest(func(r *request) {
			if r.state == reqSent {
				r.state = reqParked
				r.m.flows[q.pump].onReturned()
				r.freeDepth()
			}
		})
	})
	q.ring.Close()
	q.ring = nil
}
