package shm

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// SQE is one request. Multi-byte fields have the byte order of the machine.
type SQE struct {
	Tag      uint64 // the submitter's name of the request; comes back in the CQE
	Offset   uint64 // byte offset on the device
	ArenaOff uint64 // byte offset of the payload in the arena
	Device   uint32 // index of the device in the plugin process
	Arena    uint32 // index of the arena
	Len      uint32 // bytes of the range on the device; payload bytes for read and write
	Op       blk.Op
	Flags    blk.Flags
	Prio     uint16 // Linux ioprio
	_        [24]byte
}

// CQE answers one SQE.
type CQE struct {
	Tag   uint64
	Errno uint32 // 0 or a positive Linux errno; the peer's word, check it
	_     uint32
}

// DefaultEntries is the usual size of a ring.
const DefaultEntries = 1024

// Limits of a ring's size; it is a power of two.
const (
	MinEntries = 1
	MaxEntries = 1 << 16
)

// The header of the ring's memory file. Fields that different parties write
// are 128 bytes apart: two cache lines, because of adjacent-line prefetch.
const (
	ringMagic   = 0x474e495244424e52 // "RNBDRING" read as little endian
	ringVersion = 1

	// knownFeatures are the feature bits this package understands. A ring
	// with any other bit set is refused.
	knownFeatures = 0

	sqeSize = 64
	cqeSize = 16

	headerSize = 4096 // the SQE array follows, then the CQE array
	slotSpace  = sqeSize + cqeSize
)

// header is the first page of a ring. Only the geometry is read at open; the
// words behind it are accessed atomically for ever after.
type header struct {
	Magic    uint64
	Version  uint32
	Features uint32
	Entries  uint32
	SQESize  uint32
	CQESize  uint32
	SQOff    uint32   // of the SQE array in the file
	CQOff    uint32   // of the CQE array in the file
	_        [92]byte // to 128

	sq words // written: Tail by the submitter, Head and Wake by the completer
	cq words // written: Tail by the completer, Head and Wake by the submitter
}

// ErrCorrupt says that the peer broke the ring: it moved an index by more than
// it may, or answered more than it was asked.
var ErrCorrupt = errors.New("ring is corrupt")

var errNotTaken = fmt.Errorf("%w: peer answered entries it never took", ErrCorrupt)

// ErrLayout says that a memory file is not a ring this package can use.
var ErrLayout = errors.New("not a usable ring")

// ringSize returns the bytes of a ring of n entries.
func ringSize(n int) int { return headerSize + n*slotSpace }

func checkEntries(n int) error {
	if n < MinEntries || n > MaxEntries || bits.OnesCount(uint(n)) != 1 {
		return fmt.Errorf("ring of %d entries: want a power of two, %d to %d", n, MinEntries, MaxEntries)
	}
	return nil
}

// geometry is the part of a header that is fixed at creation.
type geometry struct {
	magic                          uint64
	version, features, entries     uint32
	sqeSize, cqeSize, sqOff, cqOff uint32
}

func geometryOf(entries int) geometry {
	return geometry{
		magic: ringMagic, version: ringVersion, entries: uint32(entries),
		sqeSize: sqeSize, cqeSize: cqeSize,
		sqOff: headerSize, cqOff: uint32(headerSize + entries*sqeSize),
	}
}

// check accepts exactly the geometry that geometryOf makes, in a file of at
// least the bytes it needs.
func (g geometry) check(fileSize int64) error {
	switch {
	case g.magic != ringMagic:
		return fmt.Errorf("%w: magic is %#x, want %#x", ErrLayout, g.magic, uint64(ringMagic))
	case g.version != ringVersion:
		return fmt.Errorf("%w: ring layout version %d, this side speaks %d", ErrLayout, g.version, ringVersion)
	case g.features&^knownFeatures != 0:
		return fmt.Errorf("%w: unknown feature bits %#x", ErrLayout, g.features&^knownFeatures)
	}
	if err := checkEntries(int(g.entries)); err != nil {
		return fmt.Errorf("%w: %w", ErrLayout, err)
	}
	if want := geometryOf(int(g.entries)); g.sqeSize != want.sqeSize || g.cqeSize != want.cqeSize ||
		g.sqOff != want.sqOff || g.cqOff != want.cqOff {
		return fmt.Errorf("%w: entries of %d and %d bytes at %d and %d, want %d and %d at %d and %d", ErrLayout,
			g.sqeSize, g.cqeSize, g.sqOff, g.cqOff, want.sqeSize, want.cqeSize, want.sqOff, want.cqOff)
	}
	if need := int64(ringSize(int(g.entries))); fileSize < need {
		return fmt.Errorf("%w: file has %d bytes, %d entries need %d", ErrLayout, fileSize, g.entries, need)
	}
	return nil
}
