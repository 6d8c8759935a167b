package wire

import "encoding/binary"

var be = binary.BigEndian

// EtherTypes that IPoIB carries (RFC 4391, section 6).
const (
	TypeIPv4 = 0x0800
	TypeARP  = 0x0806
	TypeRARP = 0x8035
	TypeIPv6 = 0x86dd
)

// EncapLen is the length of the encapsulation header, in bytes. It is the
// difference between the MTU of an InfiniBand link and that of its IPoIB
// interface.
const EncapLen = 4

// Frame is an IPoIB datagram: the encapsulation header, then the packet.
type Frame []byte

// Valid reports whether f is long enough to have an encapsulation header.
func (f Frame) Valid() bool { return len(f) >= EncapLen }

// Type is the EtherType of the packet.
func (f Frame) Type() uint16 { return be.Uint16(f) }

// Payload is the packet, a part of f.
func (f Frame) Payload() []byte { return f[EncapLen:] }

// PutEncap writes an encapsulation header over the first EncapLen bytes of b.
// The reserved octets are zero; receivers ignore them.
func PutEncap(b []byte, etherType uint16) {
	be.PutUint16(b, etherType)
	be.PutUint16(b[2:], 0)
}

// AppendFrame appends an encapsulation header and packet to b.
func AppendFrame(b []byte, etherType uint16, packet []byte) []byte {
	b = append(be.AppendUint16(b, etherType), 0, 0)
	return append(b, packet...)
}

// MTU returns the MTU of the IPoIB interface, in bytes, on a link of the
// InfiniBand MTU linkMTU (RFC 4391, section 7).
func MTU(linkMTU int) int { return linkMTU - EncapLen }

// LinkMTUs are the MTUs of InfiniBand links, in bytes.
var LinkMTUs = [...]int{256, 512, 1024, 2048, 4096}
