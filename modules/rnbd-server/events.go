package server

import (
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// News for clients that ask for them: docs/extend/protocol/rnbd.md, "Events". A client
// keeps one EVENT waiting. The answer is the oldest event that the client has
// not seen. Until then the latest event of a device is kept with its mapping.
// So memory is bounded, and an event is sent again if an answer is lost with its
// path.

// onEvent answers op with an event, or parks op until there is one. It ends an
// EVENT that is parked already: the client has given that one up. It runs on
// the owner of op's poller.
func (s *Server) onEvent(op *rtrs.Op, sess *session, msg rnbdwire.Event) {
	if !msg.IsValid() || op.ReplyLen() != rnbdwire.EventRspSize {
		op.Respond(int(blk.EINVAL))
		return
	}
	sess.mu.Lock()
	old := sess.events.waiting
	sess.events.waiting, sess.events.seen, sess.events.listens = op, msg.Seen(), true
	sess.events.holds = msg.Holds()
	told := sess.deliverEvent() != nil
	sess.wakeListeners()
	sess.mu.Unlock()
	switch {
	case told:
		op.Respond(0)
	default:
		op.Park(func(op *rtrs.Op) { sess.removeListen(op) })
	}
	if old != nil {
		s.respondOnPump(old, blk.ECANCELED)
	}
}

// deliverEvent puts the oldest unseen event into the EVENT request that waits, and
// returns the request for the caller to answer. It returns nil if there is no
// event or no request. The caller holds mu.
func (s *session) deliverEvent() *rtrs.Op {
	in := &s.events
	if in.waiting == nil {
		return nil
	}
	f := rnbdwire.EventRspFields{Number: ^uint64(0)}
	if in.drain > in.seen {
		f.Number, f.Kind = in.drain, rnbdwire.EventDrain
	}
	if in.leave > in.seen && in.leave < f.Number {
		f = rnbdwire.EventRspFields{Number: in.leave, Kind: rnbdwire.EventHandOver, Sectors: uint64(in.grace.Milliseconds())}
	}
	if t := s.table.Load(); t != nil {
		for _, m := range *t {
			if m == nil {
				continue
			}
			for _, n := range [...]mappingEvent{m.event, {m.writerNotice, rnbdwire.EventShared}} {
				if n.number > in.seen && n.number < f.Number {
					f = rnbdwire.EventRspFields{Number: n.number, Kind: n.kind, DeviceID: m.id}
					f.Sectors = m.dev.limits.Load().Size / blk.SectorSize
				}
			}
		}
	}
	if f.Kind == 0 {
		return nil
	}
	f.Put(in.waiting.Data())
	op := in.waiting
	in.waiting = nil
	return op
}

// notify stores an event of kind about m, and sends the event if the client waits for one.
func (s *Server) notify(m *mapping, kind rnbdwire.EventKind) {
	sess := m.session
	sess.mu.Lock()
	sess.events.last++
	m.event = mappingEvent{sess.events.last, kind}
	op := sess.deliverEvent()
	sess.mu.Unlock()
	if op != nil {
		s.respondOnPump(op, blk.OK)
	}
}

// notifyDrain tells every client that listens that the server is about to end.
func (s *Server) notifyDrain() {
	s.notifyEach(func(in *eventQueue) { in.drain = in.last })
}

// notifyHandOver tells every client that listens that another process of the server
// goes on within grace. 0: this one does.
func (s *Server) notifyHandOver(grace time.Duration) {
	s.notifyEach(func(in *eventQueue) { in.leave, in.grace = in.last, grace })
}

// notifyEach stores an event in the queue of each session, and sends the event to clients that
// wait for one.
func (s *Server) notifyEach(store func(in *eventQueue)) {
	for i := range s.sessions {
		if sess := s.sessions[i].Load(); sess != nil {
			s.notifyOne(sess, store)
		}
	}
}

// notifyOne stores an event in the queue of a session, and sends the event if its client waits for
// one.
func (s *Server) notifyOne(sess *session, store func(in *eventQueue)) {
	sess.mu.Lock()
	sess.events.last++
	store(&sess.events)
	op := sess.deliverEvent()
	sess.mu.Unlock()
	if op != nil {
		s.respondOnPump(op, blk.OK)
	}
}

// respondOnPump answers op on its pump.
func (s *Server) respondOnPump(op *rtrs.Op, errno blk.Errno) {
	s.pumps[op.Poller()].poller.Do(func() { op.Respond(int(errno)) })
}

// removeListen answers op when its path closes, unless it has been answered. It runs
// on the op's pump.
func (s *session) removeListen(op *rtrs.Op) {
	s.mu.Lock()
	mine := s.events.waiting == op
	if mine {
		s.events.waiting = nil
	}
	s.mu.Unlock()
	if mine {
		op.Respond(int(syscall.ECANCELED))
	}
}
