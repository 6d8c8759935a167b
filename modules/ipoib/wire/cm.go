package wire

// Connected mode (RFC 4755): private data and service IDs of the connection
// manager.

// CMPrivateLen is the length of the private data of a request and of a reply, in
// bytes.
const CMPrivateLen = 8

// CMPrivate is the private data of a request or a reply. The connection
// manager pads it.
type CMPrivate []byte

// Valid reports whether p is long enough, and names a receive MTU that leaves room
// for a packet.
func (p CMPrivate) Valid() bool { return len(p) >= CMPrivateLen && p.ReceiveMTU() > EncapLen }

// QPN is the number of the sender's UD queue pair.
func (p CMPrivate) QPN() uint32 { return be.Uint32(p) & 0xffffff }

// ReceiveMTU is the longest message that the sender receives, in bytes, with the
// encapsulation header.
func (p CMPrivate) ReceiveMTU() uint32 { return be.Uint32(p[4:]) }

// NewCMPrivate makes private data.
func NewCMPrivate(qpn, receiveMTU uint32) CMPrivate {
	p := make(CMPrivate, 0, CMPrivateLen)
	p = be.AppendUint32(p, qpn&0xffffff)
	return be.AppendUint32(p, receiveMTU)
}

// Prefixes of service IDs. The low 24 bits are the number of the UD queue
// pair. The RFC and Linux differ in one digit, so an interface listens at
// both.
const (
	servicePrefixRFC   = 0x01 << 56
	servicePrefixLinux = 0x10 << 56
)

// ServiceIDRFC is the service ID of an interface by RFC 4755, section 3.2.
func ServiceIDRFC(qpn uint32) uint64 { return servicePrefixRFC | uint64(qpn&0xffffff) }

// ServiceIDLinux is the service ID of an interface in Linux.
func ServiceIDLinux(qpn uint32) uint64 { return servicePrefixLinux | uint64(qpn&0xffffff) }

// ServiceQPN returns the queue pair number in a service ID. It reports whether id
// is one of IPoIB, in either form.
func ServiceQPN(id uint64) (qpn uint32, ok bool) {
	prefix := id &^ 0xffffff
	return uint32(id & 0xffffff), prefix == servicePrefixRFC || prefix == servicePrefixLinux
}
