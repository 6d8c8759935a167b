package rnbdwire

import (
	"bytes"
	"fmt"
	"strings"
)

// Open asks for a device.
type Open []byte

// IsValid reports whether the accessors may be used: the name must end.
func (m Open) IsValid() bool {
	return len(m) >= OpenSize && TypeOf(m) == TypeOpen && bytes.IndexByte(m[6:6+NameSize], 0) >= 0
}

// AccessMode is 0 read-only, 1 read-write, 2 migration.
func (m Open) AccessMode() uint8 { return m[4] }

// Name is the device's name, as the client's user gave it.
func (m Open) Name() string {
	name := m[6 : 6+NameSize]
	return string(name[:bytes.IndexByte(name, 0)])
}

// OpenFields are the fields of an Open.
type OpenFields struct {
	AccessMode uint8
	Name       string // 1 to 254 bytes, no NUL
}

// Put writes the message into m. m must have room for OpenSize bytes.
func (f OpenFields) Put(m []byte) error {
	if n := len(f.Name); n == 0 || n >= NameSize || bytes.IndexByte([]byte(f.Name), 0) >= 0 {
		return fmt.Errorf("device name of %d bytes: it has 1 to %d, without NUL", n, NameSize-1)
	}
	m = putHeader(m, TypeOpen, OpenSize)
	m[4] = f.AccessMode
	copy(m[6:], f.Name)
	return nil
}

// OpenAs is an Open that names the io mode: docs/extend/protocol/rnbd.md, "Io modes".
type OpenAs []byte

// IsValid reports whether the accessors may be used: both names must end.
func (m OpenAs) IsValid() bool {
	return len(m) >= OpenAsSize && TypeOf(m) == TypeOpenAs &&
		bytes.IndexByte(m[6:6+NameSize], 0) >= 0 && bytes.IndexByte(m[OpenSize:OpenAsSize], 0) >= 0
}

// AccessMode is that of an Open.
func (m OpenAs) AccessMode() uint8 { return Open(m).AccessMode() }

// Name is that of an Open.
func (m OpenAs) Name() string { return Open(m).Name() }

// IOMode is the name of the io mode; empty: the server chooses.
func (m OpenAs) IOMode() string {
	mode := m[OpenSize:OpenAsSize]
	return string(mode[:bytes.IndexByte(mode, 0)])
}

// OpenAsFields are the fields of an OpenAs.
type OpenAsFields struct {
	OpenFields
	IOMode string // at most 31 bytes, no NUL
}

// Put writes the message into m. m must have room for OpenAsSize bytes.
func (f OpenAsFields) Put(m []byte) error {
	if n := len(f.IOMode); n >= IOModeSize || strings.IndexByte(f.IOMode, 0) >= 0 {
		return fmt.Errorf("name of an io mode of %d bytes: it has at most %d, without NUL", n, IOModeSize-1)
	}
	if err := f.OpenFields.Put(m); err != nil {
		return err
	}
	m = m[:OpenAsSize]
	le.PutUint16(m, TypeOpenAs)
	clear(m[OpenSize:])
	copy(m[OpenSize:], f.IOMode)
	return nil
}

// Close gives a device back.
type Close []byte

// IsValid reports whether the accessors may be used.
func (m Close) IsValid() bool { return len(m) >= CloseSize && TypeOf(m) == TypeClose }

// DeviceID is the id of the OPEN_RSP.
func (m Close) DeviceID() uint32 { return le.Uint32(m[4:]) }

// CloseFields are the fields of a Close.
type CloseFields struct{ DeviceID uint32 }

// Put writes the message into m. m must have room for CloseSize bytes.
func (f CloseFields) Put(m []byte) { le.PutUint32(putHeader(m, TypeClose, CloseSize)[4:], f.DeviceID) }

// Bits of OpenRspFields.CachePolicy.
const (
	CacheFUA       = 1 << 0
	CacheWriteBack = 1 << 1
)

// OpenRsp describes an opened device.
type OpenRsp []byte

// IsValid reports whether Fields may be used. It does not check the type, as the
// kernel's client does not.
func (m OpenRsp) IsValid() bool { return len(m) >= OpenRspSize }

