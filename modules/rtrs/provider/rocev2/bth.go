package rocev2

import "encoding/binary"

// Lengths of headers, in bytes. docs/extend/protocol/rocev2.md, Packets.
const (
	bthLen  = 12
	dethLen = 8
	rethLen = 16
	aethLen = 4
	immLen  = 4
	icrcLen = 4

	// maxHeader is the longest header of a reliable connection's packet.
	maxHeader = bthLen + rethLen + immLen

	psnMask = 1<<24 - 1
	qpnMask = 1<<24 - 1

	defaultPKey = 0xffff
	pkeyBase    = 0x7fff // without the membership bit

	cmQPN  = 1
	cmQKey = 0x80010000

	// cmFixedID in byte 8 of the base transport header of a message of the
	// connection manager says that the sender can fix the identification of a
	// connection. The bit is reserved: Linux sends 0 and ignores it.
	cmFixedID = 0x40
)

var be = binary.BigEndian

// opcode is the first byte of a packet.
type opcode uint8

const (
	opSendFirst       opcode = 0x00
	opSendMiddle      opcode = 0x01
	opSendLast        opcode = 0x02
	opSendLastImm     opcode = 0x03
	opSendOnly        opcode = 0x04
	opSendOnlyImm     opcode = 0x05
	opWriteFirst      opcode = 0x06
	opWriteMiddle     opcode = 0x07
	opWriteLast       opcode = 0x08
	opWriteLastImm    opcode = 0x09
	opWriteOnly       opcode = 0x0a
	opWriteOnlyImm    opcode = 0x0b
	opReadRequest     opcode = 0x0c
	opReadRespFirst   opcode = 0x0d
	opReadRespMiddle  opcode = 0x0e
	opReadRespLast    opcode = 0x0f
	opReadRespOnly    opcode = 0x10
	opAck             opcode = 0x11
	opSendLastInv     opcode = 0x16
	opSendOnlyInv     opcode = 0x17
	opDatagram        opcode = 0x64 // UD SEND only; also carries the connection manager
	opcodesOfRC              = 0x18
	ackCreditsInvalid        = 0x1f
)

// messageClass is the kind of message that a packet belongs to.
type messageClass uint8

const (
	classNone messageClass = iota
	classSend
	classWrite
	classRead
	classResponse
	classAck
)

// opShape describes the packets with an opcode.
type opShape struct {
	class       messageClass
	first, last bool // of its message
	reth, aeth  bool
	imm, inv    bool
	size        int // BTH and extension headers
}

// shapes are indexed by opcode; those with classNone are not taken.
var shapes = func() (s [opcodesOfRC]opShape) {
	s[opSendFirst] = opShape{class: classSend, first: true}
	s[opSendMiddle] = opShape{class: classSend}
	s[opSendLast] = opShape{class: classSend, last: true}
	s[opSendLastImm] = opShape{class: classSend, last: true, imm: true}
	s[opSendOnly] = opShape{class: classSend, first: true, last: true}
	s[opSendOnlyImm] = opShape{class: classSend, first: true, last: true, imm: true}
	s[opWriteFirst] = opShape{class: classWrite, first: true, reth: true}
	s[opWriteMiddle] = opShape{class: classWrite}
	s[opWriteLast] = opShape{class: classWrite, last: true}
	s[opWriteLastImm] = opShape{class: classWrite, last: true, imm: true}
	s[opWriteOnly] = opShape{class: classWrite, first: true, last: true, reth: true}
	s[opWriteOnlyImm] = opShape{class: classWrite, first: true, last: true, reth: true, imm: true}
	s[opReadRequest] = opShape{class: classRead, first: true, last: true, reth: true}
	s[opReadRespFirst] = opShape{class: classResponse, first: true, aeth: true}
	s[opReadRespMiddle] = opShape{class: classResponse}
	s[opReadRespLast] = opShape{class: classResponse, last: true, aeth: true}
	s[opReadRespOnly] = opShape{class: classResponse, first: true, last: true, aeth: true}
	s[opAck] = opShape{class: classAck, first: true, last: true, aeth: true}
	s[opSendLastInv] = opShape{class: classSend, last: true, inv: true}
	s[opSendOnlyInv] = opShape{class: classSend, first: true, last: true, inv: true}
	for i := range s {
		s[i].size = bthLen
		if s[i].reth {
			s[i].size += rethLen
		}
		if s[i].aeth {
			s[i].size += aethLen
		}
		if s[i].imm || s[i].inv {
			s[i].size += immLen
		}
	}
	return s
}()

// bth is a packet from its base transport header on.
type bth []byte

func (b bth) opcode() opcode { return opcode(b[0]) }
func (b bth) pad() int       { return int(b[1]>>4) & 3 }
func (b bth) version() byte  { return b[1] & 0xf }
func (b bth) pkey() uint16   { return be.Uint16(b[2:]) }
func (b bth) qpn() uint32    { return be.Uint32(b[4:]) & qpnMask }
func (b bth) ackReq() bool   { return b[8]&0x80 != 0 }
func (b bth) fixedID() bool  { return b[8]&cmFixedID != 0 }
func (b bth) psn() uint32    { return be.Uint32(b[8:]) & psnMask }

// putBTH writes a base transport header over b.
func putBTH(b []byte, op opcode, pad int, qpn, psn uint32, ack bool) {
	b[0], b[1] = byte(op), byte(pad)<<4
	be.PutUint16(b[2:], defaultPKey)
	be.PutUint32(b[4:], qpn&qpnMask)
	be.PutUint32(b[8:], psn&psnMask)
	if ack {
		b[8] |= 0x80
	}
}

// reth is the header that names the peer's memory.
type reth []byte

func (r reth) addr() uint64   { return be.Uint64(r) }
func (r reth) key() uint32    { return be.Uint32(r[8:]) }
func (r reth) length() uint32 { return be.Uint32(r[12:]) }

func putRETH(b []byte, addr uint64, key, length uint32) {
	be.PutUint64(b, addr)
	be.PutUint32(b[8:], key)
	be.PutUint32(b[12:], length)
}

// aeth is the header of an answer.
type aeth []byte

func (a aeth) syndrome() byte { return a[0] }
func (a aeth) msn() uint32    { return be.Uint32(a) & psnMask }

func putAETH(b []byte, syndrome byte, msn uint32) {
	be.PutUint32(b, uint32(syndrome)<<24|msn&psnMask)
}

// Syndromes of an AETH: kind in bits 7..5, value below.
const (
	syndromeAck      = 0x00
	syndromeRNR      = 0x20
	syndromeNAK      = 0x60
	syndromeKindMask = 0xe0

	nakSequence  = 0x60
	nakInvalid   = 0x61
	nakAccess    = 0x62
	nakOperation = 0x63
)

// rnrDelays are the RNR timer codes, in units of 10 microseconds.
var rnrDelays = [32]int64{65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152}

// rnrDelay returns how long the sender waits after an RNR NAK, in nanoseconds.
func rnrDelay(code byte) int64 { return rnrDelays[code&0x1f] * 10_000 }

// psnDiff returns a - b for packet sequence numbers. They wrap around.
func psnDiff(a, b uint32) int32 { return int32((a-b)<<8) >> 8 }

func psnAdd(a uint32, n uint32) uint32 { return (a + n) & psnMask }

// padLen returns the number of pad bytes behind a payload of n bytes.
func padLen(n int) int { return -n & 3 }

// packetCount returns the number of packets of a message of n bytes.
func packetCount(n uint32, mtu uint32) uint32 {
	if n == 0 {
		return 1
	}
	return (n-1)/mtu + 1
}
