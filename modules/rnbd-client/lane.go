package client

// DATA PATH. A lane joins the devices of one session with one pump. Requests
// that cannot go on wait in the list of their device on that pump
// (share.waiting). The list is in the order of arrival; requests that a lost
// session gave back come first. Devices with such a list are in one of these
// places:
//
//	lane.turn     served by rounds, a request each, as permits allow
//	lane.full     at the bound of their window; an answer moves them to turn
//	pump.parked   their gate is shut; the move of a gate moves them to turn
//
// (*lane).serveDevices in queue.go takes them from there. So a session without permits
// delays its own devices only, and a device with requests that hang leaves permits
// to the others of its session.

// none ends a list of requests.
const none = ^uint64(0)

func emptyList() requestList { return requestList{none, none} }

// newShares makes a share for each pump.
func newShares(pumps int) []deviceShare {
	all := make([]deviceShare, pumps)
	for i := range all {
		all[i].waiting = emptyList()
	}
	return all
}

func (l *requestList) empty() bool { return l.head == none }

func (l *deviceList) pushDevice(pump int, d *Device) {
	d.shares[pump].next = nil
	if l.head == nil {
		l.head = d
	} else {
		l.tail.shares[pump].next = d
	}
	l.tail = d
}

func (l *deviceList) popDevice(pump int) *Device {
	d := l.head
	l.head = d.shares[pump].next
	return d
}

func (l *deviceList) pushFront(pump int, d *Device) {
	if d.shares[pump].next = l.head; l.head == nil {
		l.tail = d
	}
	l.head = d
}

// takeAll moves all of other to the end of l.
func (l *deviceList) takeAll(pump int, other *deviceList) {
	if other.head == nil {
		return
	}
	if l.head == nil {
		*l = *other
	} else {
		l.tail.shares[pump].next = other.head
		l.tail = other.tail
	}
	other.head = nil
}

// newWindow divides depth permits among devices on pumps.
func newWindow(depth, pumps, devices int) *permitWindow {
	kept := min(4+depth/32, depth/4+1, depth-1)
	w := &permitWindow{total: max(depth-kept, 1), alone: devices <= 1}
	w.lane = max(w.total/pumps, 1)
	w.pool = max(w.lane-devices, w.lane/2)
	return w
}

// dividePermits gives each device its part of the permits. The caller holds Client.mu,
// or is the only user of the session.
func (s *session) dividePermits() {
	s.window.Store(newWindow(s.transport.QueueDepth(), len(s.lanes), len(s.devices)))
}

// greed is the number of permits of the pool that a device may hold for each
// free one. One device that hangs leaves a third of the pool to the others,
// two leave a fifth. Each device also has one permit outside of the pool.
const greed = 2

// mayAdmit reports whether the device with that share may send one more request.
func (l *sessionLane) mayAdmit(sh *deviceShare) bool {
	w := l.session.window.Load()
	switch {
	case sh.sent == 0:
		return true
	case w.alone:
		return sh.sent < w.lane || l.session.sentCount() < w.total
	}
	return sh.sent <= greed*(w.pool-l.pooled)
}

// sentCount counts the requests that hold a permit, on all pumps.
func (s *session) sentCount() (n int) {
	for _, l := range s.lanes {
		n += int(l.sent.Load())
	}
	return n
}

// onSent counts a request that has got a permit, ended one that has given it
// back.
func (l *sessionLane) onSent(sh *deviceShare) {
	if sh.sent++; sh.sent > 1 {
		l.pooled++
	}
	l.sent.Add(1)
}

func (l *sessionLane) onEnded(sh *deviceShare) {
	if sh.sent > 1 {
		l.pooled--
	}
	sh.sent--
	l.sent.Add(-1)
	l.turn.takeAll(l.pump.index, &l.full)
	l.resumeServe()
}

// resumeServe makes the pump serve the lane again: a permit is free.
func (l *sessionLane) resumeServe() {
	l.blocked = false
	if l.turn.head != nil {
		l.scheduleServe()
	}
}

// scheduleServe makes the pump serve the lane in its next round.
func (l *sessionLane) scheduleServe() {
	if !l.listed && !l.blocked {
		l.listed, l.next, l.pump.lanes = true, l.pump.lanes, l
	}
}

// enqueueDevice adds d to turn, unless it is in a list already.
func (l *sessionLane) enqueueDevice(d *Device) {
	if sh := &d.shares[l.pump.index]; !sh.placed {
		sh.placed = true
		l.turn.pushDevice(l.pump.index, d)
		l.scheduleServe()
	}
}

// enqueueRequest appends a request to those of d.
func (l *sessionLane) enqueueRequest(d *Device, tag uint64) {
	l.pump.pushRequest(&d.shares[l.pump.index].waiting, tag)
	l.enqueueDevice(d)
}

// waitAgain inserts a request that was sent before. Such requests come first,
// in the order of their tags.
func (l *sessionLane) waitAgain(d *Device, tag uint64) {
	p, waiting := l.pump, &d.shares[l.pump.index].waiting
	r, before := p.request(tag), none
	next := waiting.head
	for ; next != none; before, next = next, p.request(next).next {
		if o := p.request(next); o.sent == 0 || o.sqe.Tag > r.sqe.Tag {
			break
		}
	}
	if r.next = next; next == none {
		waiting.tail = tag
	}
	if before == none {
		waiting.head = tag
	} else {
		p.request(before).next = tag
	}
	l.enqueueDevice(d)
}

func (p *pumpShare) locateTag(tag uint64) (s *ringSource, i uint32) {
	return p.sources[tag>>32], uint32(tag)
}

func (p *pumpShare) request(tag uint64) *request {
	s, i := p.locateTag(tag)
	return &s.reqs[i]
}

func (p *pumpShare) pushRequest(l *requestList, tag uint64) {
	p.request(tag).next = none
	if l.empty() {
		l.head = tag
	} else {
		p.request(l.tail).next = tag
	}
	l.tail = tag
}

func (p *pumpShare) popRequest(l *requestList) uint64 {
	tag := l.head
	l.head = p.request(tag).next
	return tag
}

// requestTag identifies request i on the pump and to RTRS.
func (s *ringSource) requestTag(i uint32) uint64 { return uint64(s.index)<<32 | uint64(i) }
