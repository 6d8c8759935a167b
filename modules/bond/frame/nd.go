package frame

import (
	"encoding/binary"
	"net/netip"
)

const (
	protoICMPv6 = 58
	protoIGMP   = 2

	advertisement = 136
	naOverride    = 0x20
	targetAddress = 2 // option with the target's link-layer address
)

var allNodes = netip.MustParseAddr("ff02::1")

// Advertisement returns an unsolicited neighbour advertisement of addr to all
// nodes. It overrides their entries (RFC 4861 section 7.2.6). The option with
// the address has 8 octets on Ethernet and 24, with 2 of padding, on InfiniBand
// (RFC 4391 section 9.3).
func (l Link) Advertisement(addr netip.Addr) []byte {
	m := make([]byte, 24, 48)
	m[0], m[4] = advertisement, naOverride
	copy(m[8:], addr.AsSlice())
	if l.Type == InfiniBand {
		m = append(m, targetAddress, 3, 0, 0)
	} else {
		m = append(m, targetAddress, 1)
	}
	m = append(m, l.Address...)
	return l.wrapICMPv6(addr, allNodes, 255, nil, m)
}

// wrapICMPv6 fills in the checksum of an ICMPv6 message and wraps it in IPv6.
// hopByHop is an extension header without its first octet.
func (l Link) wrapICMPv6(src, dst netip.Addr, hops byte, hopByHop, m []byte) []byte {
	binary.BigEndian.PutUint16(m[2:], checksum(m, pseudoSum(src, dst, len(m), protoICMPv6)))
	n := len(m)
	if hopByHop != nil {
		n += 1 + len(hopByHop)
	}
	f := l.newFrame(GroupMAC(dst), TypeIPv6, 40+n)
	f = append(f, 0x60, 0, 0, 0)
	f = binary.BigEndian.AppendUint16(f, uint16(n))
	if hopByHop != nil {
		f = append(f, 0, hops)
	} else {
		f = append(f, protoICMPv6, hops)
	}
	f = append(f, src.AsSlice()...)
	f = append(f, dst.AsSlice()...)
	if hopByHop != nil {
		f = append(f, protoICMPv6)
		f = append(f, hopByHop...)
	}
	return append(f, m...)
}
