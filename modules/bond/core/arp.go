package core

import (
	"net/netip"
	"slices"
	"time"
)

// roundARP is one round of the ARP monitor: links are judged by the received
// frames, then a probe is sent.
func (m *Machine) roundARP(now time.Time) {
	selectAgain := false
	for _, s := range m.slaves {
		was := s.Link
		m.stepARP(s, now)
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
	m.sendProbes(now)
}

func (m *Machine) stepARP(s *Slave, now time.Time) {
	rx := m.lastRx(s)
	if s.Link != Up {
		switch {
		case m.withinIntervals(rx, 1, now):
			m.setLink(s, Up)
			if s == m.probing {
				m.probing = nil
			}
			m.log(s, "link status definitely up")
		case s.Link == Back:
			m.setLink(s, Fail) // probed in the last round, without an answer
		}
		return
	}
	if m.withinIntervals(s.lastUp, 2, now) { // enslaved or made active just now
		return
	}
	missed := m.opt.MissedMax
	switch {
	case s == m.active:
		if !m.withinIntervals(s.lastTx, missed, now) || !m.withinIntervals(rx, missed, now) {
			m.onLinkDown(s)
		}
	case m.probing == nil && !m.withinIntervals(rx, missed+1, now):
		m.onLinkDown(s)
	}
}

// sendProbes sends through the active slave; without one, through each slave that
// has a carrier in turn.
func (m *Machine) sendProbes(now time.Time) {
	if m.active != nil {
		m.emitProbe(m.active, now)
		return
	}
	next := m.nextToProbe()
	if next == nil {
		m.probing = nil
		return
	}
	m.probing = next
	if next.Link != Back {
		m.setLink(next, Back)
	}
	next.lastUp = now
	m.emitProbe(next, now)
}

func (m *Machine) nextToProbe() *Slave {
	from := 0
	if m.probing != nil {
		from = slices.Index(m.slaves, m.probing) + 1
	}
	for i := range m.slaves {
		if s := m.slaves[(from+i)%len(m.slaves)]; s.Carrier {
			return s
		}
	}
	return nil
}

func (m *Machine) emitProbe(s *Slave, now time.Time) {
	s.lastTx = now
	m.addEvent(Event{Kind: Probe, Slave: s.Name})
}

// withinIntervals reports whether now is at most n intervals and a half after t.
func (m *Machine) withinIntervals(t time.Time, n int, now time.Time) bool {
	d := m.opt.ArpInterval
	return !now.Before(t.Add(-d)) && !now.After(t.Add(time.Duration(n)*d+d/2))
}

// lastRx is the time of the last sign of life that counts.
func (m *Machine) lastRx(s *Slave) time.Time {
	if !m.opt.ArpAllTargets || len(s.targetRx) == 0 || !m.validates(s) {
		return s.lastRx
	}
	return slices.MinFunc(s.targetRx, time.Time.Compare)
}

// validates reports whether arp_validate asks to check the frames that s
// receives.
func (m *Machine) validates(s *Slave) bool {
	if s == m.active || s == m.probing {
		return m.opt.ArpValidate.checksActive()
	}
	return m.opt.ArpValidate.checksBackups()
}

// Seen is a frame that a slave received.
type Seen struct {
	At    time.Time
	ARP   bool       // it is ARP; the fields below are valid then
	Reply bool       // else a request
	SPA   netip.Addr // sender's protocol address
	TPA   netip.Addr // target's protocol address
}

// Received reports a frame to the ARP monitor. The monitor decides whether it
// is a sign of life of the named slave's link. own reports whether an address
// is one of the bond's.
func (m *Machine) Received(name string, f Seen, own func(netip.Addr) bool) {
	s := m.findSlave(name)
	if s == nil || m.opt.ArpInterval <= 0 {
		return
	}
	if !m.validates(s) {
		if f.ARP || !m.opt.ArpValidate.filtersFrames() {
			s.lastRx = f.At
		}
		return
	}
	if !f.ARP {
		return
	}
	switch {
	case s == m.active || s == m.probing && f.Reply && m.withinIntervals(s.lastTx, 1, f.At):
		m.confirmFrame(s, f.SPA, f.TPA, f.At, own)
	case m.active != nil && m.lastRx(m.active).After(m.active.lastUp):
		// A backup sees the active slave's broadcast probe. Its sender is the
		// bond and its target is the target.
		m.confirmFrame(s, f.TPA, f.SPA, f.At, own)
	}
}

// confirmFrame takes an ARP frame between target and the bond's own address as a sign of life.
func (m *Machine) confirmFrame(s *Slave, target, mine netip.Addr, at time.Time, own func(netip.Addr) bool) {
	i := slices.Index(m.opt.ArpTargets, target)
	if i < 0 || !own(mine) {
		return
	}
	s.lastRx = at
	if i < len(s.targetRx) {
		s.targetRx[i] = at
	}
}
