package dev

import (
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
func (i *Interface) fromEthernet(now time.Time, b []byte, out *outgoing) {
	const head = tun.HeaderLen + ether.HeaderLen
	if len(b) <= head {
		i.counters.txDropped.Add(1)
		return
	}
	h, e, p := tun.Header(b), ether.Header(b[tun.HeaderLen:]), b[head:]
	to, ok := i.target(e, p)
	if !ok {
		i.counters.txDropped.Add(1)
		return
	}
	switch h.GSOType() {
	case tun.GSOTCPv4, tun.GSOTCPv6:
		if to.IsMulticast() || !i.segments(h.GSOSize(), e.Type(), p, out, func(frame []byte) { out.add(to, frame) }) {
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
		if frame, ok = i.translated(e.Type(), p); !ok {
			i.counters.txDropped.Add(1)
			return
		}
	} else {
		wire.PutEncap(frame, e.Type())
	}
	if to.IsMulticast() {
		i.snoop(now, wire.Frame(frame).Type(), p)
		i.multicast(now, to.GID(), frame, out)
		return
	}
	out.add(to, frame)
}

// target returns the link-layer address that a frame of the kernel goes to. ok
// is false if it cannot be sent. i.mu is held.
func (i *Interface) target(e ether.Header, p []byte) (to wire.Address, ok bool) {
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

// translated returns the frame of an ARP packet or a neighbour discovery packet
// of the kernel. i.mu is held.
func (i *Interface) translated(etherType uint16, p []byte) (frame []byte, ok bool) {
	if etherType == wire.TypeARP {
		p, ok = i.ether.ARPToLink(p)
	} else {
		p, ok = i.ether.NDToLink(p)
	}
	return wire.AppendFrame(nil, etherType, p), ok
}

// intoEthernet gives a received frame of src to the address to its Ethernet
// header. b is i.spare bytes and the frame. i.mu is held.
func (i *Interface) intoEthernet(src, to wire.Address, b []byte) (v verdict, packet []byte) {
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
