package server

import (
	"net/netip"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// Records that a client causes go to the audit log by AddPeer, with the address of the
// client.

// auditPeer records an event of a session, with its first path.
func (s *Server) auditPeer(sess *session, r audit.Record) {
	if s.cfg.Audit == nil {
		return
	}
	r.Session = sess.name
	var client netip.Addr
	if paths := sess.transport.Paths(); len(paths) > 0 {
		addPath(&r, paths[0])
		client = paths[0].Client.Addr()
	}
	s.cfg.Audit.AddPeer(client, r)
}

// auditSession records the begin or the end of a session.
func (s *Server) auditSession(event string, sess *session, err error) {
	s.auditPeer(sess, audit.Record{Event: event, Result: audit.ResultOf(err)})
}

// auditPath records a path that asks to join a session.
func (s *Server) auditPath(sess *session, p rtrs.SrvPathInfo, err error) {
	r := audit.Record{Event: audit.EventPath, Session: sess.name, Result: audit.ResultOf(err)}
	addPath(&r, p)
	s.cfg.Audit.AddPeer(p.Client.Addr(), r)
}

func addPath(r *audit.Record, p rtrs.SrvPathInfo) {
	r.Client, r.Server, r.Fabric = p.Client.String(), p.Server.String(), p.Fabric
	r.Identity = p.Security.Peer
}

// auditOpen records the answer to an OPEN.
func (s *Server) auditOpen(sess *session, msg rnbdwire.Open, err error) {
	s.auditPeer(sess, audit.Record{Event: audit.EventOpen, Device: msg.Name(), Mode: blk.AccessMode(msg.AccessMode()).String(), Result: audit.ResultOf(err)})
}

// auditForced records that a path is closed because its client would not be let in any
// more.
func (s *Server) auditForced(sess *session, p rtrs.SrvPathInfo, why error) {
	r := audit.Record{Event: audit.EventForced, Session: sess.name, Result: audit.OK, Reason: why.Error()}
	addPath(&r, p)
	s.cfg.Audit.Add(r)
}

// auditRefusal records a client that is refused before it has a session.
func (s *Server) auditRefusal(r rtrs.Refusal) {
	event := audit.EventProof
	if r.Handshake {
		event = audit.EventHandshake
	}
	s.cfg.Audit.AddPeer(r.Client.Addr(), audit.Record{
		Time: time.Now(), Event: event, Session: r.Session, Claimed: r.Claimed, Result: audit.ResultOf(r.Err),
		Client: r.Client.String(), Server: r.Server.String(), Fabric: r.Fabric,
	})
}

// auditClose records that a client has closed a device.
func (s *Server) auditClose(m *mapping) {
	s.auditPeer(m.session, audit.Record{Event: audit.EventClose, Device: m.name, Mode: m.mode.String(), Result: audit.OK})
}

// auditForcedClose records that a device is closed by the server.
func (s *Server) auditForcedClose(m *mapping, why string) {
	s.cfg.Audit.Add(audit.Record{Event: audit.EventForced, Session: m.session.name, Device: m.name, Mode: m.mode.String(), Result: audit.OK, Reason: why})
}
