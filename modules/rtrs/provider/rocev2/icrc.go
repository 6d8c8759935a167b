package rocev2

import (
	"encoding/binary"
	"hash/crc32"
	"math"
	"net/netip"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/checksum"
)

// The ICRC is a CRC-32 of the packet with the fields that change on the way
// replaced by ones. It covers the IP header, although the kernel writes that:
// the sockets are set up so that the IPv4 identification is 0, or the number of
// the segment within one segmented send. docs/extend/protocol/rocev2.md, ICRC.

const roceUDPPort = 4791

// crcPrefix is the stand-in for everything in front of the base transport
// header, for one direction between two addresses.
type crcPrefix struct {
	crc uint32           // of b
	n   int              // bytes of b in use
	b   [8 + 40 + 8]byte // lengths and identification are 0
	v6  bool
	// fixedID makes every IPv4 identification count as 0: both ends of the
	// connection have agreed to that.
	fixedID bool
}

const (
	ip4Len, ip6Len, udpLen = 20, 40, 8
	dontFragment           = 0x40
)

func newPseudo(src, dst netip.Addr, sport uint16) (p crcPrefix) {
	p.v6 = !src.Is4()
	for i := range 8 {
		p.b[i] = 0xff
	}
	ip := p.b[8:]
	var udp []byte
	if p.v6 {
		ip[0], ip[1], ip[2], ip[3] = 0x6f, 0xff, 0xff, 0xff
		ip[6], ip[7] = 17, 0xff
		s, d := src.As16(), dst.As16()
		copy(ip[8:], s[:])
		copy(ip[24:], d[:])
		udp = ip[ip6Len:]
		p.n = 8 + ip6Len + udpLen
	} else {
		ip[0], ip[1] = 0x45, 0xff
		ip[6] = dontFragment
		ip[8], ip[9] = 0xff, 17
		ip[10], ip[11] = 0xff, 0xff
		s, d := src.As4(), dst.As4()
		copy(ip[12:], s[:])
		copy(ip[16:], d[:])
		udp = ip[ip4Len:]
		p.n = 8 + ip4Len + udpLen
	}
	be.PutUint16(udp[0:], sport)
	be.PutUint16(udp[2:], roceUDPPort)
	udp[6], udp[7] = 0xff, 0xff
	p.crc = crc32.ChecksumIEEE(p.b[:p.n])
	return p
}

func (p *crcPrefix) setSourcePort(port uint16) {
	if at := p.b[p.n-udpLen:]; be.Uint16(at) != port {
		be.PutUint16(at, port)
		p.crc = crc32.ChecksumIEEE(p.b[:p.n])
	}
}

// startCRC returns the CRC of everything in front of the base transport header of
// a datagram with size bytes of UDP payload, ICRC included, at most maxPacket.
func (p *crcPrefix) startCRC(size int, id uint16) uint32 {
	switch {
	case p.v6:
		return p.crc ^ lengths6[size]
	case p.fixedID:
		return p.crc ^ lengths4[size]
	}
	return p.crc ^ lengths4[size] ^ idsLow[id&0xff] ^ idsHigh[id>>8]
}

// A CRC is linear: the contribution of a field depends only on its value and
// position. So the sum of the pseudo header of each packet is looked up in
// tables.
var (
	lengths4, lengths6 [maxPacket + 1]uint32 // by bytes of UDP payload
	idsLow, idsHigh    [256]uint32           // by byte of the IPv4 identification
)

func init() {
	var ip4 [ip4Len + udpLen]byte
	var ip6 [ip6Len + udpLen]byte
	for n := range lengths4 {
		udp := uint16(n + udpLen)
		be.PutUint16(ip4[2:], udp+ip4Len)
		be.PutUint16(ip4[ip4Len+4:], udp)
		be.PutUint16(ip6[4:], udp)
		be.PutUint16(ip6[ip6Len+4:], udp)
		lengths4[n], lengths6[n] = sumZero(ip4[:]), sumZero(ip6[:])
	}
	clear(ip4[:])
	for n := range idsLow {
		ip4[4], ip4[5] = 0, byte(n)
		idsLow[n] = sumZero(ip4[:])
		ip4[4], ip4[5] = byte(n), 0
		idsHigh[n] = sumZero(ip4[:])
	}
}

