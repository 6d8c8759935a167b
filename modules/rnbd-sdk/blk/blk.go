package blk

// SectorSize is the unit of sectors on the wire and in Linux, in bytes,
// whatever the logical block size of a device.
const SectorSize = 512

// Op is a block operation. The values are those of the RNBD wire.
type Op uint8

const (
	Read        Op = 0
	Write       Op = 1
	Flush       Op = 2
	Discard     Op = 3
	SecureErase Op = 4
	WriteZeroes Op = 5

	opCount = 6

	// Extents asks for the data and the holes of a range. Only rings of front ends carry it,
	// and it is not Valid: it reads and writes nothing of the device.
	Extents Op = 16
)

var opNames = [opCount]string{"read", "write", "flush", "discard", "secure-erase", "write-zeroes"}

// Valid reports whether o is one of the operations above.
func (o Op) Valid() bool { return o < opCount }

// HasData reports whether the operation carries payload.
func (o Op) HasData() bool { return o == Read || o == Write }

// Modifies reports whether the operation changes the device's contents.
func (o Op) Modifies() bool {
	return o == Write || o == Discard || o == SecureErase || o == WriteZeroes
}

func (o Op) String() string {
	switch {
	case o.Valid():
		return opNames[o]
	case o == Extents:
		return "extents"
	}
	return "invalid"
}

// Flags qualify an operation.
type Flags uint8

const (
	// FUA: the data are on stable media before the answer (write,
	// write-zeroes).
	FUA Flags = 1 << iota
	// Sync: a user waits for the answer; a hint.
	Sync
	// NoUnmap: write-zeroes must leave the range allocated.
	NoUnmap

	// KnownFlags are all flags of requests.
	KnownFlags = FUA | Sync | NoUnmap
)

// AccessMode is how a client opens a device.
type AccessMode uint8

const (
	ReadOnly  AccessMode = 0 // any number of times
	ReadWrite AccessMode = 1 // by one client
	Migration AccessMode = 2 // by a second writer while a device moves
)

func (m AccessMode) String() string {
	switch m {
	case ReadOnly:
		return "ro"
	case ReadWrite:
		return "rw"
	case Migration:
		return "migration"
	}
	return "invalid"
}

// ParseAccessMode is the inverse of String.
func ParseAccessMode(s string) (AccessMode, bool) {
	for m := ReadOnly; m <= Migration; m++ {
		if m.String() == s {
			return m, true
		}
	}
	return 0, false
}

// Limits are the properties of a device. Sizes are in bytes.
type Limits struct {
	Size               uint64
	LogicalBlockSize   uint32 // power of two, 512..4096; every range is a multiple of it
	PhysicalBlockSize  uint32
	MaxIOSize          uint32 // largest read or write
	MaxDiscard         uint64 // 0: discard is not supported
	DiscardGranularity uint32
	DiscardAlignment   uint32
	MaxWriteZeroes     uint64 // 0: not supported
	MaxSegments        uint16
	SecureErase        bool
	WriteCache         bool // volatile cache: acknowledged writes need Flush
	FUA                bool // native FUA
	Rotational         bool
	ReadOnly           bool
}
