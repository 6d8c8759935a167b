package main

import (
	"errors"
	"time"
)

// Replies that a client does not read keep their slots. share.allowsConn bounds one
// such client; several together can hold every slot, and a connection without a
// slot would wait for them for ever. So while a connection starves, the clients
// that read no byte for the time patience are closed. None of this runs while
// there are free slots.

// patience bounds the time in which a client reads nothing while another one
// starves.
const patience = 10 * time.Second

var errNotReading = errors.New("client does not read its replies, and other connections wait for their memory")

// starvationGuard is a queue's watch over connections that starve.
type starvationGuard struct {
	on       bool // a timer runs
	patience time.Duration
}

// noSlot is called when c waits for a slot. It starts the watch if c holds none.
func (q *queue) noSlot(c *conn) {
	if c.held > 0 || q.guard.on {
		return
	}
	q.guard.on = true
	for _, other := range q.conns {
		other.mark = other.sent
	}
	time.AfterFunc(q.guard.patience, func() {
		q.alarm.Store(true)
		q.kickParked()
	})
}

// evictIdle closes the clients that read nothing since noSlot if a connection
// still starves for their slots. If that frees too few, noSlot is called again.
func (q *queue) evictIdle() {
	q.guard.on = false
	for _, c := range q.conns {
		if c.sendBlocked() && c.sent == c.mark && c.sh.anyStarving() {
			c.closeSocket(errNotReading)
		}
	}
}

// anyStarving reports whether a connection waits for a slot and holds none.
func (s *slotShare) anyStarving() bool {
	if len(s.free) > 0 {
		return false
	}
	for _, c := range s.conns {
		if c.stalled && c.held == 0 && c.state != connDead {
			return true
		}
	}
	return false
}
