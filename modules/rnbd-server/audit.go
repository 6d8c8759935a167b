package server

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
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

// auditMapping records the end of a mapping.
func (s *Server) auditMapping(event string, m *mapping, why string) {
	s.cfg.Audit.Add(audit.Record{Event: event, Session: m.session.name, Device: m.name, Mode: m.mode.String(), Result: audit.OK, Reason: why})
}
