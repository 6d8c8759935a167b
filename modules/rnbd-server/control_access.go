package server

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/netip"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
)

// Access rules while the server runs: they are replaced, listed, tried.

// SetAccess replaces the rules. nil allows everything. After grace, open
// devices that the rules do not allow are closed by force, unless newer rules
// allow them by then. SetAccess does not wait for that.
func (s *Server) SetAccess(rules *access.Rules, grace time.Duration) {
	if old := s.setRules(rules); old.Len() > 0 && rules.Len() == 0 {
		s.log.Warn("there are no access rules any more: every client may open every device")
	}
	s.cfg.Audit.Add(audit.Record{Event: audit.EventRules, Result: audit.OK, Reason: fmt.Sprintf("%d rules", rules.Len())})
	s.cfg.Journal.Add(journal.Event{Kind: journal.Config, To: fmt.Sprintf("%d access rules", rules.Len())})
	late := s.forbiddenMappings()
	for _, m := range late {
		s.log.Warn("open device is not allowed any more, it is closed after the grace time", "session", m.session.name, "device", m.name, "pause", grace, "err", s.checkAllowed(m.session, m.name, m.mode))
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

func (s *Server) closeForbidden() {
	for _, m := range s.forbiddenMappings() {
		s.log.Warn("device is closed: its client is not allowed to have it open any more", "session", m.session.name, "device", m.name)
		go s.forceClose(m, "the access rules have changed") // each waits for its own requests
	}
}

// ListAccess lists the rules in force.
func (c *controlAPI) ListAccess(context.Context, *controlpb.ListRequest) (*controlpb.AccessRuleList, error) {
	rules, shares := c.s.ruleUses()
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
