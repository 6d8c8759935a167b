package server

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Changes of state are recorded in Config.Journal where they happen. The journal
// calls nothing, so any lock may be held.

// pathAddresses returns the addresses of a path, the client's first.
func pathAddresses(p rtrs.SrvPathInfo) string {
	return verbs.AddrString(p.Client.Addr()) + "@" + verbs.AddrString(p.Server.Addr())
}

// recordSession records that a session has another state.
func (s *Server) recordSession(sess *session, from, to string) {
	s.cfg.Journal.Add(journal.Event{Kind: journal.Session, Session: sess.name, From: from, To: to})
}

// recordAudit records that the session opened or closed its device.
func (m *mapping) recordAudit(from, to, why string) {
	m.dev.plugin.server.cfg.Journal.Add(journal.Event{Kind: journal.Device, Session: m.session.name, Device: m.name, From: from, To: to, Why: why})
}
