package frame

import (
	"encoding/binary"
	"net/netip"
)

// Operations of ARP.
const (
	Request = 1
	Reply   = 2
)

// ARP is an ARP message for IPv4 (RFC 826; for InfiniBand with hardware type 32
// and addresses of 20 octets, RFC 4391 section 9.1).
type ARP struct {
	Op       uint16
	SHA, THA []byte // hardware addresses of sender and target; nil: zeros
	SPA, TPA netip.Addr
}

// ARP returns a as a broadcast frame of l.
func (l Link) ARP(a ARP) []byte {
	n := len(l.Address)
	f := l.newFrame(etherBroadcast, TypeARP, 8+2*n+8)
	f = binary.BigEndian.AppendUint16(f, l.Type)
	f = binary.BigEndian.AppendUint16(f, TypeIPv4)
	f = append(f, byte(n), 4)
	f = binary.BigEndian.AppendUint16(f, a.Op)
	f = appendAddress(f, a.SHA, n)
	f = append(f, a.SPA.AsSlice()...)
	f = appendAddress(f, a.THA, n)
	return append(f, a.TPA.AsSlice()...)
}

func appendAddress(f, addr []byte, n int) []byte {
	padded := make([]byte, n)
	copy(padded, addr)
	return append(f, padded...)
}

// ParseARP reads an ARP message about IPv4. The hardware addresses are parts of b.
func ParseARP(linkType uint16, b []byte) (a ARP, ok bool) {
	if len(b) < 8 || binary.BigEndian.Uint16(b) != linkType || binary.BigEndian.Uint16(b[2:]) != TypeIPv4 || b[5] != 4 {
		return ARP{}, false
	}
	n := int(b[4])
	if n != addressLen(linkType) || len(b) < 8+2*n+8 {
		return ARP{}, false
	}
	a.Op = binary.BigEndian.Uint16(b[6:])
	b = b[8:]
	a.SHA, a.SPA = b[:n], netip.AddrFrom4([4]byte(b[n:]))
	b = b[n+4:]
	a.THA, a.TPA = b[:n], netip.AddrFrom4([4]byte(b[n:]))
	return a, true
}

func addressLen(linkType uint16) int {
	if linkType == InfiniBand {
		return 20
	}
	return 6
}
