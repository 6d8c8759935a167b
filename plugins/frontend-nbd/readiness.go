package main

import "golang.org/x/sys/unix"

// DATA PATH, before receive: the choice of sockets to read. A spinning pump
// polls far more often than bytes arrive, and each epoll_wait is a system call.
// So a few busy connections are read directly, without epoll and not in every
// turn. Epoll covers many connections, quiet connections, and clients that do
// not take their replies; it is always asked before the pump sleeps.

const (
	fewConns       = 4   // up to this many connections are read without epoll
	coldAfter      = 256 // empty reads in a row until a connection is left to epoll
	coldEvery      = 8   // turns between calls of epoll for cold connections while others are warm
	saturatedEvery = 8   // turns between reads while the client waits for answers
	inFlightSpan   = 256 // commands per span of an estimate
)

// markReadable marks the connections to read from.
func (q *queue) markReadable() {
	q.turn++
	ask := q.kicked.Swap(false) || len(q.conns) > fewConns
	warm, cold := false, false
	for i := 0; i < len(q.conns) && !ask; i++ {
		switch c := q.conns[i]; {
		case c.sendBlocked():
			ask = true
		case c.quiet >= coldAfter:
			cold = true
		default:
			warm = true
			c.readable = c.readDue() || c.readable
		}
	}
	if ask || cold && (!warm || q.turn%coldEvery == 0) {
		q.pollSockets()
	}
}

// readDue reports whether to read the socket in this turn. After a short read of a
// payload one turn is skipped, to leave the CPU to the sender. A client with
// as many commands in flight as it usually has waits for answers.
func (c *conn) readDue() bool {
	switch {
	case c.cur != nil:
		now := !c.drained
		c.drained = false
		return now
	case c.inFlight.atEstimate(c.unanswered):
		c.passed++
		return c.passed%saturatedEvery == 0
	}
	return true
}

// inFlightEstimate estimates a client's queue depth: the most commands that it
// had in flight at once in this span of commands or the one before.
type inFlightEstimate struct {
	most, before int // of this span, of the last one
	n            int // commands in this span
}

func (e *inFlightEstimate) recordUnanswered(unanswered int) {
	if e.n++; e.n > inFlightSpan {
		e.before, e.most, e.n = e.most, 0, 1
	}
	e.most = max(e.most, unanswered)
}

// atEstimate reports whether the client has as many commands in flight as it is
// estimated to have at most.
func (e *inFlightEstimate) atEstimate(unanswered int) bool {
	return unanswered > 0 && unanswered >= max(e.most, e.before)
}

// pollSockets calls epoll and marks the connections that are ready. It returns
// the number of events; a direct read may have consumed some of them already.
func (q *queue) pollSockets() int {
	n, errno := epollNow(q.epoll, q.evs[:])
	if errno != 0 {
		return 1 // EINTR: the next round looks again
	}
	for _, ev := range q.evs[:n] {
		q.onEvent(ev)
	}
	return n
}

func (q *queue) onEvent(ev unix.EpollEvent) {
	if ev.Fd == bellWake {
		var b [8]byte
		unix.Read(q.wake, b[:])
		q.again = true
		if q.alarm.Swap(false) {
			q.evictIdle()
		}
		return
	}
	if ev.Fd < 0 || q.table[ev.Fd] == nil {
		return
	}
	c := q.table[ev.Fd]
	c.readable = c.readable || ev.Events&^unix.EPOLLOUT != 0
	if !c.writable && ev.Events&^(unix.EPOLLIN|unix.EPOLLRDHUP) != 0 {
		c.writable = true
		q.watchRoom(c, false)
	}
	if ev.Events&^(unix.EPOLLIN|unix.EPOLLOUT) != 0 {
		c.hangup = true
		c.noteEnd()
	}
}

// Arm arranges for FD to become readable at the next event. It returns false if
// there is work now. The sockets are edge triggered and were read without epoll
// while the pump was awake, so epoll is drained first; its events are mostly
// stale, and one more round of Poll decides.
func (q *queue) Arm() bool {
	if q.pollSockets() > 0 && (q.Poll() > 0 || q.pollSockets() > 0) {
		return false
	}
	return !q.workPending() && q.ring.Arm()
}

// workPending reports whether there is work that no event will announce.
func (q *queue) workPending() bool {
	for _, c := range q.conns {
		if c.readable && !c.stalled && c.state == connOpen {
			return true
		}
	}
	return false
}

// LargeIO reports whether the pump should not spin after this turn. It should
// not after large requests, unless a payload is arriving or other requests are
// in flight: the next part then arrives before a sleep would end, and a wake-up
// per part costs more than the spin.
func (q *queue) LargeIO() bool { return q.large && !q.moreExpected() }

// moreExpected reports whether more bytes or answers are expected at once.
func (q *queue) moreExpected() bool {
	for _, c := range q.conns {
		if c.state == connOpen && !c.stalled && (c.cur != nil || c.unanswered > 1) {
			return true
		}
	}
	return false
}
