package core

import (
	"fmt"
	"slices"
	"time"
)

// Link is the state of a slave's link.
type Link uint8

// The states of a link. Fail and Back are the times of downdelay and updelay.
const (
	Up   Link = iota // carries traffic
	Fail             // the carrier is lost, downdelay runs
	Down             // does not carry traffic
	Back             // the carrier is back, updelay runs
)

// String returns the words of /proc/net/bonding.
func (l Link) String() string {
	return [...]string{"up", "going down", "down", "going back"}[l]
}

// Slave is the machine's record of a slave. Slaves returns copies.
type Slave struct {
	Name       string
	Carrier    bool
	Speed      int // Mbit/s; 0: unknown
	FullDuplex bool
	Link       Link
	Failures   uint32 // times that the link went down

	deadline time.Time // of Fail and Back
	lastUp   time.Time // enslaved or made active
	lastRx   time.Time // a frame that counts as a sign of life
	lastTx   time.Time // a probe
	targetRx []time.Time
}

// Machine is the state of one bond.
type Machine struct {
	opt     Options
	slaves  []*Slave // in the order of enslaving
	active  *Slave
	primary *Slave
	probing *Slave // no slave is active: the one that sends ARP probes
	force   bool   // the primary was just named: it is taken once, whatever primary_reselect says
	up      bool
	carrier bool
	nextMII time.Time
	nextARP time.Time
	notify  repeatTimer
	rejoin  repeatTimer
	events  []Event
}

// repeatTimer is something to be done left times more, at due for the next time.
type repeatTimer struct {
	left int
	due  time.Time
}

// New returns a bond without slaves, with Linux's defaults, that is down.
func New() *Machine { return &Machine{opt: Defaults()} }

// EventKind is the kind of an Event.
type EventKind uint8

// The kinds of events, and the fields of Event that they use.
const (
	ActiveChanged  EventKind = iota // Old, New
	LinkChanged                     // Slave, Link
	CarrierChanged                  // Up
	NotifyPeers                     // gratuitous ARP and unsolicited NA are due
	RejoinGroups                    // IGMP and MLD reports are due
	Probe                           // Slave: ARP probes to all targets are due
	Log                             // Slave, Text
)

// Event is something that the owner of the machine has to do or to tell.
// Names of slaves are empty where there is none.
type Event struct {
	Kind     EventKind
	Old, New string
	Slave    string
	Link     Link
	Up       bool
	Text     string
}

// Events returns the events since the last call.
func (m *Machine) Events() []Event {
	e := m.events
	m.events = nil
	return e
}

func (m *Machine) addEvent(e Event) { m.events = append(m.events, e) }

func (m *Machine) log(s *Slave, format string, args ...any) {
	name := ""
	if s != nil {
		name = s.Name
	}
	m.addEvent(Event{Kind: Log, Slave: name, Text: fmt.Sprintf(format, args...)})
}

// Active returns the name of the active slave, "" if there is none.
func (m *Machine) Active() string { return nameOf(m.active) }

// Primary returns the name of the primary slave, "" if it is not enslaved.
func (m *Machine) Primary() string { return nameOf(m.primary) }

// Probing returns the name of the slave that the ARP monitor probes while no
// slave is active.
func (m *Machine) Probing() string { return nameOf(m.probing) }

// Carrier reports whether a slave's link is up.
func (m *Machine) Carrier() bool { return m.carrier }

// IsUp reports whether the bond is up.
func (m *Machine) IsUp() bool { return m.up }

func nameOf(s *Slave) string {
	if s == nil {
		return ""
	}
	return s.Name
}

// Slaves returns copies of all slaves, in the order of enslaving.
func (m *Machine) Slaves() []Slave {
	var all []Slave
	for _, s := range m.slaves {
		all = append(all, *s)
	}
	return all
}

// Slave returns a copy of the named slave.
func (m *Machine) Slave(name string) (Slave, bool) {
	if s := m.findSlave(name); s != nil {
		return *s, true
	}
	return Slave{}, false
}

func (m *Machine) findSlave(name string) *Slave {
	for _, s := range m.slaves {
		if s.Name == name {
			return s
		}
	}
	return nil
}

// SetUp brings the bond up or down. Monitors run, and peers are told of a
// fail-over, only while it is up.
func (m *Machine) SetUp(up bool, now time.Time) {
	m.up = up
	m.nextMII, m.nextARP = now, now
	m.notify, m.rejoin = repeatTimer{}, repeatTimer{}
}

