package nbdwire

import "encoding/binary"

var be = binary.BigEndian

// Magic numbers.
const (
	MagicServer      = 0x4e42444d41474943 // "NBDMAGIC"
	MagicOption      = 0x49484156454f5054 // "IHAVEOPT"
	MagicOptionReply = 0x0003e889045565a9
	MagicRequest     = 0x25609513
	MagicSimple      = 0x67446698 // of a simple reply
	MagicChunk       = 0x668e33ef // of a chunk of a structured reply
)

// Handshake flags. Those of the client have the same values.
const (
	FlagFixedNewstyle = 1 << 0
	FlagNoZeroes      = 1 << 1
)

// Options of the negotiation.
const (
	OptExportName      = 1
	OptAbort           = 2
	OptList            = 3
	OptStartTLS        = 5
	OptInfo            = 6
	OptGo              = 7
	OptStructuredReply = 8
	OptListMetaContext = 9
	OptSetMetaContext  = 10
)

// Replies to options. Those with the bit RepErrors are refusals.
const (
	RepAck        = 1
	RepServer     = 2
	RepInfo       = 3
	RepMetaCtx    = 4
	RepErrors     = 1 << 31
	RepErrUnsup   = RepErrors | 1
	RepErrPolicy  = RepErrors | 2
	RepErrInvalid = RepErrors | 3
	RepErrTLSReqd = RepErrors | 5
	RepErrUnknown = RepErrors | 6
	RepErrTooBig  = RepErrors | 9
)

// Information items of INFO and GO.
const (
	InfoExport    = 0
	InfoName      = 1
	InfoBlockSize = 3
)

// Transmission flags of an export.
const (
	HasFlags        = 1 << 0
	ReadOnly        = 1 << 1
	SendFlush       = 1 << 2
	SendFUA         = 1 << 3
	Rotational      = 1 << 4
	SendTrim        = 1 << 5
	SendWriteZeroes = 1 << 6
	CanMultiConn    = 1 << 8
)

// Commands of the transmission phase.
const (
	CmdRead        = 0
	CmdWrite       = 1
	CmdDisc        = 2
	CmdFlush       = 3
	CmdTrim        = 4
	CmdWriteZeroes = 6
	CmdBlockStatus = 7
)

// Flags of commands.
const (
	CmdFlagFUA    = 1 << 0 // on stable storage before the reply
	CmdFlagNoHole = 1 << 1 // WRITE_ZEROES leaves the range allocated
	CmdFlagReqOne = 1 << 3 // BLOCK_STATUS: one extent is enough
)

// Types and flags of the chunks of structured replies. Types with the bit ChunkErrors are
// errors.
const (
	ChunkDone        = 1 << 0 // flag: the last chunk of its reply
	ChunkNone        = 0
	ChunkOffsetData  = 1
	ChunkOffsetHole  = 2
	ChunkBlockStatus = 5
	ChunkErrors      = 1 << 15
	ChunkError       = ChunkErrors | 1
	ChunkErrorOffset = ChunkErrors | 2
)

// Sizes in bytes.
const (
	GreetingSize    = 18
	OptionSize      = 16 // header of an option: magic, option, length
	OptionReplySize = 20 // header of a reply to an option
	RequestSize     = 28
	SimpleSize      = 16
	ChunkSize       = 20             // header of a chunk
	DataChunkSize   = ChunkSize + 8  // with the offset of the data
	HoleChunkSize   = ChunkSize + 12 // with offset and length of the hole
	ErrorChunkSize  = ChunkSize + 6  // with the errno and the length of the message
	StatusEntrySize = 8              // of a BLOCK_STATUS chunk: length, flags

	// MaxPayload is the longest read or write if the server tells no other limit.
	MaxPayload = 32 << 20
	// MaxName is the longest name of an export.
	MaxName = 4096
)

// The metadata context base:allocation.
const (
	AllocationContext = "base:allocation"
	StateHole         = 1 << 0 // flag of a status entry: not allocated
	StateZero         = 1 << 1 // flag of a status entry: reads as zeroes
)

// Request is the header of a command, RequestSize bytes.
type Request []byte

func (r Request) Magic() uint32  { return be.Uint32(r) }
func (r Request) Flags() uint16  { return be.Uint16(r[4:]) }
func (r Request) Type() uint16   { return be.Uint16(r[6:]) }
func (r Request) Cookie() uint64 { return be.Uint64(r[8:]) }
func (r Request) Offset() uint64 { return be.Uint64(r[16:]) }
func (r Request) Length() uint32 { return be.Uint32(r[24:]) }

// PutRequest writes the header of a command into b.
func PutRequest(b []byte, flags, command uint16, cookie, offset uint64, length uint32) {
	_ = b[RequestSize-1]
	be.PutUint32(b, MagicRequest)
	be.PutUint16(b[4:], flags)
	be.PutUint16(b[6:], command)
	be.PutUint64(b[8:], cookie)
	be.PutUint64(b[16:], offset)
	be.PutUint32(b[24:], length)
}

// Simple is a simple reply, SimpleSize bytes. The payload of a read without error follows.
type Simple []byte

func (s Simple) Magic() uint32  { return be.Uint32(s) }
func (s Simple) Errno() uint32  { return be.Uint32(s[4:]) }
func (s Simple) Cookie() uint64 { return be.Uint64(s[8:]) }

// PutSimple writes a simple reply into b.
func PutSimple(b []byte, cookie uint64, errno uint32) {
	_ = b[SimpleSize-1]
	be.PutUint32(b, MagicSimple)
	be.PutUint32(b[4:], errno)
	be.PutUint64(b[8:], cookie)
}

