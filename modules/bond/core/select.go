package core

import (
	"syscall"
	"time"
)

// bestSlave returns the slave that should be active, nil if none can be: the primary
// as primary_reselect has it, the active one while its link is up, the first
// one with a link that is up, the one with the first updelay to end.
func (m *Machine) bestSlave(now time.Time) *Slave {
	if s := m.primaryOrActive(); s != nil {
		return s
	}
	var soonest *Slave
	limit := now.Add(m.opt.Updelay() + 1)
	for _, s := range m.slaves {
		switch {
		case s.Link == Up:
			return s
		case s.Link == Back && s.Carrier && m.opt.Miimon > 0 && s.deadline.Before(limit):
			soonest, limit = s, s.deadline
		}
	}
	return soonest
}

func (m *Machine) primaryOrActive() *Slave {
	prim, act := m.primary, m.active
	if act != nil && (act.Link != Up || m.findSlave(act.Name) == nil) {
		act = nil
	}
	if prim == nil || prim.Link != Up {
		return act
	}
	if m.force {
		m.force = false
		return prim
	}
	if act == nil || m.opt.PrimaryReselect == ReselectAlways {
		return prim
	}
	if m.opt.PrimaryReselect == ReselectBetter && prim.betterThan(act) {
		return prim
	}
	return act
}

func (s *Slave) betterThan(o *Slave) bool {
	if s.Speed != o.Speed {
		return s.Speed > o.Speed
	}
	return s.FullDuplex && !o.FullDuplex
}

// selectActive makes the best slave the active one.
func (m *Machine) selectActive(now time.Time) {
	best := m.bestSlave(now)
	if best == m.active {
		return
	}
	m.changeActive(best, now)
	m.updateCarrier()
	if m.carrier {
		m.log(nil, "active interface up!")
	} else {
		m.log(nil, "now running without any active interface!")
	}
}

// changeActive makes s the active slave; s may be nil.
func (m *Machine) changeActive(s *Slave, now time.Time) {
	if s == m.active {
		return
	}
	old := m.active
	m.active = s
	if s != nil {
		s.lastUp = now
		m.probing = nil
		if s.Link == Back {
			m.log(s, "making interface the new active one %d ms earlier", s.deadline.Sub(now).Milliseconds())
			m.setLink(s, Up)
		} else {
			m.log(s, "making interface the new active one")
		}
	}
	m.addEvent(Event{Kind: ActiveChanged, Old: nameOf(old), New: nameOf(s)})
	if m.up {
		m.notify = repeatTimer{left: m.opt.NumPeerNotif, due: now}
		m.rejoin = repeatTimer{left: m.opt.ResendIGMP, due: now}
	}
}

// SetActive makes the named slave active by hand; "" gives up the active slave
// and selects the best one. A slave with a link that is not up is EINVAL.
func (m *Machine) SetActive(name string, now time.Time) error {
	if name == "" {
		m.log(nil, "Clearing current active slave")
		m.changeActive(nil, now)
		m.selectActive(now)
		m.announceIfUp(now)
		return nil
	}
	s := m.findSlave(name)
	switch {
	case s == nil:
		return Errorf(syscall.EINVAL, "Device is not our slave")
	case s == m.active:
		return nil
	case m.active == nil || s.Link != Up || !s.Carrier:
		return Errorf(syscall.EINVAL, "Could not set %s as active slave; either %s is down or the link is down", name, name)
	}
	m.log(s, "Setting as active slave")
	m.changeActive(s, now)
	m.announceIfUp(now)
	return nil
}

func (m *Machine) announceIfUp(now time.Time) {
	if m.up {
		m.announceAddresses(now)
	}
}

// setPrimary records the name of the primary slave. The slave may be enslaved
// later.
func (m *Machine) setPrimary(name string, now time.Time) error {
	if len(name) > MaxName {
		return Errorf(syscall.EINVAL, "option primary: invalid value (%s)", name)
	}
	m.opt.Primary = name
	m.primary = m.findSlave(name)
	switch {
	case name == "":
		m.log(nil, "Setting primary slave to None")
	case m.primary != nil:
		m.log(m.primary, "Setting as primary slave")
		m.force = true
	default:
		m.log(nil, "Recording %s as primary, but it has not been enslaved yet", name)
	}
	m.selectActive(now)
	m.announceIfUp(now)
	return nil
}

// MaxName is the length of the longest name of an interface.
const MaxName = 15
