package wire

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
)

// GID is the global identifier of a port or of a multicast group.
type GID [16]byte

// AddrGID returns the GID of a RoCEv2 port: its IPv6 address, or its IPv4
// address mapped into IPv6 (InfiniBand architecture, annex A17).
func AddrGID(a netip.Addr) GID { return a.WithZone("").As16() }

// IsMulticast reports whether g names a multicast group.
func (g GID) IsMulticast() bool { return g[0] == 0xff }

// String returns g as eight groups of hexadecimal digits without leading zeros
// and without compression, as Linux writes it in the files of ipoib in debugfs.
func (g GID) String() string {
	var b strings.Builder
	for i := 0; i < len(g); i += 2 {
		if i > 0 {
			b.WriteByte(':')
		}
		fmt.Fprintf(&b, "%x", be.Uint16(g[i:]))
	}
	return b.String()
}

// InterfaceID returns the IPv6 interface identifier of the port g: its GUID with
// the universal bit set (RFC 4391, section 8).
func (g GID) InterfaceID() (id [8]byte) {
	copy(id[:], g[8:])
	id[0] |= 2
	return id
}

// LinkLocal returns the IPv6 link-local address of the port g.
func (g GID) LinkLocal() netip.Addr {
	a := [16]byte{0xfe, 0x80}
	id := g.InterfaceID()
	copy(a[8:], id[:])
	return netip.AddrFrom16(a)
}

// AddressLen is the length of an IPoIB link-layer address, in octets.
const AddressLen = 20

// Flags in the first octet of an address (RFC 4755, section 3.1).
const (
	FlagRC = 0x80 // the interface takes reliable connections
	FlagUC = 0x40 // the interface takes unreliable connections
)

// MulticastQPN is the queue pair number in the address of a multicast group.
const MulticastQPN = 0xffffff

// Address is an IPoIB link-layer address: flags, the number of the interface's
// UD queue pair, the GID of its port (RFC 4391, section 9.1.1).
type Address [AddressLen]byte

// NewAddress makes an address. qpn has 24 bits.
func NewAddress(flags byte, qpn uint32, gid GID) (a Address) {
	be.PutUint32(a[:], qpn&0xffffff|uint32(flags)<<24)
	copy(a[4:], gid[:])
	return a
}

// Flags are the capabilities of the interface.
func (a Address) Flags() byte { return a[0] }

// QPN is the number of the interface's UD queue pair.
func (a Address) QPN() uint32 { return be.Uint32(a[:]) & 0xffffff }

// GID is the identifier of the port, or of the group.
func (a Address) GID() GID { return GID(a[4:]) }

// SamePort reports whether a and b name the same queue pair of the same port.
// Flags are not compared.
func (a Address) SamePort(b Address) bool { return [19]byte(a[1:]) == [19]byte(b[1:]) }

// IsMulticast reports whether a is the address of a multicast group.
func (a Address) IsMulticast() bool { return a.GID().IsMulticast() }

// ValidUnicast reports whether a can be the address of an interface: the queue
// pair number is not reserved, and the GID is that of a port.
func (a Address) ValidUnicast() bool {
	qpn := a.QPN()
	return qpn > 1 && qpn != MulticastQPN && !a.IsMulticast() && a.GID() != GID{}
}

// String returns the octets in hexadecimal, joined by colons.
func (a Address) String() string {
	s := make([]string, len(a))
	for i, o := range a {
		s[i] = fmt.Sprintf("%02x", o)
	}
	return strings.Join(s, ":")
}

// ParseAddress parses the result of Address.String.
func ParseAddress(s string) (a Address, err error) {
	octets := strings.Split(s, ":")
	if len(octets) != AddressLen {
		return a, fmt.Errorf("parse IPoIB address %q: %d octets, want %d", s, len(octets), AddressLen)
	}
	for i, o := range octets {
		if len(o) != 2 {
			return a, fmt.Errorf("parse IPoIB address %q: octet %q, want two hexadecimal digits", s, o)
		}
		if _, err := hex.Decode(a[i:i+1], []byte(o)); err != nil {
			return a, fmt.Errorf("parse IPoIB address %q: octet %q: %w", s, o, err)
		}
	}
	return a, nil
}

// MarshalText is String. UnmarshalText takes every form of an IPv6 address.
func (g GID) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (g *GID) UnmarshalText(b []byte) error {
	a, err := netip.ParseAddr(string(b))
	if err != nil || !a.Is6() || a.Zone() != "" {
		return fmt.Errorf("GID %q: want eight groups of hexadecimal digits", b)
	}
	*g = a.As16()
	return nil
}
