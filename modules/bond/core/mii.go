package core

import "time"

// inspectMII moves every link to where its carrier and the time have it, and
// selects an active slave if that can change the choice.
func (m *Machine) inspectMII(now time.Time) {
	ignoreUpdelay := m.active == nil
	selectAgain := false
	for _, s := range m.slaves {
		was := s.Link
		m.stepMII(s, &ignoreUpdelay, now)
		if s.Link == was {
			continue
		}
		switch s.Link {
		case Up:
			selectAgain = selectAgain || m.active == nil || s == m.primary
		case Down:
			selectAgain = selectAgain || s == m.active
		}
	}
	m.updateCarrier()
	if selectAgain {
		m.selectActive(now)
	}
}

func (m *Machine) stepMII(s *Slave, ignoreUpdelay *bool, now time.Time) {
	if s.Link == Up && !s.Carrier {
		s.deadline = now.Add(m.opt.Downdelay())
		m.setLink(s, Fail)
		if m.opt.downdelay > 0 {
			m.log(s, "link status down for %sinterface, disabling it in %d ms", m.slaveRole(s), m.opt.Downdelay().Milliseconds())
		}
	}
	if s.Link == Down && s.Carrier {
		s.deadline = now.Add(m.opt.Updelay())
		m.setLink(s, Back)
		if m.opt.updelay > 0 && !*ignoreUpdelay {
			m.log(s, "link status up, enabling it in %d ms", m.opt.Updelay().Milliseconds())
		}
	}
	switch {
	case s.Link == Fail && s.Carrier:
		s.lastUp = now
		m.setLink(s, Up)
		m.log(s, "link status up again after %d ms", (m.opt.Downdelay() - s.deadline.Sub(now)).Milliseconds())
	case s.Link == Fail && !now.Before(s.deadline):
		m.onLinkDown(s)
	case s.Link == Back && !s.Carrier:
		m.setLink(s, Down)
		m.log(s, "link status down again after %d ms", (m.opt.Updelay() - s.deadline.Sub(now)).Milliseconds())
	case s.Link == Back && (*ignoreUpdelay || !now.Before(s.deadline)):
		*ignoreUpdelay = false
		s.lastUp = now
		m.setLink(s, Up)
		m.log(s, "link status definitely up, %d Mbps %s duplex", s.Speed, duplexName(s.FullDuplex))
	}
}

func (m *Machine) slaveRole(s *Slave) string {
	if s == m.active {
		return "active "
	}
	return "backup "
}

func duplexName(full bool) string {
	if full {
		return "full"
	}
	return "half"
}
