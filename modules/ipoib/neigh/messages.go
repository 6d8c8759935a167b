package neigh

import (
	"net/netip"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// appendRequest appends a request for e: to all, or to the known address if it is probed.
func (t *Table) appendRequest(e *neighbor, out []Frame) []Frame {
	e.asked++
	src, ok := t.sourceFor(e.IP)
	if !ok {
		return out // the interface has no address of this family, so no answer could come
	}
	if e.IP.Is4() {
		dst := wire.MulticastAddress(t.link.Broadcast())
		if e.State == Probe {
			dst = e.Address
		}
		return append(out, t.arpFrame(dst, wire.ARPFields{Op: wire.ARPRequest, SenderHW: t.local, SenderIP: src, TargetIP: e.IP}))
	}
	f := wire.NDFields{Type: wire.NDNeighborSolicit, Src: src, Dst: wire.SolicitedNode(e.IP), Target: e.IP, LinkLayer: t.local, HasLinkLayer: true}
	if e.State == Probe {
		f.Dst = e.IP
		return append(out, t.ndFrame(e.Address, f))
	}
	return append(out, t.ndFrame(t.groupAddress(f.Dst), f))
}

func (t *Table) arpFrame(dst wire.Address, f wire.ARPFields) Frame {
	return Frame{Dst: dst, Type: wire.TypeARP, Packet: wire.NewARP(f)}
}

func (t *Table) ndFrame(dst wire.Address, f wire.NDFields) Frame {
	return Frame{Dst: dst, Type: wire.TypeIPv6, Packet: wire.NewND(f)}
}

// groupAddress returns the link-layer address of an IPv6 group.
func (t *Table) groupAddress(ip netip.Addr) wire.Address {
	g, err := t.link.Multicast(ip)
	if err != nil {
		panic("neigh: " + err.Error()) // callers pass groups only
	}
	return wire.MulticastAddress(g)
}

// HandleARP handles an ARP packet of the neighbour with the link-layer address
// src. It answers requests for the addresses of the interface.
func (t *Table) HandleARP(now time.Time, src wire.Address, packet []byte, out []Frame) []Frame {
	p := wire.ARP(packet)
	if !p.Valid() || p.Op() != wire.ARPRequest && p.Op() != wire.ARPReply {
		t.stats.Malformed++
		return out
	}
	f := p.Fields()
	switch {
	case !f.SenderHW.ValidUnicast() || !f.SenderHW.SamePort(src):
		t.stats.Spoofed++
		return out
	case f.SenderIP.IsMulticast() || f.SenderIP == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		t.stats.Malformed++
		return out
	case t.ownsAddress(f.SenderIP):
		t.stats.Conflicts++
		return out
	}
	asked := f.Op == wire.ARPRequest && t.ownsAddress(f.TargetIP)
	e := t.entries[f.SenderIP]
	if e == nil && asked && !f.SenderIP.IsUnspecified() { // packets will follow the answer
		e = t.addEntry(now, f.SenderIP)
	}
	if e != nil {
		out = t.learnAddress(now, e, f.SenderHW, f.Op == wire.ARPReply && f.TargetHW.SamePort(t.local), out)
	}
	if asked {
		out = append(out, t.arpFrame(f.SenderHW, wire.ARPFields{Op: wire.ARPReply, SenderHW: t.local, SenderIP: f.TargetIP, TargetHW: f.SenderHW, TargetIP: f.SenderIP}))
	}
	return out
}

// HandleND handles a neighbour solicitation or advertisement of the neighbour
// with the link-layer address src. It answers solicitations for the addresses
// of the interface.
func (t *Table) HandleND(now time.Time, src wire.Address, packet []byte, out []Frame) []Frame {
	p := wire.ND(packet)
	if !p.Valid() {
		t.stats.Malformed++
		return out
	}
	f := p.Fields()
	if f.HasLinkLayer && (!f.LinkLayer.ValidUnicast() || !f.LinkLayer.SamePort(src)) {
		t.stats.Spoofed++
		return out
	}
	if f.Type == wire.NDNeighborAdvert {
		return t.onAdvert(now, f, out)
	}
	if t.ownsAddress(f.Src) {
		t.stats.Conflicts++
		return out
	}
	return t.onSolicit(now, src, f, out)
}

func (t *Table) onAdvert(now time.Time, f wire.NDFields, out []Frame) []Frame {
	if t.ownsAddress(f.Target) {
		t.stats.Conflicts++
		return out
	}
	e := t.entries[f.Target]
	if e == nil || !f.HasLinkLayer && e.State == Incomplete {
		return out
	}
	if !f.HasLinkLayer {
		f.LinkLayer = e.Address
	}
	if e.State != Incomplete && f.Flags&wire.NDOverride == 0 && e.Address != f.LinkLayer {
		return out // RFC 4861, section 7.2.5: the cached address stays
	}
	return t.learnAddress(now, e, f.LinkLayer, f.Flags&wire.NDSolicited != 0, out)
}

func (t *Table) onSolicit(now time.Time, src wire.Address, f wire.NDFields, out []Frame) []Frame {
	if !t.ownsAddress(f.Target) {
		return out
	}
	answer := wire.NDFields{Type: wire.NDNeighborAdvert, Flags: wire.NDOverride, Src: f.Target, Target: f.Target, LinkLayer: t.local, HasLinkLayer: true}
	if f.Src.IsUnspecified() { // duplicate address detection: the answer goes to all
		answer.Dst = netip.IPv6LinkLocalAllNodes()
		return append(out, t.ndFrame(t.groupAddress(answer.Dst), answer))
	}
	if f.HasLinkLayer {
		e := t.entries[f.Src]
		if e == nil {
			e = t.addEntry(now, f.Src)
		}
		out = t.learnAddress(now, e, f.LinkLayer, false, out)
		src = f.LinkLayer
	}
	answer.Dst, answer.Flags = f.Src, wire.NDOverride|wire.NDSolicited
	return append(out, t.ndFrame(src, answer))
}

// Announce appends the announcements of the link-layer address: a gratuitous
// ARP request for each IPv4 address, an unsolicited advertisement for each
// IPv6 address.
func (t *Table) Announce(out []Frame) []Frame {
	for _, p := range t.ips {
		ip := p.Addr()
		if ip.Is4() {
			out = append(out, t.arpFrame(wire.MulticastAddress(t.link.Broadcast()),
				wire.ARPFields{Op: wire.ARPRequest, SenderHW: t.local, SenderIP: ip, TargetIP: ip}))
			continue
		}
		all := netip.IPv6LinkLocalAllNodes()
		out = append(out, t.ndFrame(t.groupAddress(all),
			wire.NDFields{Type: wire.NDNeighborAdvert, Flags: wire.NDOverride, Src: ip, Dst: all, Target: ip, LinkLayer: t.local, HasLinkLayer: true}))
	}
	return out
}
