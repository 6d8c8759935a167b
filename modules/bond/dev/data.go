// DATA PATH: transmit takes a frame from the upper side to the active slave;
// received takes one from a slave to the upper side. Both read the active slave
// once and lock nothing. Reports for the monitor go into a channel without
// waiting: a report that finds it full is lost, as a frame can be.

package dev

import (
	"encoding/binary"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/monitor"
)

// onUserFrame is called by the upper side for each frame of a user.
func (b *Bond) onUserFrame(f []byte) {
	mb := b.active.Load()
	if b.up.Load() {
		b.snoopReports(f)
	}
	if mb == nil || !b.up.Load() {
		b.counters.txDropped.Add(1)
		return
	}
	if err := mb.Send(f); err != nil {
		b.counters.txDropped.Add(1)
		return
	}
	b.counters.tx.Add(1)
}

// snoopReports looks for reports of multicast groups, because the active slave has
// to receive these groups. Other frames cost two comparisons.
func (b *Bond) snoopReports(f []byte) {
	n, linkType := 14, uint16(frame.Ethernet)
	if b.infiniBand.Load() {
		n, linkType = 4, frame.InfiniBand
	}
	if len(f) < n+40 && !mayBeIGMP(f, n) {
		return
	}
	if !mayBeIGMP(f, n) && f[n+6] != 0 { // IPv6: hop-by-hop options come first
		return
	}
	etherType, p, _ := frame.Split(linkType, f)
	if ms := frame.Reports(etherType, p); len(ms) > 0 {
		b.postReport(groupReport{groups: ms})
		b.wakeMonitor()
	}
}

// mayBeIGMP reports whether f can be IGMP; n is the length of its link header.
func mayBeIGMP(f []byte, n int) bool {
	return len(f) >= n+20 && f[n]>>4 == 4 && f[n+9] == 2
}

// onFrame is called by a slave for each frame from its link.
func (mb *slaveDevice) onFrame(f []byte) {
	b := mb.bond
	if b.listening.Load() {
		mb.observeFrame(f)
	}
	if b.active.Load() != mb || !b.up.Load() || b.upper == nil {
		b.counters.rxDropped.Add(1)
		return
	}
	if err := b.upper.Deliver(f); err != nil {
		b.counters.rxDropped.Add(1)
		return
	}
	b.counters.rx.Add(1)
}

// observeFrame tells the ARP monitor of a sign of life. Frames other than ARP are
// told of at most each millisecond.
func (mb *slaveDevice) observeFrame(f []byte) {
	now := time.Now()
	n := frame.HeaderLen(mb.linkType)
	arp := len(f) >= n && frameType(mb.linkType, f) == frame.TypeARP
	if !arp && now.UnixMilli() == mb.lastSeen.Swap(now.UnixMilli()) {
		return
	}
	if s, ok := monitor.See(mb.linkType, f, now); ok {
		mb.bond.postReport(groupReport{slave: mb.Name(), seen: s})
	}
}

func frameType(linkType uint16, f []byte) uint16 {
	if linkType == frame.InfiniBand {
		return binary.BigEndian.Uint16(f)
	}
	return binary.BigEndian.Uint16(f[12:])
}

func (b *Bond) postReport(r groupReport) {
	select {
	case b.reports <- r:
	default:
	}
}
