package plugintest

import (
	"math/rand/v2"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// random makes patterns that a seed brings back.
type random struct {
	*rand.Rand
	src *rand.ChaCha8
}

func newRandom(seed uint64) *random {
	var key [32]byte
	for i := range 8 {
		key[i] = byte(seed >> (8 * i))
	}
	src := rand.NewChaCha8(key)
	return &random{rand.New(src), src}
}

func (r *random) fill(b []byte) { _, _ = r.src.Read(b) }

// model is the expected contents of the disk in two windows, one at each end:
// bytes [0, half) and [size-half, size).
type model struct {
	t       *testing.T
	h       *IO
	r       *random
	block   int
	half    int
	data    []byte // of both windows
	unknown []bool // blocks that were discarded
	taken   []bool // blocks of requests in flight
}

func newModel(t *testing.T, h *IO) *model {
	b := int(h.Limits.LogicalBlockSize)
	half := int(min(uint64(h.o.Span/2), h.Limits.Size/2))
	half -= half % b
	m := &model{t: t, h: h, r: newRandom(h.o.Seed), block: b, half: half,
		data: make([]byte, 2*half), unknown: make([]bool, 2*half/b), taken: make([]bool, 2*half/b)}
	m.eachPiece(func(pos, n int) {
		if e := h.Do(shm.SQE{Op: blk.Read, Offset: m.offset(pos), Len: uint32(n)}); e != blk.OK {
			t.Fatalf("read %d bytes at %d: %v", n, m.offset(pos), e)
		}
		copy(m.data[pos:], h.Memory.Bytes()[:n])
	})
	return m
}

// eachPiece goes through the windows in requests of the largest size.
func (m *model) eachPiece(f func(pos, n int)) {
	for _, window := range []int{0, m.half} {
		for pos := 0; pos < m.half; {
			n := min(m.half-pos, int(m.h.largest()))
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
	return m.h.Limits.Size - uint64(2*m.half-pos)
}

// step runs up to n requests at once, without overlaps, and compares the data
// of the reads.
func (m *model) step(n int) {
	m.t.Helper()
	var es []shm.SQE
	var where []int
	used := 0
	for len(es) < n {
		pos, size, ok := m.pick()
		if !ok || used+size > len(m.h.Memory.Bytes()) {
			break
		}
		es = append(es, m.request(pos, size, used))
		where = append(where, pos)
		used += size
	}
	for i, errno := range m.h.All(es) {
		m.apply(es[i], where[i], errno)
	}
	clear(m.taken)
}

// pick finds a range that no request of this step has.
func (m *model) pick() (pos, size int, ok bool) {
	most := min(int(m.h.largest()), m.half/4, 64<<10) / m.block
	for range 20 {
		n := 1 + m.r.IntN(max(most, 1))
		window := m.r.IntN(2) * m.half / m.block
		first := window + m.r.IntN(m.half/m.block-n+1)
		if free(m.taken[first : first+n]) {
			for i := range n {
				m.taken[first+i] = true
			}
			return first * m.block, n * m.block, true
		}
	}
	return 0, 0, false
}

func free(taken []bool) bool {
	for _, t := range taken {
		if t {
			return false
		}
	}
	return true
}

// request makes one of the operations that the disk offers, with its payload
// at byte mem of the arena.
func (m *model) request(pos, size, mem int) shm.SQE {
	l := m.h.Limits
	e := shm.SQE{Offset: m.offset(pos), Len: uint32(size), ArenaOff: uint64(mem), Prio: uint16(m.r.IntN(8))}
	m.r.fill(m.h.Memory.Bytes()[mem:][:size])
	switch p := m.r.IntN(20); {
	case p < 8:
		e.Op = blk.Read
	case p < 15:
		e.Op = blk.Write
		if l.FUA && p == 8 {
			e.Flags = blk.FUA
		}
	case p < 17 && l.MaxWriteZeroes >= uint64(size):
		e.Op = blk.WriteZeroes
		e.Flags = []blk.Flags{0, blk.NoUnmap}[m.r.IntN(2)]
	case p == 17 && l.MaxDiscard >= uint64(size):
		e.Op = blk.Discard
	case p == 18 && l.SecureErase:
		e.Op = blk.SecureErase
	default:
		e.Op = blk.Flush
	}
	return e
}

// apply brings the model up to date with an answer.
func (m *model) apply(e shm.SQE, pos int, errno blk.Errno) {
	m.t.Helper()
	if errno != blk.OK {
		m.t.Fatalf("%v of %d bytes at %d: %v", e.Op, e.Len, e.Offset, errno)
	}
	mem := m.h.Memory.Bytes()[e.ArenaOff:][:e.Len]
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

// compare checks bytes read at pos. Discarded bytes may have any value.
func (m *model) compare(pos int, got []byte) {
	m.t.Helper()
	for i := 0; i < len(got); i += m.block {
		if m.unknown[(pos+i)/m.block] {
			continue
		}
		want := m.data[pos+i:][:m.block]
		if d := differ(got[i:][:m.block], want); d < m.block {
			m.t.Fatalf("byte %d of the disk is %#x, want %#x (seed %d)",
				m.offset(pos+i)+uint64(d), got[i+d], want[d], m.h.o.Seed)
		}
	}
}

// verify reads everything.
func (m *model) verify() {
	m.t.Helper()
	m.eachPiece(func(pos, n int) {
		if e := m.h.Do(shm.SQE{Op: blk.Read, Offset: m.offset(pos), Len: uint32(n)}); e != blk.OK {
			m.t.Fatalf("read %d bytes at %d: %v", n, m.offset(pos), e)
		}
		m.compare(pos, m.h.Memory.Bytes()[:n])
	})
}

// differ is the index of the first difference, or the length.
func differ(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}
