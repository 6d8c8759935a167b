package plugintest

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// skipUnmapped skips a test of disks that know of their holes.
func skipUnmapped(t *testing.T, h *IO) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if _, err := h.Process.Extents(ctx, Device, 0, uint64(h.Limits.LogicalBlockSize)); blk.ToErrno(err) == blk.EOPNOTSUPP {
		t.Skip("the disk does not say which ranges hold data")
	}
}

// holes asks about n bytes from byte off on until they are covered, and calls f for
// each hole.
func (h *IO) holes(t *testing.T, off, n uint64, f func(off, n uint64)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	for n > 0 {
		list, err := h.Process.Extents(ctx, Device, off, n) // it checks the lengths
		if err != nil {
			t.Fatalf("extents of %d bytes at %d: %v", n, off, err)
		}
		for _, e := range list {
			if e.Hole {
				f(off, e.Len)
			}
			off, n = off+e.Len, n-e.Len
		}
	}
}

// holesAreEmpty compares the holes with a model after many requests.
func holesAreEmpty(t *testing.T, h *IO) {
	skipUnmapped(t, h)
	m := newModel(t, h)
	m.makeHoles()
	m.checkHoles()
	for range 10 {
		m.step(max(h.Ring.Entries()/8, 1))
		m.checkHoles()
	}
	m.checkRange(0, int(h.Limits.LogicalBlockSize))
	m.checkRange(2*m.half-m.block, m.block) // the end of the disk
	m.verify()
}

// makeHoles empties both windows, by discard or by zeroes: the disk may make holes of
// them.
func (m *model) makeHoles() {
	op, most := blk.Discard, m.h.Limits.MaxDiscard
	if most == 0 {
		op, most = blk.WriteZeroes, m.h.Limits.MaxWriteZeroes
	}
	if most < uint64(m.block) {
		return
	}
	m.eachPiece(func(pos, n int) {
		n = int(min(uint64(n), most))
		e := shm.SQE{Op: op, Offset: m.offset(pos), Len: uint32(n - n%m.block)}
		m.apply(e, pos, m.h.Do(e))
	})
}

// checkHoles checks the holes of both windows, and of some range within each.
func (m *model) checkHoles() {
	m.t.Helper()
	for _, window := range []int{0, m.half} {
		m.checkRange(window, m.half)
		blocks := m.half / m.block
		first := m.r.IntN(blocks)
		m.checkRange(window+first*m.block, (1+m.r.IntN(blocks-first))*m.block)
	}
}

// checkRange checks that the holes of n bytes at pos read as zeroes, and that
// nothing else was written there.
func (m *model) checkRange(pos, n int) {
	m.t.Helper()
	begin := m.offset(pos)
	m.h.holes(m.t, begin, uint64(n), func(off, size uint64) {
		at := pos + int(off-begin)
		for b := at / m.block; b < (at+int(size))/m.block; b++ {
			if data := m.data[b*m.block:][:m.block]; !m.unknown[b] && len(bytes.Trim(data, "\x00")) > 0 {
				m.t.Fatalf("what was written at byte %d lies in a hole of %d bytes at %d", m.offset(b*m.block), size, off)
			}
		}
		m.readZeroes(off, size)
	})
}

// readZeroes reads a hole.
func (m *model) readZeroes(off, n uint64) {
	m.t.Helper()
	for n > 0 {
		piece := min(n, uint64(m.h.largest()))
		m.h.expect(m.t, off, make([]byte, piece))
		off, n = off+piece, n-piece
	}
}

// holesBesideWrites asks for the holes all the time while blocks are written: one
// whose write was answered before the question lies in none.
func holesBesideWrites(t *testing.T, h *IO) {
	skipUnmapped(t, h)
	m := newModel(t, h)
	m.makeHoles()
	unit := max(4096, m.block)
	units := min(m.half/unit, 128)
	order := make([]int, 0, units) // every second unit, then those between
	for first := range 2 {
		for u := first; u < units; u += 2 {
			order = append(order, u)
		}
	}
	var written atomic.Int32 // of order
	asked := make(chan struct{}, units)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for last := false; !last && !t.Failed(); {
			n := int(written.Load())
			last = n == units
			checkWritten(t, h, order[:n], uint64(unit), uint64(units))
			asked <- struct{}{}
		}
	}()
	for i, u := range order {
		m.r.fill(h.Memory.Bytes()[:unit])
		h.Memory.Bytes()[0] |= 1
		if e := h.Do(shm.SQE{Op: blk.Write, Offset: uint64(u * unit), Len: uint32(unit)}); e != blk.OK {
			t.Errorf("write at %d: %v", u*unit, e)
			break
		}
		written.Store(int32(i + 1))
		if i%8 == 0 { // neither side runs away from the other
			select {
			case <-asked:
			case <-done:
			}
		}
	}
	written.Store(int32(units))
	for {
		select {
		case <-asked:
		case <-done:
			return
		}
	}
}

// checkWritten checks that the written ones of the disk's first units lie in no hole.
func checkWritten(t *testing.T, h *IO, written []int, unit, units uint64) {
	in := make(map[uint64]bool, len(written))
	for _, u := range written {
		in[uint64(u)] = true
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	for off := uint64(0); off < unit*units; {
		list, err := h.Process.Extents(ctx, Device, off, unit*units-off)
		if err != nil {
			t.Errorf("extents beside writes: %v", err)
			return
		}
		for _, e := range list {
			for u := off / unit; e.Hole && u*unit < off+e.Len; u++ {
				if in[u] {
					t.Errorf("a write at byte %d was answered, and lies in a hole of %d bytes at %d", u*unit, e.Len, off)
					return
				}
			}
			off += e.Len
		}
	}
}
