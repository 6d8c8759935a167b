package wire

import "net/netip"

// ARPLen is the length of an ARP packet of IPoIB, in bytes.
const ARPLen = 8 + 2*(AddressLen+4)

// hardwareInfiniBand is the ARP hardware type (RFC 4391, section 9.2).
const hardwareInfiniBand = 32

// ARP operations.
const (
	ARPRequest = 1
	ARPReply   = 2
)

// ARP is an ARP packet of IPoIB. RARP has the same form.
type ARP []byte

// ARPFields are the fields of an ARP packet.
type ARPFields struct {
	Op       uint16
	SenderHW Address
	SenderIP netip.Addr // IPv4
	TargetHW Address    // zero in a request
	TargetIP netip.Addr // IPv4
}

// Valid reports whether a has the lengths and types of IPv4 over InfiniBand.
// It allows bytes behind the packet, since frames may be padded.
func (a ARP) Valid() bool {
	return len(a) >= ARPLen && be.Uint16(a) == hardwareInfiniBand && be.Uint16(a[2:]) == TypeIPv4 &&
		a[4] == AddressLen && a[5] == 4
}

// Op is the operation.
func (a ARP) Op() uint16 { return be.Uint16(a[6:]) }

// SenderHW is the link-layer address of the sender.
func (a ARP) SenderHW() Address { return Address(a[8:]) }

// SenderIP is the IPv4 address of the sender.
func (a ARP) SenderIP() netip.Addr { return netip.AddrFrom4([4]byte(a[28:])) }

// TargetHW is the link-layer address of the target, zero in a request.
func (a ARP) TargetHW() Address { return Address(a[32:]) }

// TargetIP is the IPv4 address of the target.
func (a ARP) TargetIP() netip.Addr { return netip.AddrFrom4([4]byte(a[52:])) }

// Fields returns the fields of a valid packet.
func (a ARP) Fields() ARPFields {
	return ARPFields{Op: a.Op(), SenderHW: a.SenderHW(), SenderIP: a.SenderIP(), TargetHW: a.TargetHW(), TargetIP: a.TargetIP()}
}

// NewARP makes an ARP packet. The IP addresses of f must be IPv4.
func NewARP(f ARPFields) ARP {
	a := make(ARP, 0, ARPLen)
	a = be.AppendUint16(a, hardwareInfiniBand)
	a = be.AppendUint16(a, TypeIPv4)
	a = append(a, AddressLen, 4)
	a = be.AppendUint16(a, f.Op)
	a = append(a, f.SenderHW[:]...)
	sip, tip := f.SenderIP.As4(), f.TargetIP.As4()
	a = append(a, sip[:]...)
	a = append(a, f.TargetHW[:]...)
	return append(a, tip[:]...)
}
