package server

import (
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// News for clients that ask for them: docs/extend/protocol/rnbd.md, "Events". A client
// keeps one EVENT waiting. The answer is the oldest news that the client has
// not seen. Until then the latest news about a device is kept with its mapping.
// So memory is bounded, and news is told again if an answer is lost with its
// path.

// onEvent answers op with news, or parks it until there is some. It ends an
// EVENT that is parked already: the client has given that one up. It runs on
// the owner of op's poller.
func (s *Server) onEvent(op *rtrs.Op, sess *session, msg rnbdwire.Event) {
	if !msg.IsValid() || op.ReplyLen() != rnbdwire.EventRspSize {
		op.Respond(int(blk.EINVAL))
		return
	}
	sess.mu.Lock()
	old := sess.inbox.waiting
	sess.inbox.waiting, sess.inbox.seen, sess.inbox.listens = op, msg.Seen(), true
	sess.inbox.holds = msg.Holds()
	told := sess.deliver() != nil
	sess.stir()
	sess.mu.Unlock()
	switch {
	case told:
		op.Respond(0)
	default:
		op.Park(func(op *rtrs.Op) { sess.removeListen(op) })
	}
	if old != nil {
		s.respond(old, blk.ECANCELED)
	}
}

// deliver puts the oldest unseen event into the EVENT request that waits, and
// returns the request for the caller to answer. It returns nil if there is no
// event or no request. The caller holds mu.
func (s *session) deliver() *rtrs.Op {
	in := &s.inbox
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
			for _, n := range [...]news{m.news, {m.sharing, rnbdwire.EventShared}} {
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

// tell stores news of kind about m, and sends it if the client waits for news.
func (s *Server) tell(m *mapping, kind rnbdwire.EventKind) {
	sess := m.session
	sess.mu.Lock()
	sess.inbox.last++
	m.news = news{sess.inbox.last, kind}
	op := sess.deliver()
	sess.mu.Unlock()
	if op != nil {
		s.respond(op, blk.OK)
	}
}

// tellDrain tells every client that listens that the server is about to end.
func (s *Server) tellDrain() {
	s.tellEach(func(in *inbox) { in.drain = in.last })
}

// tellHandOver tells every client that listens that another process of the server
// goes on within grace. 0: this one does.
func (s *Server) tellHandOver(grace time.Duration) {
	s.tellEach(func(in *inbox) { in.leave, in.grace = in.last, grace })
}

// tellEach stores news in the inbox of each session, and sends it to clients that
// wait for news.
func (s *Server) tellEach(store func(in *inbox)) {
	for i := range s.sessions {
		if sess := s.sessions[i].Load(); sess != nil {
			s.tellOne(sess, store)
		}
	}
}

// tellOne stores news in the inbox of a session, and sends it if its client waits for
// news.
func (s *Server) tellOne(sess *session, store func(in *inbox)) {
	sess.mu.Lock()
	sess.inbox.last++
	store(&sess.inbox)
	op := sess.deliver()
	sess.mu.Unlock()
	if op != nil {
		s.respond(op, blk.OK)
	}
}

// respond answers op on its pump.
func (s *Server) respond(op *rtrs.Op, errno blk.Errno) {
	s.pumps[op.Poller()].poller.Do(func() { op.Respond(int(errno)) })
}

// removeListen answers op when its path closes, unless it has been answered. It runs
// on the op's pump.
func (s *session) removeListen(op *rtrs.Op) {
	s.mu.Lock()
	mine := s.inbox.waiting == op
	if mine {
		s.inbox.waiting = nil
	}
	s.mu.Unlock()
	if mine {
		op.Respond(int(syscall.ECANCELED))
	}
}
