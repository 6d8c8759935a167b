package load

import (
	"encoding/binary"
	"fmt"
)

// Pattern fills sectors so that each can be told from all other contents: data
// of another place, older data, half a sector. It remembers how often each
// sector was written. Jobs may use it at the same time for regions of their
// own.
type Pattern struct {
	seed        uint64 // of this run: distinguishes its sectors from those of other runs
	generations []uint32
}

// NewPattern is for the first size bytes of a device. It takes 4 bytes of
// memory for each sector.
func NewPattern(size, seed uint64) *Pattern {
	return &Pattern{seed: seed, generations: make([]uint32, size/sector)}
}

// fill makes b the next generation of the sectors from off on.
func (p *Pattern) fill(b []byte, off uint64) {
	for at := uint64(0); at < uint64(len(b)); at += sector {
		s := (off + at) / sector
		p.generations[s]++
		p.put(b[at:at+sector], s, p.generations[s])
	}
}

// put writes sector s in its g-th generation to b: both numbers, then words
// derived from them.
func (p *Pattern) put(b []byte, s uint64, g uint32) {
	binary.LittleEndian.PutUint64(b, s)
	binary.LittleEndian.PutUint64(b[8:], uint64(g))
	x := p.key(s, g)
	for i := 16; i < sector; i += 8 {
		x ^= x << 13 // xorshift64
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(b[i:], x)
	}
}

// key is never 0, where xorshift would stay.
func (p *Pattern) key(s uint64, g uint32) uint64 {
	x := p.seed ^ s*0x9e3779b97f4a7c15 ^ uint64(g)*0xbf58476d1ce4e5b9
	return (x^x>>29)*0x94d049bb133111eb | 1
}

// check compares b, read from off on, with the data written there. Sectors
// that this run has not written have no known contents. scratch has room for
// a sector.
func (p *Pattern) check(b []byte, off uint64, scratch []byte) error {
	for at := uint64(0); at < uint64(len(b)); at += sector {
		s, got := (off+at)/sector, b[at:at+sector]
		g := p.generations[s]
		if g == 0 {
			continue
		}
		p.put(scratch, s, g)
		if string(got) != string(scratch) {
			return fmt.Errorf("data at %d are wrong: want the sector in its version %d, there is %s", off+at, g, p.name(got, scratch))
		}
	}
	return nil
}

// name describes the contents of a wrong sector.
func (p *Pattern) name(got, scratch []byte) string {
	s, g := binary.LittleEndian.Uint64(got), uint32(binary.LittleEndian.Uint64(got[8:]))
	p.put(scratch, s, g)
	if string(got) == string(scratch) {
		return fmt.Sprintf("version %d of the sector at %d", g, s*sector)
	}
	same := 0
	for same < sector && got[same] == scratch[same] {
		same++
	}
	if same > 16 {
		return fmt.Sprintf("version %d of the sector at %d up to byte %d, then other data", g, s*sector, same)
	}
	return fmt.Sprintf("% x...", got[:16])
}

// written reports whether this run has written any sector of n bytes from off on.
func (p *Pattern) written(off, n uint64) bool {
	for _, g := range p.generations[off/sector : (off+n)/sector] {
		if g > 0 {
			return true
		}
	}
	return false
}
