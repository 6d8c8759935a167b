package rnbdwire

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
)

// Messages about the data and the holes of a device:
// docs/extend/protocol/rnbd.md, "Extents".

// Extents asks for the extents of a range.
type Extents []byte

// IsValid reports whether Fields may be used.
func (m Extents) IsValid() bool { return len(m) >= ExtentsSize && TypeOf(m) == TypeExtents }

// ExtentsFields are the fields of an Extents.
type ExtentsFields struct {
	DeviceID uint32 // of the OPEN_RSP
	Sector   uint64 // where the range begins, in units of 512 bytes
	Sectors  uint64 // its length
}

// Fields reads the message.
func (m Extents) Fields() ExtentsFields {
	return ExtentsFields{DeviceID: le.Uint32(m[4:]), Sector: le.Uint64(m[8:]), Sectors: le.Uint64(m[16:])}
}

// Put writes the message into m, which has room for ExtentsSize bytes.
func (f ExtentsFields) Put(m []byte) {
	m = putHeader(m, TypeExtents, ExtentsSize)
	le.PutUint32(m[4:], f.DeviceID)
	le.PutUint64(m[8:], f.Sector)
	le.PutUint64(m[16:], f.Sectors)
}

// ExtentsRsp answers an Extents.
type ExtentsRsp []byte

// Extents reads the list, which is about size bytes. The error says what is
// malformed.
func (m ExtentsRsp) Extents(size uint64) ([]extents.Extent, error) {
	if TypeOf(m) != TypeExtentsRsp {
		return nil, fmt.Errorf("answer of %d bytes, type %#x: it is no list of extents", len(m), TypeOf(m))
	}
	return extents.Parse(m, size)
}

// PutExtents writes an ExtentsRsp into m, which has room for ExtentsRspSize bytes.
func PutExtents(m []byte, list []extents.Extent) {
	extents.Put(m, list)
	le.PutUint16(m, TypeExtentsRsp)
}