// Chunk is the header of a chunk of a structured reply, ChunkSize bytes. Length counts the
// bytes behind the header.
type Chunk []byte

func (c Chunk) Magic() uint32  { return be.Uint32(c) }
func (c Chunk) Flags() uint16  { return be.Uint16(c[4:]) }
func (c Chunk) Type() uint16   { return be.Uint16(c[6:]) }
func (c Chunk) Cookie() uint64 { return be.Uint64(c[8:]) }
func (c Chunk) Length() uint32 { return be.Uint32(c[16:]) }

// Offset is that of an OFFSET_DATA or OFFSET_HOLE chunk; c has DataChunkSize bytes.
func (c Chunk) Offset() uint64 { return be.Uint64(c[ChunkSize:]) }

// HoleLength is the length of the hole of an OFFSET_HOLE chunk; c has HoleChunkSize bytes.
func (c Chunk) HoleLength() uint32 { return be.Uint32(c[ChunkSize+8:]) }

// Errno is that of an error chunk; c has ErrorChunkSize bytes.
func (c Chunk) Errno() uint32 { return be.Uint32(c[ChunkSize:]) }

// ContextID is that of a BLOCK_STATUS chunk; c has ChunkSize+4 bytes.
func (c Chunk) ContextID() uint32 { return be.Uint32(c[ChunkSize:]) }

// PutChunk writes the header of a chunk into b.
func PutChunk(b []byte, flags, kind uint16, cookie uint64, length uint32) {
	_ = b[ChunkSize-1]
	be.PutUint32(b, MagicChunk)
	be.PutUint16(b[4:], flags)
	be.PutUint16(b[6:], kind)
	be.PutUint64(b[8:], cookie)
	be.PutUint32(b[16:], length)
}

// PutDataChunk writes the header of a chunk of n payload bytes at offset, DataChunkSize
// bytes.
func PutDataChunk(b []byte, flags uint16, cookie, offset uint64, n uint32) {
	PutChunk(b, flags, ChunkOffsetData, cookie, n+8)
	be.PutUint64(b[ChunkSize:], offset)
}

// PutHoleChunk writes a chunk that says that n bytes at offset are zeroes, HoleChunkSize
// bytes.
func PutHoleChunk(b []byte, flags uint16, cookie, offset uint64, n uint32) {
	PutChunk(b, flags, ChunkOffsetHole, cookie, 12)
	be.PutUint64(b[ChunkSize:], offset)
	be.PutUint32(b[ChunkSize+8:], n)
}

// PutErrorChunk writes the last chunk of a reply, an error without a message,
// ErrorChunkSize bytes.
func PutErrorChunk(b []byte, cookie uint64, errno uint32) {
	PutChunk(b, ChunkDone, ChunkError, cookie, 6)
	be.PutUint32(b[ChunkSize:], errno)
	be.PutUint16(b[ChunkSize+4:], 0)
}

// StatusEntry is one extent of a BLOCK_STATUS chunk: its length in bytes and its flags.
func StatusEntry(b []byte) (length, flags uint32) { return be.Uint32(b), be.Uint32(b[4:]) }

// Option is the header of an option, OptionSize bytes. Length counts the data behind it.
type Option []byte

func (o Option) Magic() uint64  { return be.Uint64(o) }
func (o Option) Number() uint32 { return be.Uint32(o[8:]) }
func (o Option) Length() uint32 { return be.Uint32(o[12:]) }

// AppendOption appends an option with its data to b.
func AppendOption(b []byte, option uint32, data []byte) []byte {
	b = be.AppendUint64(b, MagicOption)
	b = be.AppendUint32(b, option)
	b = be.AppendUint32(b, uint32(len(data)))
	return append(b, data...)
}

// OptionReply is the header of a reply to an option, OptionReplySize bytes.
type OptionReply []byte

func (o OptionReply) Magic() uint64  { return be.Uint64(o) }
func (o OptionReply) Option() uint32 { return be.Uint32(o[8:]) }
func (o OptionReply) Kind() uint32   { return be.Uint32(o[12:]) }
func (o OptionReply) Length() uint32 { return be.Uint32(o[16:]) }

// AppendOptionReply appends a reply to an option with its data to b.
func AppendOptionReply(b []byte, option, kind uint32, data []byte) []byte {
	b = be.AppendUint64(b, MagicOptionReply)
	b = be.AppendUint32(b, option)
	b = be.AppendUint32(b, kind)
	b = be.AppendUint32(b, uint32(len(data)))
	return append(b, data...)
}

// AppendGreeting appends the greeting of a server to b.
func AppendGreeting(b []byte, flags uint16) []byte {
	b = be.AppendUint64(b, MagicServer)
	b = be.AppendUint64(b, MagicOption)
	return be.AppendUint16(b, flags)
}

// AppendExportInfo appends the data of an INFO_EXPORT reply to b: the size of the export
// in bytes and its transmission flags.
func AppendExportInfo(b []byte, size uint64, flags uint16) []byte {
	b = be.AppendUint16(b, InfoExport)
	b = be.AppendUint64(b, size)
	return be.AppendUint16(b, flags)
}

// AppendBlockSizeInfo appends the data of an INFO_BLOCK_SIZE reply to b, in bytes.
func AppendBlockSizeInfo(b []byte, minimum, preferred, payload uint32) []byte {
	b = be.AppendUint16(b, InfoBlockSize)
	b = be.AppendUint32(b, minimum)
	b = be.AppendUint32(b, preferred)
	return be.AppendUint32(b, payload)
}

// AppendName appends a name with its length in front to b.
func AppendName(b []byte, name string) []byte {
	return append(be.AppendUint32(b, uint32(len(name))), name...)
}
