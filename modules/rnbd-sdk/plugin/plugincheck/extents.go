package plugincheck

import (
	"context"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

var extentChecks = []Check{
	{"extents-form", "Extents lists 1 to 255 ranges of whole sectors that stay within the question", gate, extentsForm},
	{"extents-holes", "a hole reads as zeroes, and holds nothing that was written", append([]string{"extents-form"}, faithful...), extentsHoles},
	{"extents-writes", "what is written lies in no hole from its answer on", append([]string{"extents-holes"}, faithful...), extentsWrites},
}

// extents asks about a range; the check is left out where the disk knows nothing of holes.
func (d *disk) extents(off, n uint64) []extents.Extent {
	var list []extents.Extent
	err := d.h.try(func(ctx context.Context) (err error) {
		list, err = d.h.p.Extents(ctx, d.index, off, n)
		return err
	})
	if blk.ToErrno(err) == blk.EOPNOTSUPP {
		d.h.t.Skipf("the disk does not know which ranges hold data")
	}
	d.h.t.must("extents", err)
	return list
}

// holes calls f for each hole of n bytes at off.
func (d *disk) holes(off, n uint64, f func(off, n uint64)) {
	for n > 0 {
		for _, e := range d.extents(off, n) {
			if e.Hole {
				f(off, e.Len)
			}
			off, n = off+e.Len, n-e.Len
		}
	}
}

func extentsForm(t *T) {
	d := t.one()
	b := d.block()
	d.write(8*b, t.random.bytes(int(b)), 0)
	for _, n := range []uint64{512, b, 16 * b, d.limits.Size} {
		var sum uint64
		for _, e := range d.extents(0, n) { // the host checks the form
			sum += e.Len
		}
		if sum == 0 || sum > n {
			t.Fatalf("extents of %d bytes cover %d", n, sum)
		}
	}
	d.extents(d.limits.Size-512, 512)
}

func extentsHoles(t *T) {
	d := t.one()
	d.extents(0, d.block())
	m := newModel(d)
	m.makeHoles()
	m.checkHoles()
	for range t.rounds(30) {
		m.step(entries / 8)
		m.checkHoles()
	}
	m.verify()
}

// makeHoles empties both windows, by discard or by zeroes: the disk may make holes of them.
func (m *model) makeHoles() {
	op, most := blk.Discard, m.d.limits.MaxDiscard
	if most == 0 {
		op, most = blk.WriteZeroes, m.d.limits.MaxWriteZeroes
	}
	if most < uint64(m.block) {
		return
	}
	m.eachPiece(func(pos, n int) {
		n = int(min(uint64(n), most))
		e := shm.SQE{Op: op, Offset: m.offset(pos), Len: uint32(n - n%m.block)}
		m.apply(e, pos, m.d.do(e))
	})
}

// checkHoles checks that the holes of both windows read as zeroes, and that nothing else
// was written there.
func (m *model) checkHoles() {
	for _, window := range []int{0, m.half} {
		begin := m.offset(window)
		m.d.holes(begin, uint64(m.half), func(off, n uint64) {
			at := window + int(off-begin)
			for i := at; i < at+int(n); i++ {
				if m.data[i] != 0 && !m.unknown[i/m.block] {
					m.t.Fatalf("what was written at byte %d lies in a hole of %d bytes at %d", m.offset(i), n, off)
				}
			}
			for n > 0 {
				piece := min(n, uint64(m.d.largest()))
				for i, c := range m.d.read(off, int(piece)) {
					if c != 0 {
						m.t.Fatalf("byte %d lies in a hole, and reads as %#x", off+uint64(i), c)
					}
				}
				off, n = off+piece, n-piece
			}
		})
	}
}

// extentsWrites asks for the holes all the time while blocks are written.
func extentsWrites(t *T) {
	d := t.one()
	d.extents(0, d.block())
	m := newModel(d)
	m.makeHoles()
	const unit = 4096
	units := min(m.half/unit, 128)
	order := make([]int, 0, units) // every second unit, then those between
	for first := range 2 {
		for u := first; u < units; u += 2 {
			order = append(order, u)
		}
	}
	var written atomic.Int32 // of order
	found := make(chan string, 1)
	go func() {
		defer close(found)
		for last := false; !last; {
			n := int(written.Load())
			last = n == units
			if s := d.hidden(order[:n], unit, uint64(units)); s != "" {
				found <- s
				return
			}
		}
	}()
	// The goroutine must not outlive the disk, so a write that fails is told at the end.
	var failed blk.Errno
	for i, u := range order {
		copy(d.h.mem.Bytes(), t.random.bytes(unit))
		if failed = d.do(shm.SQE{Op: blk.Write, Offset: uint64(u * unit), Len: unit}); failed != blk.OK {
			break
		}
		written.Store(int32(i + 1))
	}
	written.Store(int32(units))
	if s := <-found; failed != blk.OK {
		t.Fatalf("write: %v", failed)
	} else if s != "" {
		t.Fatalf("%s", s)
	}
}

// hidden returns a sentence about a unit that was written and lies in a hole; empty: none.
func (d *disk) hidden(written []int, unit, units uint64) string {
	in := make(map[uint64]bool, len(written))
	for _, u := range written {
		in[uint64(u)] = true
	}
	ctx, cancel := context.WithTimeout(d.h.t.ctx, callTime)
	defer cancel()
	for off := uint64(0); off < unit*units; {
		list, err := d.h.p.Extents(ctx, d.index, off, unit*units-off)
		if err != nil {
			return "extents beside writes: " + err.Error()
		}
		for _, e := range list {
			for u := off / unit; e.Hole && u*unit < off+e.Len; u++ {
				if in[u] {
					return "a write was answered, and lies in a hole that Extents lists afterwards"
				}
			}
			off += e.Len
		}
	}
	return ""
}
