package iwarp

import (
	"encoding/binary"
	"fmt"
)

// A DDP segment travels in one FPDU. Offsets count from the first byte of the
// FPDU, its length field (RFC 5041, RFC 5040):
//
//	tagged (Write, Read Response)    untagged (all others)
//	0  ULPDU length, 2 bytes         0  ULPDU length, 2 bytes
//	2  DDP control                   2  DDP control
//	3  RDMAP control                 3  RDMAP control
//	4  STag                          4  Invalidate STag, or immediate of opcode F
//	8  TO, 8 bytes                   8  queue number
//	16 payload                       12 message sequence number
//	                                 16 message offset
//	                                 20 payload

const (
	taggedHeaderLen   = 14 // DDP header as ULPDU length counts it
	untaggedHeaderLen = 18
	fpduTagged        = 2 + taggedHeaderLen // with the length field
	fpduUntagged      = 2 + untaggedHeaderLen

	ctlTagged  = 0x80
	ctlLast    = 0x40
	ctlVersion = 0x01
	ctlDVMask  = 0x03

	rdmapVersion = 0x40
	rdmapRVMask  = 0xc0
	rdmapOpMask  = 0x0f

	queueSend      = 0
	queueRead      = 1
	queueTerminate = 2

	readRequestLen = 28
	immediateLen   = 8 // RFC 7306: 32-bit immediate, 32 bits of zero
)

// opcode of RDMAP.
type opcode byte

const (
	opWrite opcode = iota
	opReadRequest
	opReadResponse
	opSend
	opSendInv
	opSendSE
	opSendSEInv
	opTerminate
	opImmediate
	opImmediateSE
	// opSendImm is SEND WITH IMM, the one message that iWARP has no opcode
	// for. 0xF is reserved for experiments (RFC 6580); it is used only after
	// the extension block was exchanged.
	opSendImm opcode = 0xf
)

func (o opcode) tagged() bool { return o == opWrite || o == opReadResponse }

// isKnown reports whether o exists. Opcodes above Terminate exist only between ends
// that exchanged the extension block.
func (o opcode) isKnown(features byte) bool {
	switch {
	case o <= opTerminate:
		return true
	case o == opImmediate || o == opImmediateSE:
		return features&featureImmediate != 0
	case o == opSendImm:
		return features&featureSendImm != 0
	}
	return false
}

func (o opcode) queueNumber() uint32 {
	switch o {
	case opReadRequest:
		return queueRead
	case opTerminate:
		return queueTerminate
	}
	return queueSend
}

func (o opcode) invalidatesKey() bool { return o == opSendInv || o == opSendSEInv }

// fpduHeader is the start of an FPDU: 16 bytes when tagged, else 20.
type fpduHeader []byte

func (h fpduHeader) length() int   { return int(binary.BigEndian.Uint16(h)) }
func (h fpduHeader) tagged() bool  { return h[2]&ctlTagged != 0 }
func (h fpduHeader) last() bool    { return h[2]&ctlLast != 0 }
func (h fpduHeader) version() byte { return h[2] & ctlDVMask }
func (h fpduHeader) rdmap() byte   { return h[3] & rdmapRVMask }
func (h fpduHeader) op() opcode    { return opcode(h[3] & rdmapOpMask) }
func (h fpduHeader) stag() uint32  { return binary.BigEndian.Uint32(h[4:]) }
func (h fpduHeader) to() uint64    { return binary.BigEndian.Uint64(h[8:]) }
func (h fpduHeader) slot() uint32  { return binary.BigEndian.Uint32(h[4:]) }
func (h fpduHeader) qn() uint32    { return binary.BigEndian.Uint32(h[8:]) }
func (h fpduHeader) msn() uint32   { return binary.BigEndian.Uint32(h[12:]) }
func (h fpduHeader) mo() uint32    { return binary.BigEndian.Uint32(h[16:]) }

// size returns the number of bytes before the payload.
func (h fpduHeader) size() int {
	if h.tagged() {
		return fpduTagged
	}
	return fpduUntagged
}

// payload returns the number of payload bytes. It is negative if the length is
// shorter than the header.
func (h fpduHeader) payload() int { return h.length() + 2 - h.size() }

// tail returns the number of bytes behind the payload: pad and CRC.
func (h fpduHeader) tail() int { return padLen(h.length()) + crcLen }

