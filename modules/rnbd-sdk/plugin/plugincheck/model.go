package plugincheck

import (
	"slices"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// model is the expected contents of a disk in two windows, one at each end:
// bytes [0, half) and [size-half, size).
type model struct {
	d       *disk
	t       *T
	block   int
	half    int
	data    []byte // of both windows
	unknown []bool // blocks that were discarded
	taken   []bool // blocks of requests in flight
}

func newModel(d *disk) *model {
	t := d.h.t
	b := int(d.block())
	half := int(min(uint64(t.o.Span/2), d.limits.Size/2))
	half -= half % b
	m := &model{d: d, t: t, block: b, half: half,
		data: make([]byte, 2*half), unknown: make([]bool, 2*half/b), taken: make([]bool, 2*half/b)}
	m.eachPiece(func(pos, n int) { copy(m.data[pos:], d.read(m.offset(pos), n)) })
	return m
}

// eachPiece goes through the windows in requests of the largest size.
func (m *model) eachPiece(f func(pos, n int)) {
	for _, window := range []int{0, m.half} {
		for pos := 0; pos < m.half; {
			n := min(m.half-pos, int(m.d.largest()))
			f(window+pos, n)
			pos += n
		}
	}
}

// offset is where a byte of the model is on the disk.
func (m *model) offset(pos int) uint64 {
	if pos < m.half {
		return uint64(pos)
	}
	return m.d.limits.Size - uint64(2*m.half-pos)
}

// step runs up to n requests at once, without overlaps, and compares what they read.
func (m *model) step(n int) {
	var es []shm.SQE
	var where []int
	used := 0
	for len(es) < n {
		pos, size, ok := m.pick()
		if !ok || used+size > arenaSize {
			break
		}
		es = append(es, m.request(pos, size, used))
		where = append(where, pos)
		used += size
	}
	for i, errno := range m.d.all(es) {
		m.apply(es[i], where[i], errno)
	}
	clear(m.taken)
}

// pick finds a range that no request of this step has.
func (m *model) pick() (pos, size int, ok bool) {
	most := min(int(m.d.largest()), m.half/4, 64<<10) / m.block
	for range 20 {
		n := 1 + m.t.random.IntN(max(most, 1))
		window := m.t.random.IntN(2) * m.half / m.block
		first := window + m.t.random.IntN(m.half/m.block-n+1)
		if blocks := m.taken[first : first+n]; !slices.Contains(blocks, true) {
			for i := range blocks {
				blocks[i] = true
			}
			return first * m.block, n * m.block, true
		}
	}
	return 0, 0, false
}

// request makes a read, a write or a flush, with its payload at byte mem of the arena.
// Checks of their own judge the other operations, and FUA.
func (m *model) request(pos, size, mem int) shm.SQE {
	e := shm.SQE{Offset: m.offset(pos), Len: uint32(size), ArenaOff: uint64(mem), Prio: uint16(m.t.random.IntN(8))}
	m.t.random.fill(m.d.h.mem.Bytes()[mem:][:size])
	switch p := m.t.random.IntN(20); {
	case p < 9:
		e.Op = blk.Read
	case p < 19:
		e.Op = blk.Write
	default:
		return shm.SQE{Op: blk.Flush}
	}
	return e
}

// apply brings the model up to date with an answer.
func (m *model) apply(e shm.SQE, pos int, errno blk.Errno) {
	if errno != blk.OK {
		m.t.Fatalf("%v of %d bytes at byte %d: %v", e.Op, e.Len, e.Offset, errno)
	}
	mem := m.d.h.mem.Bytes()[e.ArenaOff:][:e.Len]
	data := m.data[pos:][:e.Len]
	switch e.Op {
	case blk.Read:
		m.compare(pos, mem)
	case blk.Write:
		copy(data, mem)
		m.mark(pos, len(data), false)
	case blk.WriteZeroes:
		clear(data)
		m.mark(pos, len(data), false)
	case blk.Discard, blk.SecureErase:
		m.mark(pos, len(data), true)
	}
}

func (m *model) mark(pos, n int, unknown bool) {
	for i := range n / m.block {
		m.unknown[pos/m.block+i] = unknown
	}
}

// compare checks bytes that were read at pos. Discarded bytes may have any value.
func (m *model) compare(pos int, got []byte) {
	for i := 0; i < len(got); i += m.block {
		if m.unknown[(pos+i)/m.block] {
			continue
		}
		want := m.data[pos+i:][:m.block]
		if d := differ(got[i:][:m.block], want); d < m.block {
			m.t.Fatalf("byte %d of the disk is %#x, want %#x (seed %d)",
				m.offset(pos+i)+uint64(d), got[i+d], want[d], m.t.o.Seed)
		}
	}
}

// verify reads everything.
func (m *model) verify() {
	m.eachPiece(func(pos, n int) { m.compare(pos, m.d.read(m.offset(pos), n)) })
}

// on lets another open disk of the same storage go on with the model.
func (m *model) on(d *disk) *model {
	m.d = d
	return m
}
