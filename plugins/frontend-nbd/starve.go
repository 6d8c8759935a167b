package main

import (
	"errors"
	"time"
)

// Replies that a client does not take keep their slots. One such client is
// kept in bounds by share.allows; several together can hold every slot, and
// then a connection that holds none would wait for them for ever. So when a
// connection starves, those that do not take a single byte for patience are
// closed. Nothing of this runs while there are slots.

// patience is how long a client may take nothing while another one starves.
const patience = 10 * time.Second

var errNotReading = errors.New("client does not take its replies, and others wait for their memory")

// guard is a queue's watch over connections that starve.
type guard struct {
	on       bool // a timer runs
	patience time.Duration
}

// noSlot is called when c waits for a slot. It starts the watch if c has none.
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
		q.kick()
	})
}

// evictIdle closes the clients that took nothing since noSlot, if somebody
// still starves for their slots. If it is not enough, noSlot starts anew.
func (q *queue) evictIdle() {
	q.guard.on = false
	for _, c := range q.conns {
		if c.blocked() && c.sent == c.mark && c.sh.starving() {
			c.fail(errNotReading)
		}
	}
}

// starving: a connection waits and holds nothing.
func (s *share) starving() bool {
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
