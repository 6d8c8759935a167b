package dev

import (
	"bytes"
	"net/netip"
	"slices"

	"github.com/rnbd-go/rnbd/modules/bond/announce"
	"github.com/rnbd-go/rnbd/modules/bond/core"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/monitor"
)

// applyEvents carries out events, with the lock held.
func (b *Bond) applyEvents(events []core.Event) {
	for _, e := range events {
		switch e.Kind {
		case core.ActiveChanged:
			b.switchTo(b.findMember(e.Old), b.findMember(e.New))
			b.moved = append(b.moved, addrMoved{e.Old, e.New})
		case core.CarrierChanged:
			if b.upper != nil {
				b.logError("carrier of the bond is not set", b.upper.SetCarrier(e.Up))
			}
		case core.NotifyPeers:
			b.sendFrames(announce.Peers(b.linkLayer(b.active.Load()), b.ownAddrs()))
		case core.RejoinGroups:
			b.sendFrames(announce.Groups(b.linkLayer(b.active.Load()), b.ownAddrs(), b.groupList()))
		case core.Probe:
			b.sendProbes(b.findMember(e.Slave))
		case core.Log:
			b.logEvent(e)
		}
	}
}

func (b *Bond) logEvent(e core.Event) {
	if e.Slave == "" {
		b.log.Info(e.Text)
		return
	}
	b.log.Info(e.Text, "slave", e.Slave)
}

// switchTo makes mb the active slave in place of old; both may be nil. At no
// time do two slaves send or deliver. The bond's address changes when frames can
// be sent already: the users' stack asks for its peers' addresses as soon as its own
// is another one, and does not ask again for a second.
func (b *Bond) switchTo(old, mb *slaveDevice) {
	b.active.Store(nil)
	if old != nil {
		old.setPrefixes(nil)
		b.logError("former active slave keeps its receive filter", old.SetFilter(b.backupFilter()))
		for g := range old.joined {
			b.leaveGroup(old, g)
		}
	}
	if mb == nil {
		return
	}
	b.logError("active slave does not receive", mb.SetFilter(RxAll))
	for _, g := range b.wantedGroups() {
		b.joinGroup(mb, g)
	}
	b.told = b.Prefixes()
	mb.setPrefixes(b.told)
	b.active.Store(mb)
	b.moveAddress(old, mb)
}

// tellPrefixes tells the active slave of new addresses.
func (b *Bond) tellPrefixes() {
	mb := b.active.Load()
	if now := b.Prefixes(); mb != nil && !slices.Equal(now, b.told) {
		b.told = now
		mb.setPrefixes(now)
	}
}

func (mb *slaveDevice) setPrefixes(all []netip.Prefix) {
	if u, ok := mb.Slave.(PrefixUser); ok {
		u.SetPrefixes(all)
	}
}

// backupFilter is the filter of a slave that is not active.
func (b *Bond) backupFilter() RxFilter {
	if b.m.Options().ArpInterval > 0 {
		return RxWatch
	}
	return RxNone
}

// updateFilters follows arp_interval, because with it backups have to listen.
func (b *Bond) updateFilters() {
	active := b.active.Load()
	for _, mb := range b.members {
		if mb != active {
			b.logError("backup keeps its receive filter", mb.SetFilter(b.backupFilter()))
		}
	}
}

// moveAddress is fail_over_mac: none leaves all slaves with the bond's address,
// active gives the bond the address of the slave, follow gives the slave the
// address of the bond.
func (b *Bond) moveAddress(old, mb *slaveDevice) {
	switch b.m.Options().FailOverMAC {
	case core.FailOverMACActive:
		b.attrs.Address = bytes.Clone(mb.Attrs().Address)
		b.logError("bond does not get the address of its active slave", b.upperAddress())
	case core.FailOverMACFollow:
		b.moveGroups(old, mb)
	}
}

func (b *Bond) moveGroups(old, mb *slaveDevice) {
	if old == nil { // none was active: the owner of the address is unknown
		for _, x := range b.members {
			if x != mb && bytes.Equal(x.Attrs().Address, b.attrs.Address) {
				old = x
			}
		}
	}
	if bytes.Equal(mb.Attrs().Address, b.attrs.Address) {
		return
	}
	free := bytes.Clone(mb.Attrs().Address)
	b.logError("active slave does not get the address of the bond", mb.SetAddress(b.attrs.Address))
	if old != nil && !bytes.Equal(old.Attrs().Address, free) {
		b.logError("former active slave keeps the address of the bond", old.SetAddress(free))
	}
}

// wantedGroups are the groups that the active slave has to receive.
func (b *Bond) wantedGroups() []netip.Addr {
	all := []netip.Addr{announce.AllHosts, announce.AllNodes}
	for _, g := range b.groupList() {
		all = append(all, g.Addr)
	}
	return all
}

func (b *Bond) joinGroup(mb *slaveDevice, g netip.Addr) {
	if mb.joined[g] {
		return
	}
	if err := mb.JoinGroup(g); err != nil {
		b.log.Warn("group is not joined", "slave", mb.Name(), "group", g, "err", err)
		return
	}
	mb.joined[g] = true
}

func (b *Bond) leaveGroup(mb *slaveDevice, g netip.Addr) {
	if mb.joined[g] {
		delete(mb.joined, g)
		b.logError("group is not left", mb.LeaveGroup(g))
	}
}

// changeGroups follows the reports of the users' stack.
func (b *Bond) changeGroups(all []frame.Membership) {
	active := b.active.Load()
	for _, ms := range all {
		if ms.Group == announce.AllHosts || ms.Group == announce.AllNodes {
			continue
		}
		if ms.Join {
			b.groups[ms.Group] = ms.Old
		} else {
			delete(b.groups, ms.Group)
		}
		switch {
		case active == nil:
		case ms.Join:
			b.joinGroup(active, ms.Group)
		default:
			b.leaveGroup(active, ms.Group)
		}
	}
}

// linkLayer is the link layer as peers see it: the bond's address on the type of mb.
func (b *Bond) linkLayer(mb *slaveDevice) frame.Link {
	if mb == nil {
		return frame.Link{Type: b.attrs.Type, Address: b.attrs.Address}
	}
	return frame.Link{Type: mb.linkType, Address: mb.Attrs().Address}
}

// sendFrames sends the bond's own frames through the active slave.
func (b *Bond) sendFrames(frames [][]byte) {
	if mb := b.active.Load(); mb != nil {
		b.sendVia(mb, frames)
	}
}

func (b *Bond) sendVia(mb *slaveDevice, frames [][]byte) {
	for _, f := range frames {
		if err := mb.Send(f); err != nil {
			b.log.Debug("frame of the bond is not sent", "slave", mb.Name(), "err", err)
			continue
		}
		b.counters.announced.Add(1)
	}
}

// sendProbes sends the ARP monitor's requests through one slave. The slave need not
// be active.
func (b *Bond) sendProbes(mb *slaveDevice) {
	if mb == nil {
		return
	}
	prefixes := b.Prefixes()
	own := func(target netip.Addr) (src netip.Addr) {
		bits := -1
		for _, p := range prefixes {
			if p.Addr().Is4() && p.Masked().Contains(target) && p.Bits() > bits {
				src, bits = p.Addr(), p.Bits()
			}
		}
		return src
	}
	b.sendVia(mb, monitor.Probes(b.linkLayer(mb), b.m.Options().ArpTargets, own))
}