// sumZero returns the CRC register after b if it starts at 0.
func sumZero(b []byte) uint32 { return ^crc32.Update(math.MaxUint32, crc32.IEEETable, b) }

// sumHeader continues crc over a header to be sent. Its byte 4 is 0.
func sumHeader(crc uint32, head []byte) uint32 {
	head[4] = 0xff
	crc = crc32.Update(crc, crc32.IEEETable, head)
	head[4] = 0
	return crc
}

func updateCRC(crc uint32, b []byte) uint32 { return checksum.Update(crc, crc32.IEEETable, b) }

// sumReceived is sum for bytes that are in the cache, since they were just
// received.
func sumReceived(crc uint32, b []byte) uint32 { return checksum.InCache(crc, crc32.IEEETable, b) }

func putICRC(b []byte, crc uint32) { binary.LittleEndian.PutUint32(b, crc) }
func getICRC(b []byte) uint32      { return binary.LittleEndian.Uint32(b) }

// sealPacket writes the ICRC into the last four bytes of b, a whole packet.
func (p *crcPrefix) sealPacket(b []byte, id uint16) {
	n := len(b) - icrcLen
	putICRC(b[n:], updateCRC(sumHeader(p.startCRC(len(b), id), b[:bthLen]), b[bthLen:n]))
}

// checkPacket reports whether the ICRC of the packet b is right. id is the most
// likely IPv4 identification. A socket does not report it. If id does not fit
// and the identification is not fixed, check solves for the identification:
// 15 of the 32 bits are left as a check.
// It overwrites byte 4 of b. The ICRC does not cover that byte. If place is not
// empty, it is the payload, and b has a hole for it before the ICRC.
func (p *crcPrefix) checkPacket(b, place []byte, id uint16) bool {
	n := len(b) - icrcLen
	b[4] = 0xff
	crc := sumReceived(p.startCRC(len(b), id), b[:n-len(place)])
	if len(place) > 0 {
		crc = sumReceived(crc, place)
	}
	diff := crc ^ getICRC(b[n:])
	if diff == 0 || p.v6 || p.fixedID {
		return diff == 0
	}
	// Unwind to the four bytes of identification and flags. Behind them are 12
	// bytes of IP header and the UDP header.
	k := 4 + 12 + udpLen + n
	if k >= len(unwind) {
		return false
	}
	flags := crcMultiply(unwind[k], diff) >> 16
	return flags == 0 || flags == dontFragment // the latter: sent without DF
}

// CRC polynomials are kept in reflected order: the coefficient of x^0 is the
// top bit.

const crcOne = 1 << 31

// crcMultiply is a*b modulo the CRC polynomial.
func crcMultiply(a, b uint32) (p uint32) {
	for ; a != 0; a <<= 1 {
		if a&crcOne != 0 {
			p ^= b
		}
		b = b>>1 ^ crc32.IEEE&-(b&1)
	}
	return p
}

// unwind[k] takes a CRC register back over k zero bytes.
var unwind = func() []uint32 {
	inverse := uint32(crcOne) // x^-8: x^8 to the power of 2^32-2, since x^(2^32-1) = 1
	for square, i := uint32(crcOne>>8), 0; i < 32; i++ {
		if i > 0 {
			inverse = crcMultiply(inverse, square)
		}
		square = crcMultiply(square, square)
	}
	t := make([]uint32, 4+12+udpLen+maxPacket+1)
	t[0] = crcOne
	for k := 1; k < len(t); k++ {
		t[k] = crcMultiply(t[k-1], inverse)
	}
	return t
}()

// maxPacket is the longest packet that is taken, from the base transport header to
// the ICRC, in bytes.
const maxPacket = bthLen + rethLen + immLen + 4096 + icrcLen