// Add enslaves s with its Name, Carrier, Speed and FullDuplex. The name must
// be new.
func (m *Machine) Add(s Slave, now time.Time) {
	n := &Slave{Name: s.Name, Carrier: s.Carrier, Speed: s.Speed, FullDuplex: s.FullDuplex, lastUp: now,
		lastRx: now.Add(-m.opt.ArpInterval - time.Millisecond)}
	n.targetRx = filledTimes(len(m.opt.ArpTargets), n.lastRx)
	switch {
	case m.opt.Miimon > 0 && n.Carrier && m.opt.Updelay() > 0:
		n.Link, n.deadline = Back, now.Add(m.opt.Updelay())
	case (m.opt.Miimon > 0 || m.opt.ArpInterval > 0) && !n.Carrier:
		n.Link = Down
	}
	m.slaves = append(m.slaves, n)
	if m.opt.Primary == n.Name {
		m.primary, m.force = n, true
	}
	m.updateCarrier()
	m.selectActive(now)
	kind, link := "a backup", "a down"
	if m.active == n {
		kind = "an active"
	}
	if n.Link != Down {
		link = "an up"
	}
	m.log(n, "Enslaving as %s interface with %s link", kind, link)
}

func filledTimes(n int, t time.Time) []time.Time {
	return slices.Repeat([]time.Time{t}, n)
}

// Remove releases a slave and selects another one if it was active. It reports
// whether there was such a slave.
func (m *Machine) Remove(name string, now time.Time) bool {
	s := m.findSlave(name)
	if s == nil {
		return false
	}
	kind := "backup"
	if m.active == s {
		kind = "active"
	}
	m.log(s, "Releasing %s interface", kind)
	m.slaves = slices.DeleteFunc(m.slaves, func(x *Slave) bool { return x == s })
	if m.primary == s {
		m.primary = nil
	}
	if m.probing == s {
		m.probing = nil
	}
	if m.active == s {
		if m.changeActive(m.bestSlave(now), now); m.active == nil {
			m.log(nil, "now running without any active interface!")
		}
	}
	m.updateCarrier()
	return true
}

// SetCarrier reports a slave's carrier. Its consequences are those of the next
// Poll.
func (m *Machine) SetCarrier(name string, carrier bool) {
	if s := m.findSlave(name); s != nil {
		s.Carrier = carrier
	}
}

// SetSpeed reports a slave's speed in Mbit/s, 0 if it is unknown, and its duplex.
func (m *Machine) SetSpeed(name string, mbps int, full bool) {
	if s := m.findSlave(name); s != nil {
		s.Speed, s.FullDuplex = mbps, full
	}
}

// Poll does everything that is due at now: the MII monitor's look at the
// carriers, the ARP monitor's round, notifications. It may be called at any
// time.
func (m *Machine) Poll(now time.Time) {
	if !m.up {
		return
	}
	if m.opt.Miimon > 0 {
		m.inspectMII(now)
		if !now.Before(m.nextMII) {
			m.nextMII = now.Add(m.opt.Miimon)
		}
	}
	if m.opt.ArpInterval > 0 && !now.Before(m.nextARP) {
		m.nextARP = now.Add(m.opt.ArpInterval)
		m.roundARP(now)
	}
	m.announceAddresses(now)
}

// igmpPause is the time between reports of groups (resend_igmp).
const igmpPause = 200 * time.Millisecond

func (m *Machine) announceAddresses(now time.Time) {
	if m.notify.isDue(now) && m.active != nil && m.carrier {
		m.notify.scheduleNext(now, max(m.opt.monitorInterval(), m.opt.PeerNotifDelay()))
		m.addEvent(Event{Kind: NotifyPeers})
	}
	if m.rejoin.isDue(now) && m.active != nil {
		m.rejoin.scheduleNext(now, igmpPause)
		m.addEvent(Event{Kind: RejoinGroups})
	}
}

func (r *repeatTimer) isDue(now time.Time) bool { return r.left > 0 && !now.Before(r.due) }

func (r *repeatTimer) scheduleNext(now time.Time, pause time.Duration) {
	r.left--
	r.due = now.Add(pause)
}

// Next returns when Poll has something to do; ok is false if nothing will
// happen by itself.
func (m *Machine) Next() (at time.Time, ok bool) {
	if !m.up {
		return time.Time{}, false
	}
	earlier := func(t time.Time) {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if m.opt.Miimon > 0 {
		earlier(m.nextMII)
		for _, s := range m.slaves {
			if s.Link == Fail || s.Link == Back {
				earlier(s.deadline)
			}
		}
	}
	if m.opt.ArpInterval > 0 {
		earlier(m.nextARP)
	}
	if m.active != nil && m.notify.left > 0 && m.carrier {
		earlier(m.notify.due)
	}
	if m.active != nil && m.rejoin.left > 0 {
		earlier(m.rejoin.due)
	}
	return at, ok
}

func (m *Machine) setLink(s *Slave, l Link) {
	if s.Link == l {
		return
	}
	s.Link = l
	m.addEvent(Event{Kind: LinkChanged, Slave: s.Name, Link: l})
}

// onLinkDown is the end of a link.
func (m *Machine) onLinkDown(s *Slave) {
	s.Failures++
	m.setLink(s, Down)
	m.log(s, "link status definitely down, disabling slave")
}

func (m *Machine) updateCarrier() {
	up := slices.ContainsFunc(m.slaves, func(s *Slave) bool { return s.Link == Up })
	if up != m.carrier {
		m.carrier = up
		m.addEvent(Event{Kind: CarrierChanged, Up: up})
	}
}
