package client

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// Changes of state are recorded in Config.Journal where they happen. The journal
// calls nothing, so any lock may be held.

// recordEvent records an event of the session's transport.
func (s *session) recordEvent(e rtrs.Event) {
	j := s.client.cfg.Journal
	switch e.Kind {
	case rtrs.SessionUp:
		j.Add(journal.Event{Kind: journal.Session, Session: s.name, To: "connected"})
	case rtrs.SessionDown:
		j.Add(journal.Event{Kind: journal.Session, Session: s.name, From: "connected", To: "disconnected", Why: lossReason(e.Session.Paths())})
	case rtrs.PathChanged:
		s.recordPath(e)
	}
}

// recordPath records the new state of a path. Its end as an object, after it was
// closed, is no event.
func (s *session) recordPath(e rtrs.Event) {
	if e.State == rtrs.PathDead {
		delete(s.recorded, e.Path)
		return
	}
	if s.recorded == nil {
		s.recorded = map[int]recordedPath{}
	}
	last, now := s.recorded[e.Path], e.State.String()
	for _, p := range e.Session.Paths() {
		if p.ID == e.Path { // else it has been removed since
			last.name = pathText(p) + "%" + p.Fabric
		}
	}
	n := journal.Event{Kind: journal.Path, Session: s.name, Path: last.name, From: last.state, To: now}
	if e.Err != nil {
		n.Why = rootCause(e.Err).Error()
	}
	s.client.cfg.Journal.Add(n)
	s.recorded[e.Path] = recordedPath{last.name, now}
}

// recordState records the change of a device to another state. The caller holds mu.
func (d *Device) recordState(to State) {
	e := journal.Event{Kind: journal.Device, Session: d.session.name, Device: d.name, From: d.state.String(), To: to.String()}
	if to == Closed {
		e.Why = d.lastError
	}
	d.session.client.cfg.Journal.Add(e)
}

// recordSize records a new size, in bytes.
func (d *Device) recordSize(from, to uint64) {
	if from == to {
		return
	}
	d.session.client.cfg.Journal.Add(journal.Event{
		Kind: journal.Device, Session: d.session.name, Device: d.name, From: fmt.Sprint(from, " bytes"), To: fmt.Sprint(to, " bytes"), Why: "resized by the server",
	})
}

// recordFailing records that requests fail at the server, or that they do not any
// more. The caller holds mu.
func (d *Device) recordFailing(why string) {
	e := journal.Event{Kind: journal.Device, Session: d.session.name, Device: d.name, From: "failing", To: d.state.String(), Why: why}
	if d.failing {
		e.From, e.To = e.To, e.From
	}
	d.session.client.cfg.Journal.Add(e)
}

// recordLoss records the loss of writes, or that a user was told. The caller holds mu.
func (d *Device) recordLoss(from, to, why string) {
	d.client.cfg.Journal.Add(journal.Event{Kind: journal.Device, Session: d.session.name, Device: d.name, From: from, To: to, Why: why})
}
