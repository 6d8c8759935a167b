package rnbdwire

import (
	"encoding/binary"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
)

var le = binary.LittleEndian

// Version is the protocol's major version, the only one that travels.
const Version = 2

// Message types.
const (
	TypeSessInfo    = 0
	TypeSessInfoRsp = 1
	TypeOpen        = 2
	TypeOpenRsp     = 3
	TypeIO          = 4
	TypeClose       = 5
	// Extensions of ours have the types from 0x8000 up.
	TypeEvent      = 0x8000
	TypeEventRsp   = 0x8001
	TypeOpenAs     = 0x8002
	TypeWriter     = 0x8003
	TypeWriterRsp  = 0x8004
	TypeIOOnce     = 0x8005
	TypeIOAgain    = 0x8006
	TypeList       = 0x8007
	TypeListRsp    = 0x8008
	TypeExtents    = 0x8009
	TypeExtentsRsp = 0x800a
	TypeAskReason  = 0x8010
	TypeReason     = 0x8011
	typeNone       = 0xffff
)

// Sizes of the messages in bytes. Each begins with a type and two bytes of
// padding.
const (
	headerSize      = 2 + 2
	SessInfoSize    = headerSize + 1 + 31
	SessInfoRspSize = SessInfoSize
	OpenSize        = headerSize + 1 + 1 + NameSize + 3
	OpenRspSize     = headerSize + 4 + 8 + 5*4 + 4*2 + 1 + 1 + 8 + 2
	OpenRspFullSize = OpenRspSize + 8
	OpenAsSize      = OpenSize + IOModeSize
	CloseSize       = headerSize + 4
	IOSize          = headerSize + 4 + 8 + 4 + 4 + 2 + 6
	EventSize       = headerSize + 4 + 8
	EventRspSize    = headerSize + 4 + 8 + 8 + 2 + 6
	WriterSize      = headerSize + 4 + 8
	WriterRspSize   = headerSize + 4 + 8 + 8
	IOOnceSize      = IOSize + 8
	IOAgainSize     = IOOnceSize + 8 + 8
	ListSize        = headerSize + 4 + NameSize + 1
	ExtentsSize     = headerSize + 4 + 8 + 8
	ExtentsRspSize  = extents.Size
	AskReasonSize   = headerSize + 4 + NameSize + 1
	ReasonSize      = headerSize + 2 + 2 + MaxReasonText
	// ListRspMin and ListRspMax are the bytes of a ListRsp that a client may ask for.
	ListRspMin = 4096
	ListRspMax = 65536

	// MaxReasonText is the largest text of a Reason, in bytes.
	MaxReasonText = 504

	// NameSize is the field of a device's name, its NUL included.
	NameSize = 255
	// IOModeSize is the field of an io mode's name, its NUL included.
	IOModeSize = 32
	// ioMin is the least length of an I/O message in bytes; a priority may be
	// missing.
	ioMin = IOSize - 6
)

// The sizes, checked at compile time.
var (
	_ [36]struct{}  = [SessInfoSize]struct{}{}
	_ [264]struct{} = [OpenSize]struct{}{}
	_ [296]struct{} = [OpenAsSize]struct{}{}
	_ [56]struct{}  = [OpenRspSize]struct{}{}
	_ [64]struct{}  = [OpenRspFullSize]struct{}{}
	_ [8]struct{}   = [CloseSize]struct{}{}
	_ [32]struct{}  = [IOSize]struct{}{}
	_ [16]struct{}  = [EventSize]struct{}{}
	_ [32]struct{}  = [EventRspSize]struct{}{}
	_ [16]struct{}  = [WriterSize]struct{}{}
	_ [24]struct{}  = [WriterRspSize]struct{}{}
	_ [40]struct{}  = [IOOnceSize]struct{}{}
	_ [56]struct{}  = [IOAgainSize]struct{}{}
	_ [264]struct{} = [ListSize]struct{}{}
	_ [24]struct{}  = [ExtentsSize]struct{}{}
	_ [264]struct{} = [AskReasonSize]struct{}{}
	_ [512]struct{} = [ReasonSize]struct{}{}
)

// TypeOf is the type of a message; of one too short to have any, a value that
// no message has.
func TypeOf(msg []byte) uint16 {
	if len(msg) < headerSize {
		return typeNone
	}
	return le.Uint16(msg)
}

func putHeader(msg []byte, typ uint16, size int) []byte {
	msg = msg[:size]
	clear(msg)
	le.PutUint16(msg, typ)
	return msg
}
