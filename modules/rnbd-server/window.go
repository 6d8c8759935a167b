package server

// DATA PATH. The limits on the requests of a device and of a session in a
// plugin, and the requests that wait. A request waits for its own device or for
// room in the ring, never for another device:
//
//	flow   the requests of one mapping on one pump: those that wait are a FIFO of chunks
//	lane   the flows of one session in one ioQueue that have something waiting
//	load   the requests of one device in the plugin on one pump, over all sessions
//
// feed serves the lanes in turn, and the flows of a lane in turn.

import (
	"time"
)

// Half of the ring is reserved for devices with few requests: up to the 256th
// part of the ring each. Of the other half a device gets at most as much as
// stays free. So one device that hangs leaves half of it, and two leave a
// quarter.
//
// While several sessions use a queue, the requests of each are limited, too: a
// window is divided among the session's devices with requests. Each device gets
// at least the windowShare-th part, so a device that hangs costs the others of
// its session no more than a device that works. The window is small while one
// of the sessions is modest, that is, has little in flight. Then a session at
// depth 1 waits behind modestWindow requests of a session at depth 512, not
// behind 512.
const (
	contendedWindow = 24
	modestWindow    = 8
	windowShare     = 4
	modestDepth     = 2
	// modestFor is the time for which a session counts as modest after it
	// was. A modest session has nothing in flight half of the time, and a
	// deep one would fill the ring each time.
	modestFor = time.Second
	// sharedFor is the time for which a session counts as using the queue
	// after its last request or answer. So a session with requests that hang
	// does not keep the windows of others small.
	sharedFor = 100 * time.Millisecond
)

// noteLane records that l uses the queue.
func (q *ioQueue) noteLane(l *sessionLane) {
	if last := q.last; last != l {
		if last != nil && q.now-q.lastAt < sharedFor {
			q.sharedUntil = q.now + sharedFor
		}
		if last != nil && q.now-q.lastAt < modestFor && last.sent < modestDepth && !last.listed {
			q.modestUntil = q.now + modestFor
		}
		q.last = l
	}
	q.lastAt = q.now
}

// roomFor reports whether f may have one more request in the plugin.
func (q *ioQueue) roomFor(f *mappingFlow) bool {
	switch {
	case q.sub == nil, !q.sub.Fits(int(f.load.sent)):
		return false
	case q.now < q.modestUntil:
		return f.sent < f.windowShare(modestWindow)
	case q.now < q.sharedUntil:
		return f.sent < f.windowShare(contendedWindow)
	}
	return true
}

// windowShare returns f's part of its session's window.
func (f *mappingFlow) windowShare(window int32) int32 {
	return max(window/max(f.lane.active, 1), window/windowShare)
}

// isIdle reports whether f has no request here.
func (f *mappingFlow) isIdle() bool { return f.sent == 0 && f.head < 0 }

// onSent counts a request that is sent to the plugin.
func (f *mappingFlow) onSent() {
	if f.isIdle() {
		f.lane.active++
	}
	f.sent++
	f.lane.sent++
	f.load.sent++
}

// onReturned counts a request that has returned from it.
func (f *mappingFlow) onReturned() {
	f.sent--
	f.lane.sent--
	f.load.sent--
	if f.isIdle() {
		f.lane.active--
	}
}

// enqueueWaiting appends r to the waiting requests of f.
func (q *ioQueue) enqueueWaiting(f *mappingFlow, r *request) {
	r.state, r.next = reqBacklog, -1
	if f.isIdle() {
		f.lane.active++
	}
	chunk := int32(r.op.Chunk())
	if f.head < 0 {
		f.head = chunk
	} else {
		f.lane.s.reqs[f.tail].next = chunk
	}
	f.tail = chunk
	l := f.lane
	if !f.listed {
		l.pushFlow(f)
	}
	if !l.listed {
		l.listed = true
		q.waiting = append(q.waiting, l)
	}
}

// popRequest removes r, the first waiting request, from f.
func (f *mappingFlow) popRequest(r *request) {
	f.head = r.next
	if f.isIdle() {
		f.lane.active--
	}
}

// pushFlow appends f to l.
func (l *sessionLane) pushFlow(f *mappingFlow) {
	f.listed, f.next = true, nil
	if l.first == nil {
		l.first = f
	} else {
		l.last.next = f
	}
	l.last = f
}

// popFlow removes the first flow from l.
func (l *sessionLane) popFlow() *mappingFlow {
	f := l.first
	l.first, f.next, f.listed = f.next, nil, false
	if l.first == nil {
		l.last = nil
	}
	return f
}

// updateClock reads the pump's clock and stores the time in now.
func (q *ioQueue) updateClock() int64 {
	t := q.server.pumps[q.pump].pump.Now()
	q.now = time.Duration(t)
	return t
}