// OpenRspFields are the fields of an OpenRsp. Sectors have 512 bytes.
type OpenRspFields struct {
	DeviceID            uint32
	Sectors             uint64 // size of the device
	MaxHWSectors        uint32
	MaxWriteZeroesSects uint32 // 0: not supported
	MaxDiscardSectors   uint32 // 0: not supported
	DiscardGranularity  uint32 // bytes
	DiscardAlignment    uint32 // bytes
	PhysicalBlockSize   uint16 // bytes
	LogicalBlockSize    uint16 // bytes
	MaxSegments         uint16
	SecureDiscard       uint16 // not 0: supported
	Rotational          bool   // kernels from 6.0 on neither tell nor look
	CachePolicy         uint8

	// Extensions, from servers that announce FeatureIdentity: docs/extend/protocol/rnbd.md,
	// "Identity". 0: not told.
	Volume     uint64 // names the storage of the device: another volume, another number
	Properties uint16 // differs when any limit but the size does

	// Verifier is the incarnation of the storage, in an OpenRsp of OpenRspFullSize bytes
	// only: docs/extend/protocol/rnbd.md, "Writes that a power cut loses". 0: not told.
	Verifier Verifier
}

// Verifier names an incarnation of the storage of a device. Its lowest bit says that
// acknowledged writes without a flush are lost with the incarnation; the other bits are
// the name.
type Verifier uint64

// NewVerifier returns the Verifier of the incarnation with that hash. It is not 0.
func NewVerifier(hash uint64, loses bool) Verifier {
	v := Verifier(hash) &^ 1
	if v == 0 {
		v = 2
	}
	if loses {
		v |= 1
	}
	return v
}

// LosesWrites reports whether acknowledged writes without a flush are lost with the
// incarnation.
func (v Verifier) LosesWrites() bool { return v&1 != 0 }

// IsSame reports whether both name the same incarnation.
func (v Verifier) IsSame(other Verifier) bool { return v>>1 == other>>1 }

// Fields reads the message. A message that is shorter than OpenRspFullSize bytes has no
// Verifier.
func (m OpenRsp) Fields() OpenRspFields {
	f := OpenRspFields{
		DeviceID:            le.Uint32(m[4:]),
		Sectors:             le.Uint64(m[8:]),
		MaxHWSectors:        le.Uint32(m[16:]),
		MaxWriteZeroesSects: le.Uint32(m[20:]),
		MaxDiscardSectors:   le.Uint32(m[24:]),
		DiscardGranularity:  le.Uint32(m[28:]),
		DiscardAlignment:    le.Uint32(m[32:]),
		PhysicalBlockSize:   le.Uint16(m[36:]),
		LogicalBlockSize:    le.Uint16(m[38:]),
		MaxSegments:         le.Uint16(m[40:]),
		SecureDiscard:       le.Uint16(m[42:]),
		Rotational:          m[44] != 0,
		CachePolicy:         m[45],
		Volume:              le.Uint64(m[46:]),
		Properties:          le.Uint16(m[54:]),
	}
	if len(m) >= OpenRspFullSize {
		f.Verifier = Verifier(le.Uint64(m[56:]))
	}
	return f
}

// Put writes the message into m. m must have room for OpenRspSize bytes. PutFull also
// writes the Verifier.
func (f OpenRspFields) Put(m []byte) {
	m = putHeader(m, TypeOpenRsp, OpenRspSize)
	le.PutUint32(m[4:], f.DeviceID)
	le.PutUint64(m[8:], f.Sectors)
	le.PutUint32(m[16:], f.MaxHWSectors)
	le.PutUint32(m[20:], f.MaxWriteZeroesSects)
	le.PutUint32(m[24:], f.MaxDiscardSectors)
	le.PutUint32(m[28:], f.DiscardGranularity)
	le.PutUint32(m[32:], f.DiscardAlignment)
	le.PutUint16(m[36:], f.PhysicalBlockSize)
	le.PutUint16(m[38:], f.LogicalBlockSize)
	le.PutUint16(m[40:], f.MaxSegments)
	le.PutUint16(m[42:], f.SecureDiscard)
	if f.Rotational {
		m[44] = 1
	}
	m[45] = f.CachePolicy
	le.PutUint64(m[46:], f.Volume)
	le.PutUint16(m[54:], f.Properties)
}

// PutFull writes the message with its Verifier into m. m must have room for
// OpenRspFullSize bytes.
func (f OpenRspFields) PutFull(m []byte) {
	f.Put(m)
	le.PutUint64(m[OpenRspSize:OpenRspFullSize], uint64(f.Verifier))
}
