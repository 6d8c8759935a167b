package wire

import "net/netip"

const (
	protocolICMP = 1
	// Bytes of an offending packet that the answer quotes. The answer fits
	// every path (RFC 1812, section 4.3.2.3; RFC 4443, section 2.4).
	quoteIPv4 = 576 - ipv4Len - icmpLen
	quoteIPv6 = 1280 - ipv6Len - icmpLen

	icmpLen            = 8
	icmpUnreachable    = 3
	icmpFragNeeded     = 4 // code
	icmpv6PacketTooBig = 2
)

// TooBig returns the answer to an IP packet that is too large for a path of mtu
// bytes: ICMP "fragmentation needed" or ICMPv6 "packet too big", with the
// packet's destination as its sender. It returns nil if there must be no
// answer: to a multicast packet, a later fragment, an ICMP error, or a packet
// without a sender.
func TooBig(etherType uint16, packet []byte, mtu int) []byte {
	dst, ok := Destination(etherType, packet)
	if !ok || dst.IsMulticast() {
		return nil
	}
	if dst.Is4() {
		return tooBig4(packet, mtu)
	}
	return tooBig6(packet, mtu)
}

func tooBig4(packet []byte, mtu int) []byte {
	head := int(packet[0]&0xf) * 4
	src := netip.AddrFrom4([4]byte(packet[12:]))
	switch {
	case head < ipv4Len || len(packet) < head+icmpLen, src.IsUnspecified() || src.IsMulticast(), be.Uint16(packet[6:])&0x1fff != 0:
		return nil
	case packet[9] == protocolICMP && packet[head] != 0 && packet[head] != 8: // all but echo may be errors
		return nil
	}
	quote := packet[:min(len(packet), quoteIPv4)]
	b := make([]byte, ipv4Len+icmpLen, ipv4Len+icmpLen+len(quote))
	b[0], b[8], b[9] = 0x45, 64, protocolICMP
	be.PutUint16(b[2:], uint16(cap(b)))
	copy(b[12:16], packet[16:20])
	copy(b[16:20], packet[12:16])
	be.PutUint16(b[10:], ^Sum(0, b[:ipv4Len]))
	m := b[ipv4Len:]
	m[0], m[1] = icmpUnreachable, icmpFragNeeded
	be.PutUint16(m[6:], uint16(min(mtu, 0xffff)))
	b = append(b, quote...)
	be.PutUint16(b[ipv4Len+2:], ^Sum(0, b[ipv4Len:]))
	return b
}

func tooBig6(packet []byte, mtu int) []byte {
	src, dst := netip.AddrFrom16([16]byte(packet[8:])), netip.AddrFrom16([16]byte(packet[24:]))
	switch {
	case src.IsUnspecified() || src.IsMulticast():
		return nil
	case packet[6] == protocolICMPv6 && (len(packet) <= ipv6Len || packet[ipv6Len] < 128): // an error
		return nil
	}
	quote := packet[:min(len(packet), quoteIPv6)]
	b := make([]byte, ipv6Len+icmpLen, ipv6Len+icmpLen+len(quote))
	b[0], b[6], b[7] = 0x60, protocolICMPv6, 64
	be.PutUint16(b[4:], uint16(cap(b)-ipv6Len))
	copy(b[8:24], packet[24:40])
	copy(b[24:40], packet[8:24])
	m := b[ipv6Len:]
	m[0] = icmpv6PacketTooBig
	be.PutUint32(m[4:], uint32(mtu))
	b = append(b, quote...)
	be.PutUint16(b[ipv6Len+2:], ^sumICMPv6(dst, src, b[ipv6Len:]))
	return b
}
