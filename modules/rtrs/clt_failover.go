package rtrs

import (
	"syscall"
)

// The requests of a lost path.
//
// The path's goroutine takes the link from the data path (linkDown), ends its
// connections (link.close; each owner marks its requests as lost), and calls
// onDrained. From then on:
//
//	                      other path up            no path up
//	server with FENCE     wait for the fence,      answer Lost now,
//	                      then send again          keep the permit until fenced
//	server without        send again now           answer Lost now
//
// A request keeps its permit, and so its chunk and its memory, all the way.
// When it is given up, because no path is left or because the caller of an admin
// request waits no longer, its chunk may still be in use at the server: the
// permit stays reserved until its link has ended there (clt_fence.go).

// onDrained handles the requests of a drained link.
func (s *Session) onDrained(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining--
	if l.epoch != s.downs {
		s.abortLink(l)
	}
	switch {
	case l.unanswered.Load() == 0:
	case l.fences:
		s.lost = append(s.lost, l)
	case l.calls.Load() > 0 && !l.aborted: // some may be given up: until the path is accepted again
		s.lost = append(s.lost, l)
		l.busy = true
		s.handBack(l)
	default:
		l.ended.Store(true)
		s.handBack(l)
	}
	s.fenceLost()
	if s.renew && len(s.links) == 0 && s.draining == 0 {
		s.changeName()
	}
	s.publishLocked()
}

// handBack lets the owners send the requests of l again, and free the permits
// of those that were given up if l has ended. mu is held.
func (s *Session) handBack(l *link) {
	for _, q := range s.queues {
		q.poller.Do(func() { q.failoverLink(l) })
	}
}

// abortLost aborts the requests that wait for fences: there is no path left. mu
// is held.
func (s *Session) abortLost() {
	for _, l := range s.lost {
		s.abortLink(l)
	}
}

// abortLink answers the lost requests of l with Lost. SessionDown was
// reported since they were sent, so the consumer decides whether to repeat
// them. mu is held.
func (s *Session) abortLink(l *link) {
	l.aborted = true
	for _, q := range s.queues {
		q.poller.Do(func() { q.abortLink(l) })
	}
}

// markLost marks the queue's requests on l and counts them; counted are those
// that count as in flight. Owner; nothing more can be posted on or arrive from
// that connection.
func (q *Queue) markLost(l *link) (lost, counted int64) {
	l.slots.eachHeld(q.cid, func(id uint32, r *request) {
		if r.link != l || r.state != reqInflight {
			return
		}
		lost++
		if r.kind.countsAsIO() {
			counted++
		}
		r.state = reqLost
		if r.call != nil && r.kind != kindFence {
			l.calls.Add(1)
		}
		if r.kind == kindFence || r.givenUp() { // a FENCE has a new one sent, with another permit
			q.abortOne(r)
		}
	})
	return lost, counted
}

// failoverLink sends the queue's requests of l again, and frees the permits of
// those that were given up if nothing can use their chunks. Owner.
func (q *Queue) failoverLink(l *link) {
	sl := l.slots
	sl.eachHeld(q.cid, func(id uint32, r *request) {
		switch {
		case r.state == reqAborted:
			q.freeAborted(sl, id, r)
		case r.link == l && (r.state == reqLost || r.state == reqAgain):
			q.sendAgain(sl, id, r)
		}
	})
	if q.cid == 0 {
		q.retryAdmin() // permits of FENCEs may have come back
	}
}

// sendAgain sends a request that was lost, and may be sent on another link,
// unless it was given up. Owner.
func (q *Queue) sendAgain(sl *requestSlots, id uint32, r *request) {
	if !r.link.ended.Load() {
		r.runs = r.link
	}
	if r.givenUp() {
		q.abortOne(r)
		q.freeAborted(sl, id, r)
		return
	}
	r.state = reqAgain
	err := ErrDisconnected
	if live := q.session.live.Load(); live != nil && live.slots == sl {
		err = q.submit(live, id, r)
	}
	switch err {
	case nil:
		r.link.path.failovers.Add(1)
	case errNoCredit:
		q.retry, q.noCredit = sl, true // resume comes back
	case ErrDisconnected:
		q.finish(sl, id, r, r.lostErrno())
	default:
		q.finish(sl, id, r, ErrnoOf(err))
	}
}

// freeAborted gives the permit of a request back that was answered before it
// ended, if it has ended.
func (q *Queue) freeAborted(sl *requestSlots, id uint32, r *request) {
	if r.link.ended.Load() && (r.runs == nil || r.runs.ended.Load()) {
		q.releaseSlot(sl, id, r)
	}
}

// abortLink answers the queue's requests of l that wait for a fence. Owner.
func (q *Queue) abortLink(l *link) {
	l.slots.eachHeld(q.cid, func(id uint32, r *request) {
		if r.link == l && r.state == reqLost {
			q.abortOne(r)
		}
	})
}

// abortOne answers a lost request and keeps its permit.
func (q *Queue) abortOne(r *request) {
	call, errno := r.call, r.lostErrno()
	r.state, r.call = reqAborted, nil
	q.notifyDone(r.tag, call, errno)
}

// lostErrno returns the errno of r if no path is left: Lost, or that of an admin request.
func (r *request) lostErrno() int {
	if r.call != nil {
		return int(syscall.ECONNABORTED)
	}
	return Lost
}

// resumeWaiting sends the requests that waited for room in a send queue or for a
// permit, after a path is lost or has room again. Owner.
func (q *Queue) resumeWaiting() {
	if sl := q.retry; sl != nil {
		q.retry = nil
		sl.eachHeld(q.cid, func(id uint32, r *request) {
			if r.state == reqAgain {
				q.sendAgain(sl, id, r)
			}
		})
	}
	q.wakeWaiters()
}
