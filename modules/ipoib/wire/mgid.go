package wire

import (
	"fmt"
	"net/netip"
)

// Signatures of IPoIB in a multicast GID (RFC 4391, section 4).
const (
	signatureIPv4 = 0x401b
	signatureIPv6 = 0x601b
)

// ScopeLinkLocal is the usual scope of multicast GIDs.
const ScopeLinkLocal = 2

// fullMember is the full-member bit of a P_Key.
const fullMember = 0x8000

// Link are the parameters that map IP groups to multicast GIDs. All groups of an
// IPoIB link have those of its broadcast group.
type Link struct {
	PKey  uint16 // GIDs have the full-member bit in any case
	Scope byte   // 4 bits
}

func (l Link) mgid(signature uint16) (g GID) {
	g[0], g[1] = 0xff, 0x10|l.Scope&0xf // flag 1: not permanently assigned
	be.PutUint16(g[2:], signature)
	be.PutUint16(g[4:], l.PKey|fullMember)
	return g
}

// Broadcast returns the GID of the broadcast group. All 32 bits behind the
// prefix are ones, which no IPv4 group maps to (RFC 4391, section 5).
func (l Link) Broadcast() GID {
	g := l.mgid(signatureIPv4)
	be.PutUint32(g[12:], 0xffffffff)
	return g
}

// Multicast returns the GID of the IP multicast group ip: the low 28 bits of an
// IPv4 group, the low 80 bits of an IPv6 group. The IPv4 address
// 255.255.255.255 maps to the broadcast group.
func (l Link) Multicast(ip netip.Addr) (GID, error) {
	switch {
	case ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return l.Broadcast(), nil
	case !ip.IsMulticast() || ip.Is4In6():
		return GID{}, fmt.Errorf("map %s to a multicast GID: not a multicast address", ip)
	case ip.Is4():
		g := l.mgid(signatureIPv4)
		a := ip.As4()
		be.PutUint32(g[12:], be.Uint32(a[:])&0x0fffffff)
		return g, nil
	}
	g := l.mgid(signatureIPv6)
	a := ip.As16()
	copy(g[6:], a[6:])
	return g, nil
}

// MulticastAddress returns the link-layer address of the group g.
func MulticastAddress(g GID) Address { return NewAddress(0, MulticastQPN, g) }

// SolicitedNode returns the group that listens for neighbour solicitations of the
// IPv6 address ip (RFC 4291, section 2.7.1).
func SolicitedNode(ip netip.Addr) netip.Addr {
	a := ip.As16()
	return netip.AddrFrom16([16]byte{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: a[13], 14: a[14], 15: a[15]})
}

// PKeyOf returns the P_Key in a multicast GID of IPoIB. It reports whether g is
// one.
func PKeyOf(g GID) (pkey uint16, ok bool) {
	sig := be.Uint16(g[2:])
	return be.Uint16(g[4:]), g.IsMulticast() && (sig == signatureIPv4 || sig == signatureIPv6)
}
