package rtrs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// What becomes of the requests of a lost path.
//
// The path's goroutine takes the link from the data path (linkDown), ends its
// connections (link.close; each owner marks its requests as lost), and calls
// settle. From then on:
//
//	                      other path up            no path up
//	server with FENCE     wait for the fence,      answer ECONNABORTED now,
//	                      then send again          keep the permit until fenced
//	server without        send again now           answer ECONNABORTED now
//
// A request of a lost path may still sit unread at the server. Executed after
// its repetition it would overwrite newer data. So a server with the FENCE
// extension is asked on another path to close the lost one: its answer says
// that nothing of it can run any more. A path that is accepted again says the
// same of its own last incarnation.
//
// A request keeps its permit, and so its chunk and its memory, all the way.

// settle decides about the requests of a drained link.
func (s *Session) settle(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining--
	if l.epoch != s.downs {
		s.abort(l)
	}
	switch {
	case l.unanswered.Load() == 0:
	case !l.fences:
		s.handBack(l)
	default:
		s.lost = append(s.lost, l)
		s.fenceLost()
	}
	s.publishLocked()
}

// handBack lets the owners send the requests of l again: nothing of it can run
// late. mu is held.
func (s *Session) handBack(l *link) {
	for _, q := range s.queues {
		q.poller.Do(func() { q.failover(l) })
	}
}

// abortLost answers what waits for fences: there is no path left. mu is held.
func (s *Session) abortLost() {
	for _, l := range s.lost {
		s.abort(l)
	}
}

// abort answers what is lost with l: SessionDown was told since it was sent, so
// the consumer has to look at it again before it is repeated.
func (s *Session) abort(l *link) {
	for _, q := range s.queues {
		q.poller.Do(func() { q.abort(l) })
	}
}

// fenceLost starts the FENCEs that can be sent. mu is held.
func (s *Session) fenceLost() {
	for _, l := range slices.Clone(s.lost) {
		carrier := s.fenceCarrier()
		if carrier == nil {
			return
		}
		switch {
		case l.fencing != nil:
		case !carrier.fences || l.incarnation != carrier.incarnation: // not the session that l was of
			s.fenced(l)
		case l.path.connecting:
		case s.closed: // no memory for a FENCE; the end of the last path answers
		default:
			l.fencing = make(chan struct{})
			go s.fence(l, carrier)
		}
	}
}

// fenceCarrier is a link that can take a FENCE.
func (s *Session) fenceCarrier() *link {
	for _, l := range s.links {
		if !l.lost() {
			return l
		}
	}
	return nil
}

// fence asks the server on carrier to close the path of l, and waits.
func (s *Session) fence(l, carrier *link) {
	err := s.sendFence(l, carrier)
	if err != nil && !carrier.lost() && !errors.Is(err, verbs.ErrClosed) { // that would be the session
		carrier.fail(fmt.Errorf("FENCE of path %s: %w", l.path.addr, err))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	close(l.fencing)
	l.fencing = nil
	if err == nil {
		s.log.Info("rtrs: lost path fenced", "path", l.path.addr.String())
		s.fenced(l)
	}
	s.fenceLost()
	s.publishLocked()
}

func (s *Session) sendFence(l, carrier *link) error {
	call, err := s.newCall(kindFence, l.path.uuid[:], 0)
	if err != nil {
		return err
	}
	call.carrier = carrier
	return call.do(context.Background(), s.queues[0])
}

// fenced forgets l: nothing of it can run any more. mu is held.
func (s *Session) fenced(l *link) {
	if i := slices.Index(s.lost, l); i >= 0 {
		s.lost = slices.Delete(s.lost, i, i+1)
		s.handBack(l)
	}
}

// beginConnect waits until no FENCE for p is under way, and keeps new ones from
// starting until endConnect.
func (s *Session) beginConnect(ctx context.Context, p *path) error {
	for {
		s.mu.Lock()
		pending := s.pendingFence(p)
		if pending == nil {
			p.connecting = true
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		select {
		case <-pending:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pendingFence is closed at the end of a FENCE for p, nil if there is none. mu
// is held.
func (s *Session) pendingFence(p *path) chan struct{} {
	for _, l := range s.lost {
		if l.path == p && l.fencing != nil {
			return l.fencing
		}
	}
	return nil
}

// endConnect ends what beginConnect began. The server has accepted the path
// again: then its earlier links are fenced.
func (s *Session) endConnect(p *path, accepted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.connecting = false
	if accepted {
		for _, l := range slices.Clone(s.lost) {
			if l.path == p {
				s.fenced(l)
			}
		}
	}
	s.fenceLost()
	if !accepted { // else the path's goroutine publishes, with its own news
		s.publishLocked()
	}
}

// markLost marks the queue's requests on l and counts them; counted are those
// that count as in flight. Owner; nothing more can be posted on or arrive from
// that connection.
func (q *Queue) markLost(l *link) (lost, counted int64) {
	l.slots.each(q.cid, func(id uint32, r *request) {
		if r.link != l || r.state != reqInflight {
			return
		}
		lost++
		if r.kind.counts() {
			counted++
		}
		r.state = reqLost
		if r.kind == kindFence { // it has a new one sent, with another permit
			q.abortOne(r)
		}
	})
	return lost, counted
}

// failover sends the queue's requests of l again, and frees the permits of
// those that were given up. Owner.
func (q *Queue) failover(l *link) {
	sl := l.slots
	sl.each(q.cid, func(id uint32, r *request) {
		switch {
		case r.link != l:
		case r.state == reqLost:
			r.link = nil
			q.resubmit(sl, id, r)
		case r.state == reqAborted:
			q.release(sl, id, r)
		}
	})
	if q.cid == 0 {
		q.retryAdmin() // permits of FENCEs may have come back
	}
}

// resubmit sends a request that was lost and whose link is forgotten.
func (q *Queue) resubmit(sl *slots, id uint32, r *request) {
	err := ErrDisconnected
	if live := q.session.live.Load(); live != nil && live.slots == sl {
		err = q.submit(live, id, r)
	}
	switch err {
	case nil:
		r.link.path.failovers.Add(1)
	case errNoCredit:
		q.retry, q.noCredit = sl, true // resume comes back
	default:
		q.complete(sl, id, r, ErrnoOf(err))
	}
}

// abort answers the queue's requests of l that wait for a fence. Owner.
func (q *Queue) abort(l *link) {
	l.slots.each(q.cid, func(id uint32, r *request) {
		if r.link == l && r.state == reqLost {
			q.abortOne(r)
		}
	})
}

// abortOne answers a lost request and keeps its permit.
func (q *Queue) abortOne(r *request) {
	call := r.call
	r.state, r.call = reqAborted, nil
	q.tell(r.tag, call, int(syscall.ECONNABORTED))
}

// resume tries again what waited for room in a send queue or for a permit: a
// path is gone, or has room again. Owner.
func (q *Queue) resume() {
	if sl := q.retry; sl != nil {
		q.retry = nil
		sl.each(q.cid, func(id uint32, r *request) {
			if r.state == reqLost && r.link == nil {
				q.resubmit(sl, id, r)
			}
		})
	}
	q.wake()
}
