package server

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func newRuleSet(rules *access.Rules) *ruleSet {
	set := &ruleSet{Rules: rules, budgets: make([]*budget, rules.Len())}
	for i := range set.budgets {
		b := &budget{sessions: map[*session]int{}}
		b.pace.Store(newPace(rules.Limits(i + 1)))
		set.budgets[i] = b
	}
	return set
}

// decidingRule returns the number of the rule that decides about an open device. It is 0
// if there is none.
func (s *Server) decidingRule(set *ruleSet, m *mapping) (number int) {
	if set.Len() == 0 || m.private {
		return 0
	}
	return set.Decide(m.session.admittedClient(), m.name, m.mode).Rule
}

// takeShare counts an open device against the limits of the rule that allows it. EMFILE:
// they are reached.
func (s *Server) takeShare(m *mapping) error {
	s.sharesMu.Lock()
	defer s.sharesMu.Unlock()
	set := s.rules.Load()
	n := s.decidingRule(set, m)
	if n == 0 || m.share != nil || m.closed.Load() {
		return nil
	}
	b := set.budgets[n-1]
	switch l := b.pace.Load(); {
	case l.Devices > 0 && b.devices >= l.Devices:
		return fmt.Errorf("rule %d allows %d open devices, and they are open: %w", n, l.Devices, syscall.EMFILE)
	case l.Sessions > 0 && b.sessions[m.session] == 0 && len(b.sessions) >= l.Sessions:
		return fmt.Errorf("rule %d allows devices to %d sessions, and they have some: %w", n, l.Sessions, syscall.EMFILE)
	}
	b.addMapping(m)
	return nil
}

// giveShare takes a device that is closed out of its rule's counts.
func (s *Server) giveShare(m *mapping) {
	s.sharesMu.Lock()
	defer s.sharesMu.Unlock()
	if m.share != nil {
		m.share.removeMapping(m)
	}
}

// addMapping counts m. Server.sharesMu is held.
func (b *budget) addMapping(m *mapping) {
	m.share = b
	b.devices++
	b.sessions[m.session]++
	b.applyTo(m)
}

// applyTo gives the pumps the budget of m if it holds up requests.
func (b *budget) applyTo(m *mapping) {
	if b.pace.Load().Paces() {
		m.budget.Store(b)
	} else {
		m.budget.Store(nil)
	}
}

func (b *budget) removeMapping(m *mapping) {
	m.share = nil
	b.devices--
	if b.sessions[m.session]--; b.sessions[m.session] == 0 {
		delete(b.sessions, m.session)
	}
}

// setRules puts rules in force and moves the open devices to their budgets. Devices
// that are beyond a limit stay open. A device without a rule keeps its budget
// until it is closed.
func (s *Server) setRules(rules *access.Rules) (old *ruleSet) {
	s.sharesMu.Lock()
	defer s.sharesMu.Unlock()
	set := newRuleSet(rules)
	old = s.rules.Swap(set)
	s.eachMapping(func(m *mapping) {
		n := s.decidingRule(set, m)
		if n == 0 && set.Len() > 0 {
			return
		}
		if m.share != nil {
			m.share.removeMapping(m)
		}
		m.budget.Store(nil)
		if n > 0 {
			set.budgets[n-1].addMapping(m)
		}
	})
	s.wakePumps()
	return old
}

// eachMapping calls f for all open devices.
func (s *Server) eachMapping(f func(*mapping)) {
	for i := range s.sessions {
		if sess := s.sessions[i].Load(); sess != nil {
			for _, m := range sess.openMappings() {
				f(m)
			}
		}
	}
}

// wakePumps has all pumps look at their waiting requests.
func (s *Server) wakePumps() {
	for _, p := range s.pumps {
		p.pump.Do(func() {})
	}
}

// SetLimits changes the limits of a rule, by its number from 1, until the rules are
// set again. Devices that are open beyond a limit stay open. ENOENT: there is no such
// rule.
func (s *Server) SetLimits(rule int, l access.Limits) error {
	if _, err := l.Check(); err != nil {
		return fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	s.sharesMu.Lock()
	defer s.sharesMu.Unlock()
	set := s.rules.Load()
	if rule < 1 || rule > set.Len() {
		return fmt.Errorf("there is no access rule %d, there are %d: %w", rule, set.Len(), syscall.ENOENT)
	}
	b := set.budgets[rule-1]
	b.pace.Store(newPace(l))
	s.eachMapping(func(m *mapping) {
		if m.share == b {
			b.applyTo(m)
		}
	})
	s.wakePumps()
	return nil
}

// ruleUse describes the use of a rule.
type ruleUse struct {
	access.Limits
	OpenSessions, OpenDevices, Queued int
	Waited                            uint64 // requests that had to wait, since the rules were set
}

// ruleUses returns the rules and the use of each.
func (s *Server) ruleUses() (rules *access.Rules, list []ruleUse) {
	s.sharesMu.Lock()
	defer s.sharesMu.Unlock()
	set := s.rules.Load()
	for _, b := range set.budgets {
		list = append(list, ruleUse{b.pace.Load().Limits, len(b.sessions), b.devices, int(b.queued.Load()), b.waited.Load()})
	}
	return set.Rules, list
}

// describeShare adds the rule of an open device, and the limits that hold it up.
func (s *Server) describeShare(m *mapping, u *controlpb.ServerDeviceUse) {
	s.sharesMu.Lock()
	defer s.sharesMu.Unlock()
	u.Rule = uint32(slices.Index(s.rules.Load().budgets, m.share) + 1)
	if b := m.budget.Load(); b != nil {
		u.Limits = limitsMessage(&b.pace.Load().Limits)
	}
}

func limitsMessage(l *access.Limits) *controlpb.AccessLimits {
	return &controlpb.AccessLimits{
		Sessions: uint64(l.Sessions), Devices: uint64(l.Devices), QueueDepth: uint64(l.QueueDepth),
		Iops: uint64(l.IOPS), IopsBurst: uint64(l.IOPSBurst), BytesPerSecond: uint64(l.Bytes), BytesBurst: uint64(l.BytesBurst),
	}
}
