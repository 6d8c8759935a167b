package frame

import (
	"encoding/binary"
	"net/netip"
)

// Hardware types of ARP, as in the file type of an interface.
const (
	Ethernet   = 1
	InfiniBand = 32
)

// EtherTypes.
const (
	TypeIPv4 = 0x0800
	TypeARP  = 0x0806
	TypeIPv6 = 0x86dd
)

// Link is the link layer of an interface.
type Link struct {
	Type    uint16 // Ethernet or InfiniBand
	Address []byte // 6 or 20 octets
}

const (
	etherHeader = 14
	encapHeader = 4
)

// HeaderLen is the length of a frame's header for a type.
func HeaderLen(linkType uint16) int {
	if linkType == InfiniBand {
		return encapHeader
	}
	return etherHeader
}

// newFrame returns a frame with its header and room for n octets of payload. dst
// is an Ethernet address; InfiniBand frames do not carry one.
func (l Link) newFrame(dst [6]byte, etherType uint16, n int) []byte {
	if l.Type == InfiniBand {
		b := make([]byte, encapHeader, encapHeader+n)
		binary.BigEndian.PutUint16(b, etherType)
		return b
	}
	b := make([]byte, etherHeader, etherHeader+n)
	copy(b, dst[:])
	copy(b[6:12], l.Address)
	binary.BigEndian.PutUint16(b[12:], etherType)
	return b
}

var etherBroadcast = [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// GroupMAC returns the Ethernet address of an IP multicast group (RFC 1112,
// RFC 2464).
func GroupMAC(group netip.Addr) (mac [6]byte) {
	a := group.AsSlice()
	if group.Is4() {
		return [6]byte{0x01, 0x00, 0x5e, a[1] & 0x7f, a[2], a[3]}
	}
	return [6]byte{0x33, 0x33, a[12], a[13], a[14], a[15]}
}

// Split returns the EtherType of a frame and the payload behind its header;
// ok is false if the frame is shorter than the header.
func Split(linkType uint16, f []byte) (etherType uint16, payload []byte, ok bool) {
	n := HeaderLen(linkType)
	if len(f) < n {
		return 0, nil, false
	}
	if linkType == InfiniBand {
		return binary.BigEndian.Uint16(f), f[n:], true
	}
	return binary.BigEndian.Uint16(f[n-2:]), f[n:], true
}

// checksum is the Internet checksum (RFC 1071) of b on top of a partial sum.
func checksum(b []byte, partial uint32) uint16 {
	for len(b) > 1 {
		partial += uint32(b[0])<<8 | uint32(b[1])
		b = b[2:]
	}
	if len(b) == 1 {
		partial += uint32(b[0]) << 8
	}
	for partial > 0xffff {
		partial = partial>>16 + partial&0xffff
	}
	return ^uint16(partial)
}

// pseudoSum is the partial sum of IPv6's pseudo header (RFC 8200, section 8.1).
func pseudoSum(src, dst netip.Addr, length int, proto uint8) uint32 {
	s, d := src.As16(), dst.As16()
	total := uint32(length) + uint32(proto)
	for i := 0; i < 16; i += 2 {
		total += uint32(s[i])<<8 | uint32(s[i+1])
		total += uint32(d[i])<<8 | uint32(d[i+1])
	}
	return total
}
