package main

import "golang.org/x/sys/unix"

// DATA PATH, before receive: which sockets are worth a read. A look is a system
// call, and a pump that spins looks more often than there is something: so a
// few connections in use are tried by a read, which spares a question to epoll,
// and not in every turn. Epoll is asked about many connections, quiet ones and
// clients that do not take their replies, and always before the pump sleeps.

const (
	fewConns     = 4   // connections that are tried; epoll is asked about more
	coldAfter    = 256 // vain tries in a row; from then on epoll is asked
	coldEvery    = 8   // turns between questions about cold connections while others are warm
	satedEvery   = 8   // turns between tries while the client waits for answers
	appetiteSpan = 256 // commands
)

// look marks the connections to read from.
func (q *queue) look() {
	q.turn++
	ask := q.kicked.Swap(false) || len(q.conns) > fewConns
	warm, cold := false, false
	for i := 0; i < len(q.conns) && !ask; i++ {
		switch c := q.conns[i]; {
		case c.blocked():
			ask = true
		case c.quiet >= coldAfter:
			cold = true
		default:
			warm = true
			c.readable = c.due() || c.readable
		}
	}
	if ask || cold && (!warm || q.turn%coldEvery == 0) {
		q.pollSockets()
	}
}

// due tells whether to try the socket in this turn. A payload that has come in
// part is left to its sender for a turn: the next bytes need the CPU, too. A
// client that has as many commands under way as it ever has waits for answers.
func (c *conn) due() bool {
	switch {
	case c.cur != nil:
		now := !c.drained
		c.drained = false
		return now
	case c.appetite.sated(c.unanswered):
		c.passed++
		return c.passed%satedEvery == 0
	}
	return true
}

// appetite is how many commands a client has had under way at once, lately.
type appetite struct {
	most, before int // in this span of commands, in the last one
	n            int // commands in this span
}

func (a *appetite) note(unanswered int) {
	if a.n++; a.n > appetiteSpan {
		a.before, a.most, a.n = a.most, 0, 1
	}
	a.most = max(a.most, unanswered)
}

func (a *appetite) sated(unanswered int) bool {
	return unanswered > 0 && unanswered >= max(a.most, a.before)
}

// pollSockets asks epoll and marks the connections that have something to do.
// It returns the number of news, some of which a try may have used already.
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
	c.writable = c.writable || ev.Events&^unix.EPOLLIN != 0
	c.hangup = c.hangup || ev.Events&^(unix.EPOLLIN|unix.EPOLLOUT) != 0
}

// Arm asks for FD to become readable at the next event. False: there is
// something to do. It asks epoll once more, since the pump may have forgotten
// what the sockets told it while it was awake. What epoll names then has most
// often been read already; a round finds out.
func (q *queue) Arm() bool {
	if q.pollSockets() > 0 && (q.Poll() > 0 || q.pollSockets() > 0) {
		return false
	}
	return !q.pressing() && q.ring.Arm()
}

// pressing: work that no event will announce.
func (q *queue) pressing() bool {
	for _, c := range q.conns {
		if c.readable && !c.stalled && c.state == connOpen {
			return true
		}
	}
	return false
}

// LargeIO keeps the pump from spinning after large requests, but not while a
// payload comes in or other requests are under way: the next part is there
// before a sleep is over, and to be woken for each costs more than to look.
func (q *queue) LargeIO() bool { return q.large && !q.flowing() }

// flowing: more is to come at once.
func (q *queue) flowing() bool {
	for _, c := range q.conns {
		if c.state == connOpen && !c.stalled && (c.cur != nil || c.unanswered > 1) {
			return true
		}
	}
	return false
}
