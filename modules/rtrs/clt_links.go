package rtrs

import (
	"slices"
	"time"
)

// The connected paths of a session, and how the data path and the consumer are told of
// them.

// slotsFor returns the requests for a link with the given sizes: those that
// the session has, or new ones if no link uses those any more.
func (s *Session) slotsFor(lp *linkParams) (*requestSlots, error) {
	s.mu.Lock()
	sl, inUse := s.slots, len(s.links) > 0
	s.mu.Unlock()
	switch {
	case sl != nil && sl.depth == lp.queueDepth:
		return sl, nil
	case inUse:
		return nil, protocolErrorf("queue depth %d is not the session's %d", lp.queueDepth, sl.depth)
	}
	headers, err := s.Register(make([]byte, lp.queueDepth*slotHeaderLen))
	if err != nil {
		return nil, err
	}
	return newSlots(lp.queueDepth, len(s.queues), headers, s.wakeQueue), nil
}

// wakeQueue tells a queue that found no permit to try again. Any goroutine.
func (s *Session) wakeQueue(cid int) {
	q := s.queues[cid]
	q.poller.Do(q.onPermit)
}

// addLink makes l one of the connected links. publish shows it to the data
// path.
func (s *Session) addLink(l *link) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.renew || l.group != s.uuid:
		return protocolErrorf("the session is made anew")
	case len(s.links) > 0 && s.links[0].slots != l.slots:
		return protocolErrorf("queue depth %d is not the session's %d", l.slots.depth, s.links[0].slots.depth)
	}
	if err := s.compareIncarnation(l); err != nil {
		return err
	}
	if p := l.path; p.later || !slices.Contains(s.paths, p) {
		if err := s.checkTwin(p, l.conns[0].qp.LocalAddr().Addr()); err != nil {
			return err
		}
	}
	s.slots, l.epoch = l.slots, s.downs
	if l.fences {
		l.slots.permits.keepSpares()
	}
	if now := s.maxIOSize.Load(); len(s.links) == 0 || int64(l.maxIOSize) < now {
		s.maxIOSize.Store(int64(l.maxIOSize))
	}
	i, _ := slices.BinarySearchFunc(s.links, l.path.id, func(o *link, id int) int { return o.path.id - id })
	s.links = slices.Insert(s.links, i, l)
	l.startBeats(time.Now())
	return nil
}

// checkIncarnation is compareIncarnation for callers that do not hold mu.
func (s *Session) checkIncarnation(l *link) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.compareIncarnation(l)
}

// compareIncarnation keeps l from joining links of another incarnation of the
// server's session: the consumer's state, such as device ids, has no meaning
// there. Either the server has restarted and those links have not noticed yet,
// or l leads to another server. A heartbeat is sent on each of them: when none
// is left the session is down, and the next attempt brings it up. The caller
// holds mu.
func (s *Session) compareIncarnation(l *link) error {
	if len(s.links) == 0 || s.links[0].incarnation == l.incarnation {
		return nil
	}
	for _, o := range s.links {
		o.probeServer()
	}
	return protocolErrorf("the server has the session anew, or is another one")
}

// publishLinks makes the connected links visible to the data path before it calls news,
// so that the receiver of an event can use the path.
func (s *Session) publishLinks(news func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.showLinks()
	news()
	s.reportUp()
}

func (s *Session) publishLocked() {
	s.showLinks()
	s.reportUp()
}

// showLinks gives the data path the connected links. After total loss that waits
// until nothing of a lost link can run late any more. mu is held.
func (s *Session) showLinks() {
	switch {
	case len(s.links) == 0:
		s.live.Store(nil)
	case s.up || s.draining == 0 && s.allFenced():
		s.live.Store(&liveSet{slices.Clone(s.links), s.links[0].slots})
	}
}

// reportUp emits SessionUp or SessionDown if the session has changed. mu is held.
func (s *Session) reportUp() {
	if up := s.live.Load() != nil; up != s.up {
		s.up = up
		kind := SessionUp
		if !up {
			kind = SessionDown
			s.downs++
		}
		s.log.Info("rtrs: " + kind.String())
		s.events.addEvent(Event{Kind: kind, Session: s})
	}
}

// linkDown takes l from the data path. It counts as draining until onDrained.
func (s *Session) linkDown(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.links = slices.DeleteFunc(s.links, func(o *link) bool { return o == l })
	s.draining++
	s.publishLocked()
	if len(s.links) == 0 {
		s.abortLost()
	}
	for _, q := range s.queues {
		q.poller.Do(q.resumeWaiting) // requests that wait for this path must not
	}
}
