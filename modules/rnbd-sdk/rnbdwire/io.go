package rnbdwire

// Flags in IOFields.RW; the low eight bits are the operation.
const (
	opMask       = 0xff
	FlagSync     = 1 << 8
	FlagFUA      = 1 << 9
	FlagPreflush = 1 << 10 // since version 2.1 (Linux 7.0)
	FlagNoUnmap  = 1 << 11 // of write zeroes, since version 2.2 (Linux 7.0)

	knownBits = opMask | FlagSync | FlagFUA | FlagPreflush | FlagNoUnmap
)

// IO is a block request.
type IO []byte

// IsValid reports whether the accessors may be used. A message without the
// priority and the padding behind it is one too.
func (m IO) IsValid() bool { return len(m) >= ioMin && TypeOf(m) == TypeIO }

// DeviceID is the id of the OPEN_RSP.
func (m IO) DeviceID() uint32 { return le.Uint32(m[4:]) }

// Sector is the first sector of 512 bytes; a flush has all bits set.
func (m IO) Sector() uint64 { return le.Uint64(m[8:]) }

// Op is the operation: read 0, write 1, flush 2, discard 3, secure erase 4,
// write zeroes 5.
func (m IO) Op() uint8 { return uint8(le.Uint32(m[16:]) & opMask) }

// Sync, FUA, Preflush and NoUnmap are the flags.
func (m IO) Sync() bool     { return le.Uint32(m[16:])&FlagSync != 0 }
func (m IO) FUA() bool      { return le.Uint32(m[16:])&FlagFUA != 0 }
func (m IO) Preflush() bool { return le.Uint32(m[16:])&FlagPreflush != 0 }
func (m IO) NoUnmap() bool  { return le.Uint32(m[16:])&FlagNoUnmap != 0 }

// HasUnknownFlags reports whether the message has flags that this package does not
// know. Their sender may come from a later version.
func (m IO) HasUnknownFlags() bool { return le.Uint32(m[16:])&^knownBits != 0 }

// BISize is the number of bytes on the device.
func (m IO) BISize() uint32 { return le.Uint32(m[20:]) }

// Prio is the Linux I/O priority; 0 where the message has none.
func (m IO) Prio() uint16 {
	if len(m) < IOSize {
		return 0
	}
	return le.Uint16(m[24:])
}

// IOFields are the fields of an IO.
type IOFields struct {
	DeviceID uint32
	Sector   uint64
	RW       uint32
	BISize   uint32
	Prio     uint16
}

// Put writes the message into m. m must have room for IOSize bytes.
func (f IOFields) Put(m []byte) {
	m = putHeader(m, TypeIO, IOSize)
	le.PutUint32(m[4:], f.DeviceID)
	le.PutUint64(m[8:], f.Sector)
	le.PutUint32(m[16:], f.RW)
	le.PutUint32(m[20:], f.BISize)
	le.PutUint16(m[24:], f.Prio)
}
