package main

import "encoding/binary"

// The NBD wire format: fixed newstyle negotiation, simple and structured
// replies. Numbers are big-endian. docs/extend/protocol/nbd.md lists the supported
// parts.

const (
	magicServer     = 0x4e42444d41474943 // "NBDMAGIC"
	magicOption     = 0x49484156454f5054 // "IHAVEOPT"
	magicOptReply   = 0x0003e889045565a9
	magicRequest    = 0x25609513
	magicSimple     = 0x67446698
	magicStructured = 0x668e33ef
)

// Handshake flags; the client's bits have the same values.
const (
	flagFixedNewstyle = 1 << 0
	flagNoZeroes      = 1 << 1
)

// Options of the negotiation.
const (
	optExportName      = 1
	optAbort           = 2
	optList            = 3
	optStartTLS        = 5
	optInfo            = 6
	optGo              = 7
	optStructuredReply = 8
	optListMetaContext = 9
	optSetMetaContext  = 10
)

// Replies to options.
const (
	repAck        = 1
	repServer     = 2
	repInfo       = 3
	repMetaCtx    = 4
	repErrUnsup   = 1<<31 + 1
	repErrInvalid = 1<<31 + 3
	repErrTLSReqd = 1<<31 + 5
	repErrUnknown = 1<<31 + 6
	repErrTooBig  = 1<<31 + 9
)

// Information items of INFO and GO.
const (
	infoExport    = 0
	infoName      = 1
	infoBlockSize = 3
)

// Transmission flags of an export.
const (
	txHasFlags        = 1 << 0
	txReadOnly        = 1 << 1
	txSendFlush       = 1 << 2
	txSendFUA         = 1 << 3
	txRotational      = 1 << 4
	txSendTrim        = 1 << 5
	txSendWriteZeroes = 1 << 6
	txCanMultiConn    = 1 << 8
)

// Commands of the transmission phase.
const (
	cmdRead        = 0
	cmdWrite       = 1
	cmdDisc        = 2
	cmdFlush       = 3
	cmdTrim        = 4
	cmdWriteZeroes = 6
	cmdBlockStatus = 7
)

// Flags of commands.
const (
	cmdFlagFUA    = 1 << 0
	cmdFlagNoHole = 1 << 1
	cmdFlagReqOne = 1 << 3
)

// Structured replies.
const (
	chunkDone        = 1 << 0
	chunkNone        = 0
	chunkOffsetData  = 1
	chunkBlockStatus = 5
	chunkError       = 1<<15 + 1
)

const (
	requestSize   = 28
	simpleSize    = 16
	chunkSize     = 20            // header of a structured reply chunk
	dataChunkSize = chunkSize + 8 // offset of the data
	errChunkSize  = chunkSize + 6 // errno, length of the (empty) message
	maxHeader     = dataChunkSize // longest header in front of payload
	optionSize    = 16            // magic, option, length
	maxPayload    = 32 << 20      // bytes in one read or write
	preferredSize = 4096          // advertised preferred block size
	maxName       = 4096          // bytes in an export name
	maxOption     = 64 << 10      // bytes of an option's data
)

// The metadata context base:allocation.
const (
	allocationContext = "base:allocation"
	allocationID      = 1       // in replies, if it was selected
	baseContexts      = "base:" // all of its namespace, in LIST_META_CONTEXT
	stateHole         = 1 << 0
	stateZero         = 1 << 1
)

// requestHeader is a view of the 28 bytes in front of every command.
type requestHeader []byte

func (h requestHeader) Magic() uint32  { return binary.BigEndian.Uint32(h) }
func (h requestHeader) Flags() uint16  { return binary.BigEndian.Uint16(h[4:]) }
func (h requestHeader) Type() uint16   { return binary.BigEndian.Uint16(h[6:]) }
func (h requestHeader) Cookie() uint64 { return binary.BigEndian.Uint64(h[8:]) }
func (h requestHeader) Offset() uint64 { return binary.BigEndian.Uint64(h[16:]) }
func (h requestHeader) Length() uint32 { return binary.BigEndian.Uint32(h[24:]) }

// putSimple writes a simple reply, simpleSize bytes, into b.
func putSimple(b []byte, cookie uint64, errno uint32) {
	binary.BigEndian.PutUint32(b, magicSimple)
	binary.BigEndian.PutUint32(b[4:], errno)
	binary.BigEndian.PutUint64(b[8:], cookie)
}

// putChunk writes the header of a structured reply chunk into b.
func putChunk(b []byte, flags, kind uint16, cookie uint64, length uint32) {
	binary.BigEndian.PutUint32(b, magicStructured)
	binary.BigEndian.PutUint16(b[4:], flags)
	binary.BigEndian.PutUint16(b[6:], kind)
	binary.BigEndian.PutUint64(b[8:], cookie)
	binary.BigEndian.PutUint32(b[16:], length)
}

// putDataChunk writes the header of a chunk of n payload bytes at off.
func putDataChunk(b []byte, flags uint16, cookie, off uint64, n uint32) {
	putChunk(b, flags, chunkOffsetData, cookie, n+8)
	binary.BigEndian.PutUint64(b[chunkSize:], off)
}

// putErrChunk writes a whole error chunk without a message.
func putErrChunk(b []byte, cookie uint64, errno uint32) {
	putChunk(b, chunkDone, chunkError, cookie, 6)
	binary.BigEndian.PutUint32(b[chunkSize:], errno)
	binary.BigEndian.PutUint16(b[chunkSize+4:], 0)
}
