package server

import (
	"net/netip"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/curb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// auditSession records an event of a session, with its first path.
func (s *Server) auditSession(event string, sess *session, err error) {
	if s.cfg.Audit == nil {
		return
	}
	r := audit.Record{Event: event, Session: sess.name, Result: audit.ResultOf(err)}
	if paths := sess.transport.Paths(); len(paths) > 0 {
		addPath(&r, paths[0])
	}
	s.cfg.Audit.Add(r)
}

// auditPath records a path that asks to join a session.
func (s *Server) auditPath(sess *session, p rtrs.SrvPathInfo, err error) {
	if s.cfg.Audit == nil {
		return
	}
	r := audit.Record{Event: audit.EventPath, Session: sess.name, Result: audit.ResultOf(err)}
	addPath(&r, p)
	s.cfg.Audit.Add(r)
}

func addPath(r *audit.Record, p rtrs.SrvPathInfo) {
	r.Client, r.Server, r.Fabric = p.Client.String(), p.Server.String(), p.Fabric
	r.Identity = p.Security.Peer
}

// auditOpen records the answer to an OPEN.
func (s *Server) auditOpen(sess *session, msg rnbdwire.Open, err error) {
	if s.cfg.Audit == nil {
		return
	}
	r := audit.Record{Event: audit.EventOpen, Session: sess.name, Device: msg.Name(), Mode: blk.AccessMode(msg.AccessMode()).String(), Result: audit.ResultOf(err)}
	if paths := sess.transport.Paths(); len(paths) > 0 {
		addPath(&r, paths[0])
	}
	s.cfg.Audit.Add(r)
}

// auditForced records that a path is closed because its client would not be let in any
// more.
func (s *Server) auditForced(sess *session, p rtrs.SrvPathInfo, why error) {
	r := audit.Record{Event: audit.EventForced, Session: sess.name, Result: audit.OK, Reason: curb.Text(why.Error())}
	addPath(&r, p)
	s.cfg.Audit.Add(r)
}

// auditRefusal records a client that is refused before it has a session. Strangers
// can cause any number of these.
func (s *Server) auditRefusal(r rtrs.Refusal) {
	if s.cfg.Audit == nil {
		return
	}
	event := audit.EventProof
	if r.Handshake {
		event = audit.EventHandshake
	}
	s.strangers.Add(r.Client.Addr(), audit.Record{
		Time: time.Now(), Event: event, Session: curb.Text(r.Session), Claimed: curb.Text(r.Claimed), Result: curb.Text(audit.ResultOf(r.Err)),
		Client: r.Client.String(), Server: r.Server.String(), Fabric: r.Fabric,
	})
}

// newStrangers returns the curb on the records of refusals.
func newStrangers(log *audit.Log) *curb.Curb[audit.Record] {
	return curb.New(func(from netip.Addr, r audit.Record, leftOut uint64) {
		if leftOut > 0 {
			r.LeftOut, r.Session, r.Claimed, r.Client = leftOut, "", "", ""
			if from.IsValid() {
				r.Client = from.String()
			}
		}
		log.Add(r)
	})
}

// auditMapping records the end of a mapping.
func (s *Server) auditMapping(event string, m *mapping, why string) {
	s.cfg.Audit.Add(audit.Record{Event: event, Session: m.session.name, Device: m.name, Mode: m.mode.String(), Result: audit.OK, Reason: why})
}
