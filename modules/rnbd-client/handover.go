package client

import (
	"context"
	"time"
)

// A server that hands over to its next process says so before: docs/extend/protocol/rnbd.md,
// "Hand-over". Requests wait from then on, those of a device with loss=fail too: the
// next process is there in a moment. Without it their loss policy decides after the
// grace that the server has named.

// maxGrace bounds the grace that a server may name.
const maxGrace = 30 * time.Second

// onHandOver handles the event of a hand-over within so many milliseconds; 0: it is
// called off. It reports whether the requests of the session are held back, and
// returns when no pump sends one any more.
func (s *session) onHandOver(ctx context.Context, milliseconds uint64) (holds bool) {
	grace := time.Duration(min(milliseconds, uint64(maxGrace.Milliseconds()))) * time.Millisecond
	if grace == 0 {
		s.log.Info("the server does not hand over, it goes on")
		s.endHandOver()
		return false
	}
	s.log.Info("the server hands over to its next process", "within", grace)
	s.mu.Lock()
	s.leaving.Store(true)
	if s.leavingEnds != nil {
		s.leavingEnds.Stop()
	}
	s.leavingEnds = time.AfterFunc(grace, s.endHandOver)
	s.mu.Unlock()
	s.transport.ExpectReturn(grace)
	for _, d := range s.listDevices() {
		d.holdRequests()
	}
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	for _, p := range s.client.pumps { // one may have seen an open gate, and send a request yet
		if p.poller.Call(ctx, func() {}) != nil {
			return false
		}
	}
	return true
}

// returnPause takes the place of reopenDelay while the server hands over.
const returnPause = 20 * time.Millisecond

// holdRequests makes the requests of an open device wait.
func (d *Device) holdRequests() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Open && d.gate.Load() == gateOpen {
		d.stopped = true
		d.setGate(gateWait)
	}
}

// endHandOver ends the grace. Requests of devices that are not open again wait or
// fail as their loss policy says.
func (s *session) endHandOver() {
	s.leaving.Store(false)
	s.transport.ExpectReturn(0)
	for _, d := range s.listDevices() {
		d.letGo()
	}
	s.redundancy.comparePaths(s.transport.Paths())
}

// letGo ends what hold and the grace of a hand-over have done to d.
func (d *Device) letGo() {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.state == Open && d.stopped: // the server has not left
		d.setGate(gateOpen)
	case d.state == Closed && !d.waitsForPath() && !d.needsRemap:
		d.setGate(gateFail)
	}
	d.stopped = false
}