func putTagged(b []byte, op opcode, last bool, payload int, stag uint32, to uint64) {
	binary.BigEndian.PutUint16(b, uint16(taggedHeaderLen+payload))
	b[2] = ctlTagged | ctlVersion | lastBit(last)
	b[3] = rdmapVersion | byte(op)
	binary.BigEndian.PutUint32(b[4:], stag)
	binary.BigEndian.PutUint64(b[8:], to)
}

func putUntagged(b []byte, op opcode, last bool, payload int, slot, msn, mo uint32) {
	binary.BigEndian.PutUint16(b, uint16(untaggedHeaderLen+payload))
	b[2] = ctlVersion | lastBit(last)
	b[3] = rdmapVersion | byte(op)
	binary.BigEndian.PutUint32(b[4:], slot)
	binary.BigEndian.PutUint32(b[8:], op.queueNumber())
	binary.BigEndian.PutUint32(b[12:], msn)
	binary.BigEndian.PutUint32(b[16:], mo)
}

func lastBit(last bool) byte {
	if last {
		return ctlLast
	}
	return 0
}

// readRequest is the 28-byte payload of a Read Request.
type readRequest []byte

func (r readRequest) sinkSTag() uint32   { return binary.BigEndian.Uint32(r) }
func (r readRequest) sinkTO() uint64     { return binary.BigEndian.Uint64(r[4:]) }
func (r readRequest) size() uint32       { return binary.BigEndian.Uint32(r[12:]) }
func (r readRequest) sourceSTag() uint32 { return binary.BigEndian.Uint32(r[16:]) }
func (r readRequest) sourceTO() uint64   { return binary.BigEndian.Uint64(r[20:]) }

func putReadRequest(b []byte, sinkSTag uint32, sinkTO uint64, size, sourceSTag uint32, sourceTO uint64) {
	binary.BigEndian.PutUint32(b, sinkSTag)
	binary.BigEndian.PutUint64(b[4:], sinkTO)
	binary.BigEndian.PutUint32(b[12:], size)
	binary.BigEndian.PutUint32(b[16:], sourceSTag)
	binary.BigEndian.PutUint64(b[20:], sourceTO)
}

// putImmediate writes the 8 bytes of Immediate Data.
func putImmediate(b []byte, imm uint32) {
	binary.BigEndian.PutUint32(b, imm)
	binary.BigEndian.PutUint32(b[4:], 0)
}

// termCode is layer, error type and error code of a Terminate, one byte each.
// Zero stands for no error.
type termCode uint32

func makeTermCode(layer, etype, code byte) termCode {
	return termCode(layer)<<16 | termCode(etype)<<8 | termCode(code)
}

func (c termCode) layer() byte { return byte(c >> 16) }
func (c termCode) etype() byte { return byte(c >> 8) }
func (c termCode) code() byte  { return byte(c) }

func (c termCode) String() string {
	s := fmt.Sprintf("%d/%d/%02x", c.layer(), c.etype(), c.code())
	if name := termNames[c]; name != "" {
		s += " (" + name + ")"
	}
	return s
}

const (
	termLocal         termCode = 0x0000ff
	termReadSTag      termCode = 0x000100
	termReadBounds    termCode = 0x000101
	termReadAccess    termCode = 0x000102
	termReadPD        termCode = 0x000103
	termReadWrap      termCode = 0x000104
	termInvPD         termCode = 0x000109
	termRDMAPVersion  termCode = 0x000205
	termOpcode        termCode = 0x000206
	termStream        termCode = 0x000207 // also: IRD exceeded
	termInvSTag       termCode = 0x000209
	termUnspecified   termCode = 0x0002ff
	termDDPFatal      termCode = 0x010000
	termSTag          termCode = 0x010100
	termBounds        termCode = 0x010101
	termSTagStream    termCode = 0x010102
	termWrap          termCode = 0x010103
	termTaggedVersion termCode = 0x010104
	termQN            termCode = 0x010201
	termNoBuffer      termCode = 0x010202
	termMSN           termCode = 0x010203
	termMO            termCode = 0x010204
	termTooLong       termCode = 0x010205
	termVersion       termCode = 0x010206
	termCRC           termCode = 0x020002
	termFraming       termCode = 0x020003
	termMPA           termCode = 0x020004
	termSetup         termCode = 0x020005
	termIRD           termCode = 0x020006
)

