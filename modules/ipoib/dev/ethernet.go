package dev

import (
	"net/netip"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/ether"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// An interface with Config.Ethernet leaves ARP and neighbour discovery to the
// kernel and translates them. A frame of the kernel names its next hop by the
// Ethernet address that package ether has made for it.

// router is the sender of answers to packets that were too big. No device has it.
var router = ether.MAC{2, 0, 0, 0, 0, 1}

// fromEthernet sends a frame of the kernel. b is the kernel's header and the
// frame. i.mu is held.
func (i *Interface) fromEthernet(now time.Time, b []byte, out *sendBatch) {
	const head = tun.HeaderLen + ether.HeaderLen
	if len(b) <= head {
		i.counters.txDropped.Add(1)
		return
	}
	h, e, p := tun.Header(b), ether.Header(b[tun.HeaderLen:]), b[head:]
	to, ok := i.frameTarget(e, p)
	if !ok {
		i.counters.txDropped.Add(1)
		if !e.Dst().IsGroup() {
			i.askFor(now, e.Type(), p, out)
		}
		return
	}
	switch h.GSOType() {
	case tun.GSOTCPv4, tun.GSOTCPv6:
		if to.IsMulticast() || !i.eachSegment(h.GSOSize(), e.Type(), p, out, func(frame []byte) { out.addFrame(to, frame) }) {
			i.counters.txDropped.Add(1)
		}
		return
	}
	if h.GSOType() != tun.GSONone || h.NeedsChecksum() && !i.finishChecksum(h, e) {
		i.counters.txDropped.Add(1)
		return
	}
	frame := b[head-wire.EncapLen:] // over the end of the Ethernet header
	if e.Type() == wire.TypeARP || e.Type() == wire.TypeIPv6 && wire.NDType(p) != 0 {
		if frame, ok = i.translateFrame(e.Type(), p); !ok {
			i.counters.txDropped.Add(1)
			return
		}
	} else {
		wire.PutEncap(frame, e.Type())
	}
	if to.IsMulticast() {
		i.snoopGroups(now, wire.Frame(frame).Type(), p)
		i.sendMulticast(now, to.GID(), frame, out)
		return
	}
	out.addFrame(to, frame)
}

// frameTarget returns the link-layer address that a frame of the kernel goes to. ok
// is false if it cannot be sent. i.mu is held.
func (i *Interface) frameTarget(e ether.Header, p []byte) (to wire.Address, ok bool) {
	ip, isIP := wire.Destination(e.Type(), p)
	if !isIP && e.Type() != wire.TypeARP {
		return to, false
	}
	switch dst := e.Dst(); {
	case dst == ether.Broadcast:
		return i.Broadcast(), true
	case !dst.IsGroup():
		return i.ether.Address(dst)
	}
	mgid, err := i.link.Multicast(ip)
	return wire.MulticastAddress(mgid), isIP && err == nil
}

// askFor asks who has the destination of an IP packet whose Ethernet address is
// of no known neighbour. The kernel may have that address of an earlier
// interface, for instance in a bond, and its own next requests go there, too. The
// answer names the neighbour for the packets that follow. i.mu is held.
func (i *Interface) askFor(now time.Time, etherType uint16, p []byte, out *sendBatch) {
	dst, ok := wire.Destination(etherType, p)
	if !ok || dst.IsMulticast() || now.Sub(i.asked) < askInterval {
		return
	}
	i.asked = now
	if etherType == wire.TypeIPv4 {
		q := wire.NewARP(wire.ARPFields{Op: wire.ARPRequest, SenderHW: i.Address(), SenderIP: netip.AddrFrom4([4]byte(p[12:])), TargetIP: dst})
		i.sendMulticast(now, i.link.Broadcast(), wire.AppendFrame(nil, wire.TypeARP, q), out)
		return
	}
	group := wire.SolicitedNode(dst)
	if mgid, err := i.link.Multicast(group); err == nil {
		q := wire.NewND(wire.NDFields{Type: wire.NDNeighborSolicit, Src: netip.AddrFrom16([16]byte(p[8:])), Dst: group, Target: dst, LinkLayer: i.Address(), HasLinkLayer: true})
		i.sendMulticast(now, mgid, wire.AppendFrame(nil, wire.TypeIPv6, q), out)
	}
}

// askInterval is the shortest time between two requests of askFor.
const askInterval = 100 * time.Millisecond

// translateFrame returns the frame of an ARP packet or a neighbour discovery packet
// of the kernel. i.mu is held.
func (i *Interface) translateFrame(etherType uint16, p []byte) (frame []byte, ok bool) {
	if etherType == wire.TypeARP {
		p, ok = i.ether.ARPToLink(p)
	} else {
		p, ok = i.ether.NDToLink(p)
	}
	return wire.AppendFrame(nil, etherType, p), ok
}

// intoEthernet gives a received frame of src to the address to its Ethernet
// header. b is i.spare bytes and the frame. i.mu is held.
func (i *Interface) intoEthernet(src, to wire.Address, b []byte) (v frameVerdict, packet []byte) {
	frame := wire.Frame(b[i.spare:])
	kind, p := frame.Type(), frame.Payload()
	ip, isIP := wire.Destination(kind, p)
	ok := isIP
	switch {
	case kind == wire.TypeARP:
		p, ok = i.ether.ARPFromLink(src, p)
	case kind != wire.TypeIPv4 && kind != wire.TypeIPv6:
		i.counters.rxUnknownType.Add(1)
		return dropped, nil
	case isIP && wire.NDType(p) != 0:
		p, ok = i.ether.NDFromLink(src, p)
	}
	if !ok {
		i.counters.rxDropped.Add(1)
		return dropped, nil
	}
	if kind == wire.TypeARP || wire.NDType(p) != 0 {
		b = append(make([]byte, i.spare+wire.EncapLen), p...)
	}
	dst := i.ether.Kernel()
	switch {
	case to == i.Broadcast():
		dst = ether.Broadcast
	case to.IsMulticast():
		dst = ether.Group(ip)
	}
	ether.Header(b[tun.HeaderLen:]).Put(dst, i.ether.MAC(src), kind)
	return passed, b
}
