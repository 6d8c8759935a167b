package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/access"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// The rules are applied to each OPEN and to each path that joins a session, never
// to a request. An OPEN is judged once more when its mapping is in the session's
// table, and a joining path is judged and admitted in one step under
// session.rulesMu. So the later of the two finds the other. A refused path was
// never part of the session: no OPEN is refused because of it.

// SetAccess replaces the rules. nil allows everything. After grace, open
// devices that the rules do not allow are closed by force, unless newer rules
// allow them by then. SetAccess does not wait for that.
func (s *Server) SetAccess(rules *access.Rules, grace time.Duration) {
	if old := s.setRules(rules); old.Len() > 0 && rules.Len() == 0 {
		s.log.Warn("there are no access rules any more: every client may open every device")
	}
	s.cfg.Audit.Add(audit.Record{Event: audit.EventRules, Result: audit.OK, Reason: fmt.Sprintf("%d rules", rules.Len())})
	s.cfg.Journal.Add(journal.Event{Kind: journal.Config, To: fmt.Sprintf("%d access rules", rules.Len())})
	late := s.forbidden()
	for _, m := range late {
		s.log.Warn("open device is not allowed any more, it is closed after the grace time", "session", m.session.name, "device", m.name, "pause", grace, "err", s.allowed(m.session, m.name, m.mode))
	}
	if len(late) == 0 {
		return
	}
	go func() {
		select {
		case <-time.After(grace):
			s.closeForbidden()
		case <-s.admins.Done():
		}
	}()
}

// Access returns the rules in force.
func (s *Server) Access() *access.Rules { return s.rules.Load().Rules }

// forbidden lists the mappings that the rules do not allow.
func (s *Server) forbidden() (out []*mapping) {
	if s.rules.Load().Len() == 0 {
		return nil
	}
	for i := range s.sessions {
		if sess := s.sessions[i].Load(); sess != nil {
			out = append(out, slices.DeleteFunc(sess.mappings(), func(m *mapping) bool {
				return !errors.Is(s.allowed(sess, m.name, m.mode), syscall.EACCES)
			})...)
		}
	}
	return out
}

func (s *Server) closeForbidden() {
	for _, m := range s.forbidden() {
		s.log.Warn("device is closed: its client is not allowed to have it open any more", "session", m.session.name, "device", m.name)
		go s.forceClose(m, "the access rules have changed") // each waits for its own requests
	}
}

// allowed returns EACCES with the reason if the rules refuse.
func (s *Server) allowed(sess *session, name string, mode blk.AccessMode) error {
	rules := s.rules.Load()
	if rules.Len() == 0 {
		return nil
	}
	sess.rulesMu.Lock()
	c := sess.client(sess.admitted)
	sess.rulesMu.Unlock()
	if len(c.Paths) == 0 { // the session ends
		return fmt.Errorf("session %q has no path: %w", sess.name, syscall.ENOTCONN)
	}
	return decide(rules.Rules, c, name, mode)
}

func decide(rules *access.Rules, c access.Client, name string, mode blk.AccessMode) error {
	if d := rules.Decide(c, name, mode); !d.Allowed {
		return fmt.Errorf("not allowed to open it %s: %s: %w", mode, d.Why, syscall.EACCES)
	}
	return nil
}

// client describes the session for the rules, with the paths that are connected
// and with the one that has the id joining.
func (s *session) client(joining int) access.Client {
	c := access.Client{Session: s.name}
	for _, p := range s.transport.Paths() {
		if p.State != rtrs.SrvPathConnected && (p.State != rtrs.SrvPathConnecting || p.ID != joining) {
			continue // a path that is refused, or has gone
		}
		if id := p.Security.Peer; id != "" && len(c.Identities) == 0 {
			c.Identities = []string{id} // the transport admits no path with another identity
		}
		c.Paths = append(c.Paths, access.Path{Addr: p.Client.Addr(), Fabric: p.Fabric})
	}
	return c
}

// PathUp refuses a path if the rules would have forbidden the session's open
// devices with it. It is never called twice at a time for a session.
func (h *handler) PathUp(t *rtrs.SrvSession, p rtrs.SrvPathInfo) error {
	s := (*Server)(h)
	sess, ok := t.Context().(*session)
	if !ok {
		return nil
	}
	m, err := s.admitPath(sess, p.ID)
	s.auditPath(sess, p, err)
	if err != nil {
		s.log.Warn("path is refused: with it the session may not have a device open", "session", sess.name, "client", p.Client, "device", m.name, "err", err)
		return fmt.Errorf("device %q is open: %w", m.name, err)
	}
	return nil
}