var termNames = map[termCode]string{
	termReadSTag: "RDMAP invalid STag", termReadBounds: "RDMAP base or bounds", termReadAccess: "RDMAP access rights",
	termReadPD: "RDMAP STag of another stream", termReadWrap: "RDMAP TO wrap", termInvPD: "STag cannot be invalidated",
	termRDMAPVersion: "RDMAP version", termOpcode: "unexpected opcode", termStream: "stream catastrophic, or too many reads",
	termInvSTag: "STag cannot be invalidated", termUnspecified: "RDMAP unspecified",
	0x000208: "RDMAP catastrophic, global", 0x0001ff: "RDMAP protection, unspecified",
	0x0000ff:     "RDMAP local catastrophic",
	termDDPFatal: "DDP local catastrophic", termSTag: "DDP invalid STag", termBounds: "DDP base or bounds",
	termSTagStream: "DDP STag of another stream", termWrap: "DDP TO wrap", termTaggedVersion: "DDP version",
	termQN: "invalid queue number", termNoBuffer: "no receive posted", termMSN: "MSN out of range",
	termMO: "invalid message offset", termTooLong: "message longer than its receive", termVersion: "DDP version",
	0x020001: "TCP connection lost", termCRC: "CRC mismatch", termFraming: "frame length", termMPA: "invalid MPA request or reply",
	termSetup: "MPA local catastrophic", termIRD: "insufficient IRD", 0x020007: "no matching RTR option",
}

const (
	hdrctLength = 0x80
	hdrctDDP    = 0x40
	hdrctRDMAP  = 0x20
	// maxTerminateLen is the payload of a Terminate with everything in it.
	maxTerminateLen = 6 + untaggedHeaderLen + readRequestLen
)

// faultySegment is the part of a faulty segment that the Terminate quotes.
type faultySegment struct {
	length  uint16 // ULPDU length
	ddp     [untaggedHeaderLen]byte
	ddpLen  int // 0: no segment
	read    [readRequestLen]byte
	hasRead bool
}

// setHeader copies the DDP header of h, an FPDU header.
func (o *faultySegment) setHeader(h fpduHeader) {
	o.length = uint16(h.length())
	o.ddpLen = copy(o.ddp[:], h[2:h.size()])
	o.hasRead = false
}

// putTerminate writes the payload of a Terminate in the layout of RFC 5040 and
// returns its length. b has room for maxTerminateLen bytes.
func putTerminate(b []byte, c termCode, o *faultySegment) int {
	b[0], b[1], b[2], b[3] = c.layer()<<4|c.etype(), c.code(), 0, 0
	if !quotesDDP(c) || o.ddpLen == 0 {
		return 4
	}
	b[2] = hdrctLength | hdrctDDP
	binary.BigEndian.PutUint16(b[4:], o.length)
	n := 6 + copy(b[6:], o.ddp[:o.ddpLen])
	if o.hasRead && c.layer() == 0 && c.etype() == 1 {
		b[2] |= hdrctRDMAP
		n += copy(b[n:], o.read[:])
	}
	return n
}

// quotesDDP reports whether a Terminate with c carries the offending DDP header.
func quotesDDP(c termCode) bool {
	switch c {
	case termRDMAPVersion, termOpcode, termTaggedVersion, termVersion:
		return false
	}
	return c.layer() == 1 || c.layer() == 0 && c.etype() != 0
}

// parseTerminate decodes the payload of a Terminate. siw on little-endian hosts
// swaps the nibbles of the first byte and mirrors the bits of the third. Both
// layouts are accepted; the result is for logs and for the status of READs.
func parseTerminate(b []byte) (c termCode, ok bool) {
	if len(b) < 4 {
		return 0, false
	}
	rfc, siw := makeTermCode(b[0]>>4, b[0]&0xf, b[1]), makeTermCode(b[0]&0xf, b[0]>>4, b[1])
	switch {
	case b[2]&0x07 != 0:
		return siw, true
	case b[2]&0xe0 != 0:
		return rfc, true
	case termNames[rfc] == "" && termNames[siw] != "":
		return siw, true
	case rfc == termSetup || rfc == termIRD:
		// These occur only in the start-up, and that is over: siw means RDMAP
		// version and unexpected opcode.
		return siw, true
	}
	return rfc, true
}
