package gso

import (
	"bytes"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

const (
	flagACK   = 0x10
	maxPacket = 0xffff
)

// Joiner joins consecutive TCP packets of one connection, as large receive
// offload of an adapter does. Segmenting the joined packet gives the same
// packets again: they have the same headers and right checksums, and all but
// the last have the same size.
type Joiner struct {
	room   int
	buf    []byte       // room spare bytes and the packet
	p      parsedPacket // of buf
	size   int          // payload of the first
	count  int          // packets joined
	closed bool         // the last packet was short or had PSH: it ends the joined packet
	next   uint32       // next sequence number
}

// NewJoiner makes a Joiner. It keeps room spare bytes in front of the joined
// packet.
func NewJoiner(room int) *Joiner {
	return &Joiner{room: room, buf: make([]byte, room, room+maxPacket)}
}

// Add copies the IP packet b behind the packets joined so far. It reports
// whether it did. It does not if b cannot be joined, or does not follow them.
func (j *Joiner) Add(b []byte) bool {
	p, ok := joinable(b)
	if !ok {
		return false
	}
	n := len(b) - p.ip - p.tcp
	switch {
	case j.count == 0:
		j.buf = append(j.buf[:j.room], b...)
		j.size = n
	case !j.continues(p, n):
		return false
	default:
		j.buf = append(j.buf, b[p.ip+p.tcp:]...)
		j.buf[j.room+p.ip+13] |= b[p.ip+13]
	}
	j.p = parsedPacket{b: j.buf[j.room:], v6: p.v6, ip: p.ip, tcp: p.tcp}
	j.count++
	j.next = be.Uint32(b[p.ip+4:]) + uint32(n)
	j.closed = n < j.size || b[p.ip+13]&flagPSH != 0
	return true
}

// joinable parses b. It reports whether b may be joined: a TCP packet with
// payload, right checksums, no flags but ACK and PSH, no IP options, no
// fragment.
func joinable(b []byte) (p parsedPacket, ok bool) {
	p, err := parseTCP(b)
	if err != nil || b[p.ip+13]&^flagPSH != flagACK {
		return p, false
	}
	addresses := b[12:20]
	if p.v6 {
		if int(be.Uint16(b[4:])) != len(b)-ipv6Len {
			return p, false
		}
		addresses = b[8:40]
	} else if p.ip != ipv4Len || int(be.Uint16(b[2:])) != len(b) || be.Uint16(b[6:])&^0x4000 != 0 || wire.Sum(0, b[:ipv4Len]) != 0xffff {
		return p, false
	}
	return p, wire.Sum(pseudoSum(addresses, len(b)-p.ip), b[p.ip:]) == 0xffff
}

// pseudoSum is the sum of the pseudo header of a TCP segment of n bytes.
func pseudoSum(addresses []byte, n int) uint16 {
	return wire.Sum(wire.Sum(0, addresses), []byte{0, protocolTCP, byte(n >> 8), byte(n)})
}

// continues reports whether the packet p, with n bytes of payload, follows the
// packets joined so far.
func (j *Joiner) continues(p parsedPacket, n int) bool {
	a, b := j.p.b, p.b
	if j.closed || p.v6 != j.p.v6 || p.ip != j.p.ip || p.tcp != j.p.tcp || n > j.size || len(a)+n > maxPacket {
		return false
	}
	if be.Uint32(b[p.ip+4:]) != j.next || !bytes.Equal(a[p.ip:p.ip+4], b[p.ip:p.ip+4]) || !bytes.Equal(a[p.ip+8:p.ip+12], b[p.ip+8:p.ip+12]) ||
		!bytes.Equal(a[p.ip+14:p.ip+16], b[p.ip+14:p.ip+16]) || !bytes.Equal(a[p.ip+18:p.ip+p.tcp], b[p.ip+18:p.ip+p.tcp]) {
		return false // ports, acknowledgement, window, urgent pointer, options
	}
	if p.v6 {
		return bytes.Equal(a[:4], b[:4]) && bytes.Equal(a[6:40], b[6:40])
	}
	return a[1] == b[1] && be.Uint16(b[4:]) == be.Uint16(a[4:])+uint16(j.count) && bytes.Equal(a[6:10], b[6:10]) && bytes.Equal(a[12:20], b[12:20])
}

// Joined is the result of a Joiner.
type Joined struct {
	Packet []byte // behind the spare bytes; valid until the next Add
	Count  int    // packets joined; a single packet is unchanged
	Size   int    // payload of each packet but the last, in bytes
	V6     bool
	// IP is the length of the IP header, Header that of the IP and TCP headers,
	// in bytes.
	IP, Header int
}

// Take returns the joined packet and empties the Joiner. Count is 0 if there is
// none. If packets were joined, the TCP checksum field has the sum of the
// pseudo header only.
func (j *Joiner) Take() Joined {
	out := Joined{Packet: j.buf, Count: j.count, Size: j.size, V6: j.p.v6, IP: j.p.ip, Header: j.p.ip + j.p.tcp}
	j.count, j.closed = 0, false
	if out.Count < 2 {
		return out
	}
	b := j.buf[j.room:]
	addresses := b[12:20]
	if out.V6 {
		be.PutUint16(b[4:], uint16(len(b)-ipv6Len))
		addresses = b[8:40]
	} else {
		be.PutUint16(b[2:], uint16(len(b)))
		b[10], b[11] = 0, 0
		be.PutUint16(b[10:], ^wire.Sum(0, b[:ipv4Len]))
	}
	be.PutUint16(b[out.IP+16:], pseudoSum(addresses, len(b)-out.IP))
	return out
}