// admitPath counts the path with this id as one of the session's, unless the rules
// forbid a mapping then: that one is returned, with the reason.
func (s *Server) admitPath(sess *session, id int) (*mapping, error) {
	sess.rulesMu.Lock()
	defer sess.rulesMu.Unlock()
	rules, c := s.rules.Load(), sess.client(id)
	for _, m := range sess.mappings() {
		if err := decide(rules.Rules, c, m.name, m.mode); err != nil {
			return m, err
		}
	}
	sess.admitted = id
	return nil, nil
}

// ListAccess lists the rules in force.
func (c *controlAPI) ListAccess(context.Context, *controlpb.ListRequest) (*controlpb.AccessRuleList, error) {
	rules, shares := c.s.shares()
	list := &controlpb.AccessRuleList{}
	for i, share := range shares {
		list.Rules = append(list.Rules, &controlpb.AccessRule{
			Number: uint32(i + 1), Text: rules.Text(i + 1), Limits: limitsMessage(&share.Limits),
			OpenSessions: uint32(share.OpenSessions), OpenDevices: uint32(share.OpenDevices),
			Queued: uint32(share.Queued), Waited: share.Waited,
		})
	}
	return list, nil
}

// SetAccessLimits is Server.SetLimits.
func (c *controlAPI) SetAccessLimits(ctx context.Context, r *controlpb.SetAccessLimitsRequest) (*controlpb.AccessRuleList, error) {
	l := r.GetLimits()
	for _, n := range []uint64{l.GetSessions(), l.GetDevices(), l.GetQueueDepth(), l.GetIops(), l.GetIopsBurst(), l.GetBytesPerSecond(), l.GetBytesBurst()} {
		if n > math.MaxInt64 {
			return nil, fmt.Errorf("limit %d is too large: %w", n, syscall.EINVAL)
		}
	}
	err := c.s.SetLimits(int(r.Rule), access.Limits{
		Sessions: int(l.GetSessions()), Devices: int(l.GetDevices()), QueueDepth: int(l.GetQueueDepth()),
		IOPS: int64(l.GetIops()), IOPSBurst: int64(l.GetIopsBurst()), Bytes: int64(l.GetBytesPerSecond()), BytesBurst: int64(l.GetBytesBurst()),
	})
	if err != nil {
		return nil, err
	}
	return c.ListAccess(ctx, nil)
}

func limitsMessage(l *access.Limits) *controlpb.AccessLimits {
	return &controlpb.AccessLimits{
		Sessions: uint64(l.Sessions), Devices: uint64(l.Devices), QueueDepth: uint64(l.QueueDepth),
		Iops: uint64(l.IOPS), IopsBurst: uint64(l.IOPSBurst), BytesPerSecond: uint64(l.Bytes), BytesBurst: uint64(l.BytesBurst),
	}
}

// CheckAccess returns the decision of the rules in force about a client. The
// client need not exist.
func (c *controlAPI) CheckAccess(_ context.Context, r *controlpb.CheckAccessRequest) (*controlpb.AccessDecision, error) {
	mode, ok := blk.ParseAccessMode(r.AccessMode)
	if !ok {
		return nil, fmt.Errorf("%q is no access mode: %w", r.AccessMode, syscall.EINVAL)
	}
	client := access.Client{Identities: r.Identities, Session: r.Session}
	for _, a := range r.Addresses {
		addr, err := netip.ParseAddr(a)
		if err != nil {
			return nil, fmt.Errorf("%q is no IP address: %w", a, syscall.EINVAL)
		}
		client.Paths = append(client.Paths, access.Path{Addr: addr, Fabric: cmp.Or(r.Fabric, "iwarp")})
	}
	rules := c.s.rules.Load()
	d := rules.Decide(client, r.Device, mode)
	reply := &controlpb.AccessDecision{Allowed: d.Allowed, Rule: uint32(d.Rule), Why: d.Why}
	if d.Rule > 0 {
		reply.Text = rules.Text(d.Rule)
	}
	return reply, nil
}
