package extents

import (
	"encoding/binary"
	"fmt"
	"slices"
)

var le = binary.LittleEndian

const (
	// Size is the length of an encoded list in bytes.
	Size = 4096
	// Max is the most ranges of a list.
	Max = (Size - headSize) / entrySize

	headSize  = 8
	entrySize = 16
	unit      = 512 // every range is a multiple of it
	flagHole  = 1 << 0
)

// Extent is a range of a device.
type Extent struct {
	Len  uint64 // bytes, a multiple of 512, not 0
	Hole bool   // it reads as zeroes and takes no space
}

// Add returns list with a range of n bytes behind it. A neighbour of the same kind
// becomes longer. False: the list has Max ranges, and no room.
func Add(list []Extent, n uint64, hole bool) ([]Extent, bool) {
	switch last := len(list) - 1; {
	case n == 0:
		return list, true
	case last >= 0 && list[last].Hole == hole:
		list[last].Len += n
		return list, true
	case len(list) == Max:
		return list, false
	}
	return append(list, Extent{n, hole}), true
}

// Put writes list, at most Max ranges, to b, which has at least Size bytes. The
// first four bytes of b are 0 then, for a header of the caller.
func Put(b []byte, list []Extent) {
	b = b[:Size]
	clear(b)
	le.PutUint32(b[4:], uint32(len(list)))
	for i, e := range list {
		at := b[headSize+i*entrySize:]
		le.PutUint64(at, e.Len)
		if e.Hole {
			le.PutUint32(at[8:], flagHole)
		}
	}
}

// Parse reads a list about size bytes. It looks at each byte of b once, so b may be
// memory that others write to. The error says what is malformed.
func Parse(b []byte, size uint64) ([]Extent, error) {
	return ParseInto(nil, b, size)
}

// ParseInto is Parse into the memory of list, whose content is overwritten. It
// allocates nothing for a list without errors if list has a capacity of Max.
func ParseInto(list []Extent, b []byte, size uint64) ([]Extent, error) {
	if len(b) < Size {
		return nil, fmt.Errorf("list of extents in %d bytes: it has %d", len(b), Size)
	}
	count := le.Uint32(b[4:])
	if count == 0 || count > Max {
		return nil, fmt.Errorf("list of %d extents: want 1 to %d", count, Max)
	}
	list = slices.Grow(list[:0], int(count))
	for i := range int(count) {
		at := b[headSize+i*entrySize:]
		e := Extent{Len: le.Uint64(at), Hole: le.Uint32(at[8:])&flagHole != 0}
		if e.Len == 0 || e.Len%unit != 0 || e.Len > size {
			return nil, fmt.Errorf("extent %d has %d bytes, %d are left", i, e.Len, size)
		}
		size -= e.Len
		list = append(list, e)
	}
	return list, nil
}
