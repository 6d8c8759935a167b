package ether

import (
	"net/netip"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// HeaderLen is the length of an Ethernet header, in bytes.
const HeaderLen = 14

// Header is an Ethernet header: destination, source, EtherType.
type Header []byte

// Dst, Src and Type are the fields of a header of HeaderLen bytes.
func (h Header) Dst() MAC     { return MAC(h) }
func (h Header) Src() MAC     { return MAC(h[6:]) }
func (h Header) Type() uint16 { return be.Uint16(h[12:]) }

// Put writes a header over the first HeaderLen bytes of h.
func (h Header) Put(dst, src MAC, etherType uint16) {
	copy(h, dst[:])
	copy(h[6:], src[:])
	be.PutUint16(h[12:], etherType)
}

// arpLen is the length of an ARP packet of Ethernet and IPv4, in bytes.
const arpLen = 28

// ARPToLink translates an ARP packet of the kernel. It reports whether the
// packet is valid. Whatever it says of its sender's hardware is replaced by the
// address of the interface.
func (t *Table) ARPToLink(p []byte) (wire.ARP, bool) {
	if len(p) < arpLen || be.Uint16(p) != 1 || be.Uint16(p[2:]) != wire.TypeIPv4 || p[4] != 6 || p[5] != 4 {
		return nil, false
	}
	f := wire.ARPFields{Op: be.Uint16(p[6:]), SenderHW: t.local,
		SenderIP: netip.AddrFrom4([4]byte(p[14:])), TargetIP: netip.AddrFrom4([4]byte(p[24:]))}
	switch target := MAC(p[18:]); {
	case f.Op != wire.ARPRequest && f.Op != wire.ARPReply:
		return nil, false
	case target == t.kernel: // a gratuitous reply
		f.TargetHW = t.local
	default:
		f.TargetHW, _ = t.Address(target) // zero in a request
	}
	return wire.NewARP(f), true
}

// ARPFromLink translates a received ARP packet of the neighbour src. It reports
// whether the packet is valid and src its sender.
func (t *Table) ARPFromLink(src wire.Address, packet []byte) ([]byte, bool) {
	p := wire.ARP(packet)
	if !p.Valid() || p.Op() != wire.ARPRequest && p.Op() != wire.ARPReply {
		return nil, false
	}
	f := p.Fields()
	if !f.SenderHW.ValidUnicast() || !f.SenderHW.SamePort(src) {
		return nil, false
	}
	out := make([]byte, 0, arpLen)
	out = be.AppendUint16(out, 1)
	out = be.AppendUint16(out, wire.TypeIPv4)
	out = append(out, 6, 4)
	out = be.AppendUint16(out, f.Op)
	sender, sip, tip := t.Learn(f.SenderHW), f.SenderIP.As4(), f.TargetIP.As4()
	out = append(append(out, sender[:]...), sip[:]...)
	var target MAC
	if f.TargetHW.SamePort(t.local) {
		target = t.kernel
	} else if f.TargetHW.SamePort(src) {
		target = sender
	}
	return append(append(out, target[:]...), tip[:]...), true
}

// NDToLink translates the link-layer options of a neighbour discovery packet of
// the kernel. It reports whether the packet is well formed. An option with the
// address of the device, or one that is unknown, gets the address of the
// interface.
func (t *Table) NDToLink(p []byte) ([]byte, bool) {
	return wire.MapLinkLayer(p, 8, func(option []byte) ([]byte, bool) {
		a, ok := t.Address(MAC(option[2:]))
		if !ok {
			a = t.local
		}
		return append([]byte{option[0], 3, 0, 0}, a[:]...), true
	})
}

// NDFromLink translates the link-layer options of a received neighbour
// discovery packet. It reports whether the packet is well formed and says its
// sender's own address. A redirect may name another neighbour.
func (t *Table) NDFromLink(src wire.Address, p []byte) ([]byte, bool) {
	redirect := wire.NDType(p) == wire.NDRedirect
	return wire.MapLinkLayer(p, 24, func(option []byte) ([]byte, bool) {
		a := wire.Address(option[4:])
		if !a.ValidUnicast() || !redirect && !a.SamePort(src) {
			return nil, false
		}
		m := t.MAC(a)
		if !redirect {
			m = t.Learn(a)
		}
		return append([]byte{option[0], 1}, m[:]...), true
	})
}

// Group returns the Ethernet address of an IP multicast group.
func Group(ip netip.Addr) MAC {
	if ip.Is4() {
		a := ip.As4()
		return MAC{1, 0, 0x5e, a[1] & 0x7f, a[2], a[3]}
	}
	a := ip.As16()
	return MAC{0x33, 0x33, a[12], a[13], a[14], a[15]}
}
