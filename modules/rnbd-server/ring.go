package server

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// DATA PATH, the way there: from the checks to the plugin. One ioQueue joins one
// pump with one io plugin process. In the order a request meets them:
//
//	admit   -> send, or the backlog      room, by device and session: window.go
//	send    ring                         the plugin has the request
//	Poll    completions (answer.go), then the backlog: feed
//
// Everything here runs on the pump.

// admit sends r to the plugin. If that is not possible now, r waits for its turn, is
// parked until its device is open again, or fails.
func (q *ioQueue) admit(r *request) {
	f := &r.m.flows[q.pump]
	q.noteLane(f.lane)
	switch {
	case r.m.dev.isFailing(), r.retired: // a request that was not begun must not begin after the end of its path
		q.finish(r, blk.EIO)
	case !r.m.dev.isServing():
		r.state = reqParked
	case f.head < 0 && q.mayOvertake(r) && q.roomFor(f) && q.sendToRing(f, r):
		q.noteSent(r)
	default:
		q.noteWaiting(r)
		q.enqueueWaiting(f, r)
	}
}

// sendToRing puts r into the ring. It returns false if the ring is full.
func (q *ioQueue) sendToRing(f *mappingFlow, r *request) bool {
	if !q.sub.Push(q.nextEntry(r)) {
		return false
	}
	r.state = reqSent
	f.onSent()
	return true
}

// nextEntry returns what the ring gets of r: a flush first if r asks for one (PREFLUSH), then
// r itself.
func (q *ioQueue) nextEntry(r *request) *shm.SQE {
	if !r.preflush {
		return &r.sqe
	}
	q.flush = shm.SQE{Tag: r.sqe.Tag, Device: r.sqe.Device, Arena: r.sqe.Arena, Op: blk.Flush, Flags: r.sqe.Flags & blk.Sync}
	return &q.flush
}

// noteSent charges the request to its budget and records the time that it waited
// here. A request that a dead plugin had is recorded once: the time since it was
// first sent counts as the plugin's.
func (q *ioQueue) noteSent(r *request) {
	q.payFor(r)
	if r.sent == 0 {
		r.sent = q.updateClock()
		r.m.dev.latency[q.pump].queue.Record(r.sqe.Op, r.sent-r.arrived)
	}
}

// feedRing moves waiting requests to the ring, one of each lane in turn, until no lane
// has one that can go. It returns their number.
func (q *ioQueue) feedRing() (n int) {
	for idle := 0; idle < len(q.waiting); {
		if q.turn >= len(q.waiting) {
			q.turn = 0
		}
		l := q.waiting[q.turn]
		if !q.feedLane(l) {
			idle++
			q.turn++
			continue
		}
		n, idle = n+1, 0
		if l.first == nil {
			l.listed = false
			q.waiting = append(q.waiting[:q.turn], q.waiting[q.turn+1:]...)
		} else {
			q.turn++
		}
	}
	return n
}

// feedLane sends one request of l, of the first flow that can. It returns false
// if none can.
func (q *ioQueue) feedLane(l *sessionLane) bool {
	for last := l.last; ; {
		f := l.popFlow()
		moved := q.feedOne(f)
		if f.head >= 0 {
			l.pushFlow(f)
		}
		if moved || f == last {
			return moved
		}
	}
}

// feedOne sends the first waiting request of f. It returns false if it must go
// on waiting.
func (q *ioQueue) feedOne(f *mappingFlow) bool {
	r := &f.lane.s.reqs[f.head]
	dev := r.m.dev
	switch {
	case r.retired, dev.isFailing():
		f.popRequest(r)
		q.finish(r, blk.EIO)
	case !dev.isServing():
		f.popRequest(r)
		r.state = reqParked
		if dev.currentState() == devPaused && !r.repeats { // a plugin had the flush before it only
			r.sent = 0
		}
	case q.canAfford(r) && q.roomFor(f) && q.sendToRing(f, r):
		q.noteSent(r)
		f.popRequest(r)
	default:
		return false
	}
	return true
}

// Poll takes completions from the ring and fills it again.
func (q *ioQueue) Poll() int {
	if q.sub == nil {
		return 0
	}
	n := q.reapCompletions()
	if len(q.waiting) > 0 {
		q.updateClock()
		n += q.feedRing()
	}
	q.sub.Publish()
	return n
}

// Arm, Disarm and FD make the queue a source of its pump. Without a process it has
// no ring, and nothing to wait for.
func (q *ioQueue) Arm() bool {
	if q.sub == nil {
		return true
	}
	return q.sub.Arm()
}

func (q *ioQueue) Disarm() {
	if q.sub != nil {
		q.sub.Disarm()
	}
}

func (q *ioQueue) FD() int {
	if q.sub == nil {
		return -1
	}
	return q.sub.FD()
}

// eachRequest visits the requests in this queue. It runs on the pump, but not on the
// data path.
func (q *ioQueue) eachRequest(visit func(*request)) {
	for i := range q.server.sessions {
		s := q.server.sessions[i].Load()
		if s == nil {
			continue
		}
		for c := range s.reqs {
			if r := &s.reqs[c]; r.owner.Load() == q.ownerNumber() {
				visit(r)
			}
		}
	}
}
