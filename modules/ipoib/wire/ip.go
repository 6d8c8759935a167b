package wire

import (
	"math/bits"
	"net/netip"
)

// Header lengths, in bytes.
const (
	ipv4Len = 20
	ipv6Len = 40
)

// protocolICMPv6 is the number of ICMPv6 in an IPv6 header.
const protocolICMPv6 = 58

// Destination returns the destination of an IP packet of the EtherType given.
// The result is false if the packet is too short or of another version.
func Destination(etherType uint16, packet []byte) (netip.Addr, bool) {
	switch {
	case etherType == TypeIPv4 && len(packet) >= ipv4Len && packet[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(packet[16:])), true
	case etherType == TypeIPv6 && len(packet) >= ipv6Len && packet[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(packet[24:])), true
	}
	return netip.Addr{}, false
}

// Sum adds b to the Internet checksum sum (RFC 1071) and returns the result.
// The number of bytes summed before must be even. The checksum field of a
// packet has the complement of the sum.
func Sum(sum uint16, b []byte) uint16 {
	n, carry := uint64(sum), uint64(0) // n is a sum modulo 2^64-1
	for len(b) >= 32 {
		n, carry = bits.Add64(n, be.Uint64(b), 0)
		n, carry = bits.Add64(n, be.Uint64(b[8:]), carry)
		n, carry = bits.Add64(n, be.Uint64(b[16:]), carry)
		n, carry = bits.Add64(n, be.Uint64(b[24:]), carry)
		n += carry
		b = b[32:]
	}
	n = n>>32 + n&0xffffffff
	for ; len(b) >= 4; b = b[4:] {
		n += uint64(be.Uint32(b))
	}
	if len(b) >= 2 {
		n += uint64(be.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		n += uint64(b[0]) << 8
	}
	for n > 0xffff {
		n = n>>16 + n&0xffff
	}
	return uint16(n)
}

// sumICMPv6 is the sum of message and its pseudo header (RFC 8200, section 8.1).
func sumICMPv6(src, dst netip.Addr, message []byte) uint16 {
	s, d := src.As16(), dst.As16()
	var tail [8]byte
	be.PutUint32(tail[:], uint32(len(message)))
	tail[7] = protocolICMPv6
	return Sum(Sum(Sum(Sum(0, s[:]), d[:]), tail[:]), message)
}
