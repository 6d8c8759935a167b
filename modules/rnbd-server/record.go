package server

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Changes of state are recorded in Config.Journal where they happen. The journal
// calls nothing, so any lock may be held.

// addresses returns the addresses of a path, the client's first.
func addresses(p rtrs.SrvPathInfo) string {
	return verbs.AddrString(p.Client.Addr()) + "@" + verbs.AddrString(p.Server.Addr())
}

// recordSession records that a session has another state.
func (s *Server) recordSession(sess *session, from, to string) {
	s.cfg.Journal.Add(journal.Event{Kind: journal.Session, Session: sess.name, From: from, To: to})
}

// record records that the session opened or closed its device.
func (m *mapping) record(from, to, why string) {
	m.dev.plugin.server.cfg.Journal.Add(journal.Event{Kind: journal.Device, Session: m.session.name, Device: m.name, From: from, To: to, Why: why})
}

// recordMove records that a device is about to have another state. Its first OPEN
// and its last CLOSE are recorded as those of a session. The caller holds
// d.plugin.mu.
func (d *device) recordMove(to devState) {
	from := d.now()
	if from == devOpening || to == devClosed {
		return
	}
	d.plugin.server.cfg.Journal.Add(journal.Event{Kind: journal.Device, Device: d.name, Plugin: d.plugin.cfg.Name, From: from.String(), To: to.String(), Why: d.openErr})
}
