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
// So a session without permits delays its own devices only, and a device with
// requests that hang leaves permits to the others of its session.

import (
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// none ends a list of requests.
const none = ^uint64(0)

// list is a queue of requests of one pump, by tag: the number of their source in
// pumpShare.sources and their slot there.
type list struct{ head, tail uint64 }

func emptyList() list { return list{none, none} }

func (l *list) empty() bool { return l.head == none }

// deviceList is a queue of devices, linked by their shares of one pump.
type deviceList struct{ head, tail *Device }

func (l *deviceList) push(pump int, d *Device) {
	d.shares[pump].next = nil
	if l.head == nil {
		l.head = d
	} else {
		l.tail.shares[pump].next = d
	}
	l.tail = d
}

func (l *deviceList) pop(pump int) *Device {
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

// take moves all of other to the end of l.
func (l *deviceList) take(pump int, other *deviceList) {
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

// lane is the part of a session on one pump. The pump owns it.
type lane struct {
	session *session
	pump    *pumpShare
	queue   *rtrs.Queue

	turn, full deviceList
	blocked    bool         // RTRS had no permit and will call unblock
	pooled     int          // permits in use beyond the first one of each device
	sent       atomic.Int32 // permits in use; other pumps read it
	listed     bool         // in pump.lanes
	next       *lane        // there
	stuck      bool         // in pump.stuck
	nextStuck  *lane        // there
}

// window bounds the permits of a session that a device may hold.
type window struct {
	total int  // for all requests of the session; the rest is for OPEN, CLOSE and fences
	lane  int  // those of one pump
	pool  int  // of these, the ones shared by devices beyond the first permit of each
	alone bool // the session has one device
}

// newWindow divides depth permits among devices on pumps.
func newWindow(depth, pumps, devices int) *window {
	kept := min(4+depth/32, depth/4+1, depth-1)
	w := &window{total: max(depth-kept, 1), alone: devices <= 1}
	w.lane = max(w.total/pumps, 1)
	w.pool = max(w.lane-devices, w.lane/2)
	return w
}

// greed is the number of permits of the pool that a device may hold for each
// free one. One device that hangs leaves a third of the pool to the others,
// two leave a fifth. Each device also has one permit outside of the pool.
const greed = 2

// admits reports whether the device with that share may send one more request.
func (l *lane) admits(sh *share) bool {
	w := l.session.window.Load()
	switch {
	case sh.sent == 0:
		return true
	case w.alone:
		return sh.sent < w.lane || l.session.sent() < w.total
	}
	return sh.sent <= greed*(w.pool-l.pooled)
}

// sent counts the requests that hold a permit, on all pumps.
func (s *session) sent() (n int) {
	for _, l := range s.lanes {
		n += int(l.sent.Load())
	}
	return n
}

// began counts a request that has got a permit, ended one that has given it
// back.
func (l *lane) began(sh *share) {
	if sh.sent++; sh.sent > 1 {
		l.pooled++
	}
	l.sent.Add(1)
}

func (l *lane) ended(sh *share) {
	if sh.sent > 1 {
		l.pooled--
	}
	sh.sent--
	l.sent.Add(-1)
	l.turn.take(l.pump.index, &l.full)
	l.unblock()
}

// unblock makes the pump serve the lane again: a permit is free.
func (l *lane) unblock() {
	l.blocked = false
	if l.turn.head != nil {
		l.list()
	}
}

// list makes the pump serve the lane in its next round.
func (l *lane) list() {
	if !l.listed && !l.blocked {
		l.listed, l.next, l.pump.lanes = true, l.pump.lanes, l
	}
}

// enqueue adds d to turn, unless it is in a list already.
func (l *lane) enqueue(d *Device) {
	if sh := &d.shares[l.pump.index]; !sh.placed {
		sh.placed = true
		l.turn.push(l.pump.index, d)
		l.list()
	}
}

// wait appends a request to those of d.
func (l *lane) wait(d *Device, tag uint64) {
	l.pump.push(&d.shares[l.pump.index].waiting, tag)
	l.enqueue(d)
}

// waitAgain inserts a request that was sent before. Such requests come first,
// in the order of their tags.
func (l *lane) waitAgain(d *Device, tag uint64) {
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
	l.enqueue(d)
}

// serve sends the waiting requests that may be sent, and returns their number.
func (p *pumpShare) serve() (n int) {
	if g := p.client.gates.Load(); g != p.gates {
		p.gates = g
		p.unpark()
	}
	for p.lanes != nil {
		l := p.lanes
		p.lanes, l.listed = l.next, false
		n += l.serve()
	}
	return n
}

// unpark moves all devices that wait for a gate, a permit or a window to
// turn, because a gate may have moved to fail.
func (p *pumpShare) unpark() {
	for p.parked.head != nil {
		d := p.parked.pop(p.index)
		l := d.session.lanes[p.index]
		l.turn.push(p.index, d)
		l.list()
	}
	for p.stuck != nil {
		l := p.stuck
		p.stuck, l.stuck = l.nextStuck, false
		l.turn.take(p.index, &l.full)
		l.unblock()
	}
}

// verdict is the result of an attempt to send a request.
type verdict uint8

const (
	served   verdict = iota // sent or answered
	nothing                 // the device has no waiting request
	isShut                  // the device's gate
	isFull                  // the device's window
	noPermit                // of the session
	noPath                  // no path of the session takes requests; RTRS wakes the lane after it has removed a lost one
)

// serve sends a request of each device in turn until permits or requests run out.
func (l *lane) serve() (n int) {
	for i := l.pump.index; l.turn.head != nil && !l.blocked; {
		d := l.turn.pop(i)
		switch sh := &d.shares[i]; l.serveOne(d, sh) {
		case served:
			n++
			l.turn.push(i, d)
		case nothing:
			sh.placed = false
		case isShut:
			l.pump.parked.push(i, d)
		case isFull:
			l.full.push(i, d)
		case noPermit, noPath: // a path may join meanwhile, and that moves no gate
			l.turn.pushFront(i, d)
			l.blocked = true
		}
	}
	if !l.stuck && (l.blocked || l.full.head != nil) {
		l.stuck, l.nextStuck, l.pump.stuck = true, l.pump.stuck, l
	}
	return n
}

// serveOne sends the next request of d. It checks the gate again: a request
// sent through a closed gate would carry a stale device id, and the server may
// have reassigned that id.
func (l *lane) serveOne(d *Device, sh *share) verdict {
	if sh.waiting.empty() {
		return nothing
	}
	s, i := l.pump.at(sh.waiting.head)
	v := served
	switch gate := d.gate.Load(); {
	case s.orphaned || gate == gateFail:
		s.finish(i, blk.EIO, s.reqs[i].failedAt())
	case gate == gateWait:
		return isShut
	case !l.admits(sh):
		return isFull
	default:
		v = s.submit(i)
	}
	if v == served {
		l.pump.pop(&sh.waiting)
	}
	return v
}

// dismiss ends the waiting requests for d that came from s. Answers to s are
// not read any more.
func (p *pumpShare) dismiss(d *Device, s *source) {
	waiting := &d.shares[p.index].waiting
	all := *waiting
	*waiting = emptyList()
	for !all.empty() {
		tag := p.pop(&all)
		if from, i := p.at(tag); from == s {
			s.finish(i, blk.EIO, watchdog.Queue)
		} else {
			p.push(waiting, tag)
		}
	}
}

func (p *pumpShare) at(tag uint64) (s *source, i uint32) { return p.sources[tag>>32], uint32(tag) }

func (p *pumpShare) request(tag uint64) *request {
	s, i := p.at(tag)
	return &s.reqs[i]
}

func (p *pumpShare) push(l *list, tag uint64) {
	p.request(tag).next = none
	if l.empty() {
		l.head = tag
	} else {
		p.request(l.tail).next = tag
	}
	l.tail = tag
}

func (p *pumpShare) pop(l *list) uint64 {
	tag := l.head
	l.head = p.request(tag).next
	return tag
}
