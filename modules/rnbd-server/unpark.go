package server

// Requests that were parked when their plugin died go on.

// unpark continues the waiting requests of d on all pumps.
func (p *ioPlugin) unpark(d *device) {
	for _, q := range p.queues {
		p.server.pumps[q.pump].pump.Call(func() { q.unpark(d) })
	}
}

// unpark sends the parked requests of d again, or fails them. Requests that a
// dead process had stay parked until d's fence has passed. It runs on the pump.
func (q *ioQueue) unpark(d *device) {
	unfenced := d.currentState() == devFailing
	q.eachRequest(func(r *request) {
		if r.state == reqParked && r.m.dev == d && !(unfenced && r.sent != 0) {
			q.sendParked(r)
		}
	})
	if d.isFailing() {
		q.feedRing()
	}
	if q.sub != nil {
		q.sub.Publish()
	}
}

// sendParked continues a parked request. A write that a dead process had counts
// as a repetition, since it may have been carried out.
func (q *ioQueue) sendParked(r *request) {
	if r.sent == 0 || !r.sqe.Op.Modifies() || r.m.dev.isFailing() || q.beginRepeat(r, r.sent) {
		q.admit(r)
	}
}
