package plugincheck

import (
	"bytes"
	"context"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// faithful are the checks without which nothing that is built on data can be judged.
var faithful = append([]string{"data-neighbours", "data-answer-last", "data-source-free", "data-single", "data-memory"}, sound...)

var dataChecks = []Check{
	{"data-neighbours", "a read changes only its own memory", sound, dataNeighbours},
	{"data-answer-last", "a read is answered when its data are there, and its memory is left alone afterwards", append([]string{"data-neighbours"}, sound...), dataAnswerLast},
	{"data-source-free", "a write is answered when its data are taken: the memory may change then", append([]string{"data-neighbours", "data-answer-last"}, sound...), dataSourceFree},
	{"data-single", "one request at a time reads what was written", append([]string{"data-answer-last", "data-source-free"}, sound...), dataSingle},
	{"data-memory", "payload at any multiple of 512 bytes in the arena", append([]string{"data-single"}, sound...), dataMemory},
	{"data-many", "requests in flight at the same time read what was written", faithful, dataMany},
	{"data-edges", "the first and the last block, and the largest request at both ends", faithful, dataEdges},
	{"data-overlap", "of writes that overlap in flight, each block has one or the other", faithful, dataOverlap},
	{"data-blocks", "a write changes only its own blocks", faithful, dataBlocks},
	{"data-disks", "two disks do not share data", faithful, dataDisks},
	{"data-hints", "sync and priorities are hints: requests with them work", faithful, dataHints},
	{"flush-answer", "flush is answered, its range means nothing, and it runs beside other requests", sound, flushAnswer},
	{"fua-answer", "writes with FUA are answered and readable, where Limits offers it", faithful, fuaAnswer},
}

func dataSingle(t *T) {
	m := newModel(t.one())
	for range t.rounds(200) {
		m.step(1)
	}
	m.verify()
}

func dataMany(t *T) {
	m := newModel(t.one())
	for range t.rounds(60) {
		m.step(entries)
	}
	m.verify()
}

func dataEdges(t *T) {
	d := t.one()
	for _, n := range []int{int(d.block()), int(d.largest())} {
		for _, off := range []uint64{0, d.limits.Size - uint64(n)} {
			want := t.random.bytes(n)
			d.write(off, want, 0)
			d.expect("written at an end of the disk", off, want)
		}
	}
}

func dataMemory(t *T) {
	d := t.one()
	n := 4 * int(d.block())
	mem := d.h.mem.Bytes()
	for off := 0; off <= 8192; off += 512 {
		want := t.random.bytes(n)
		copy(mem[off:], want)
		d.must(shm.SQE{Op: blk.Write, Len: uint32(n), ArenaOff: uint64(off)})
		clear(mem[off:][:n])
		d.must(shm.SQE{Op: blk.Read, Len: uint32(n), ArenaOff: uint64(off)})
		if !bytes.Equal(mem[off:][:n], want) {
			t.Fatalf("with payload at byte %d of the arena, a read returns other bytes than were written", off)
		}
	}
}

func dataOverlap(t *T) {
	d := t.one()
	b := int(d.block())
	const blocks = 8
	mem := d.h.mem.Bytes()
	for round := range t.rounds(50) {
		var es []shm.SQE
		for i := range 16 {
			for j := range blocks * b {
				mem[i*blocks*b+j] = byte(round*16 + i + 1)
			}
			es = append(es, shm.SQE{Op: blk.Write, Len: uint32(blocks * b), Offset: uint64((i % 4) * b), ArenaOff: uint64(i * blocks * b)})
		}
		for i, errno := range d.all(es) {
			if errno != blk.OK {
				t.Fatalf("overlapping write %d: %v", i, errno)
			}
		}
		got := d.read(0, (blocks+3)*b)
		for i := 0; i < len(got); i += b {
			for _, c := range got[i:][:b] {
				if c != got[i] {
					t.Fatalf("a block at byte %d is torn: it has bytes of two writes", i)
				}
			}
		}
	}
}

// dataAnswerLast overwrites the memory of each read as soon as it was answered.
func dataAnswerLast(t *T) {
	d := t.one()
	n := int(min(d.largest(), 64<<10))
	want := t.random.bytes(n)
	d.write(0, want, 0)
	mem := d.h.mem.Bytes()
	for i := range t.rounds(200) {
		at := (i % 32) * n
		clear(mem[at:][:n])
		d.must(shm.SQE{Op: blk.Read, Len: uint32(n), ArenaOff: uint64(at)})
		if got := bytes.Clone(mem[at:][:n]); !bytes.Equal(got, want) {
			time.Sleep(quietTime)
			if !bytes.Equal(got, mem[at:][:n]) {
				t.Fatalf("a read was answered before its data were there")
			}
			t.Skipf("the disk does not have what was written; data-single tells more")
		}
		for j := range mem[at:][:n] {
			mem[at+j] = 0x55
		}
	}
	time.Sleep(quietTime)
	for i, b := range mem[:min(32, t.rounds(200))*n] {
		if b != 0x55 {
			t.Fatalf("byte %d of the arena changed after the read into it was answered", i)
		}
	}
}

// dataSourceFree overwrites the memory of each write as soon as it was answered.
func dataSourceFree(t *T) {
	d := t.one()
	n := int(min(d.largest(), 64<<10))
	var all [][]byte
	const places = 8
	for i := range max(t.rounds(32)/places, 1) * places {
		want := t.random.bytes(n)
		copy(d.h.mem.Bytes(), want)
		d.must(shm.SQE{Op: blk.Write, Len: uint32(n), Offset: uint64(i%places) * uint64(n)})
		for j := range n {
			d.h.mem.Bytes()[j] = 0xaa
		}
		if all = append(all, want); len(all) == places {
			time.Sleep(4 * quietTime)
			for j, want := range all {
				if bytes.Contains(d.read(uint64(j*n), n), bytes.Repeat([]byte{0xaa}, 512)) && want[0] != 0xaa {
					t.Fatalf("a write was answered before its data were taken: the disk has what the memory was used for afterwards")
				}
			}
			all = nil
		}
	}
}

func dataNeighbours(t *T) {
	d := t.one()
	b := int(d.block())
	mem := d.h.mem.Bytes()[:16*b]
	for i := range mem {
		mem[i] = 0x33
	}
	d.must(shm.SQE{Op: blk.Read, Len: uint32(b), Offset: uint64(b), ArenaOff: uint64(8 * b)})
	for i, c := range mem {
		if c != 0x33 && (i < 8*b || i >= 9*b) {
			t.Fatalf("a read into bytes %d to %d of the arena changed byte %d", 8*b, 9*b, i)
		}
	}
}

func dataBlocks(t *T) {
	d := t.one()
	b := int(d.block())
	want := t.random.bytes(8 * b)
	d.write(0, want, 0)
	part := t.random.bytes(2 * b)
	d.write(uint64(3*b), part, 0)
	copy(want[3*b:], part)
	d.expect("around a write of two blocks", 0, want)
}

func dataDisks(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	one := h.open(s, false)
	other := *s
	switch {
	case t.o.Disk != "" && t.info.Names == plugin.NamesPath:
		t.Skipf("there is one disk, the user's")
	case t.info.Names == plugin.NamesPath:
		other.file = t.newFile(s.dir, "disk2")
		other.path = t.node(other.file)
	default:
		other.name += "2"
		if t.o.hasDir() {
			t.must("make a disk", os.WriteFile(filepath.Join(s.dir, other.name), nil, 0o666))
			t.must("make a disk", os.Truncate(filepath.Join(s.dir, other.name), diskSize))
		}
	}
	two, err := h.tryOpen(t.ctx, &other, false)
	if err != nil {
		t.Skipf("the kit knows no second disk: %v", err)
	}
	n := 8 * int(one.block())
	a, b := t.random.bytes(n), t.random.bytes(n)
	one.write(0, a, 0)
	two.write(0, b, 0)
	one.expect("the first of two disks", 0, a)
	two.expect("the second of two disks", 0, b)
}

func dataHints(t *T) {
	d := t.one()
	want := t.random.bytes(int(d.block()))
	for _, prio := range []uint16{0, 1 << 13, 2<<13 | 7, 3 << 13, 0xffff} {
		copy(d.h.mem.Bytes(), want)
		d.must(shm.SQE{Op: blk.Write, Len: uint32(len(want)), Flags: blk.Sync, Prio: prio})
		d.must(shm.SQE{Op: blk.Read, Len: uint32(len(want)), Flags: blk.Sync, Prio: prio, ArenaOff: 1 << 20})
	}
	d.expect("written with hints", 0, want)
}

func flushAnswer(t *T) {
	d := t.one()
	d.flush()
	if errno := d.do(shm.SQE{Op: blk.Flush, Offset: math.MaxUint64, Len: 1, Arena: 99}); errno != blk.OK {
		t.Fatalf("flush with a range, which means nothing: %v", errno)
	}
	var es []shm.SQE
	for i := range uint64(t.rounds(4 * entries)) {
		e := shm.SQE{Op: blk.Write, Len: 4096, Offset: i % 64 * 4096, ArenaOff: i % 64 * 4096}
		if i%7 == 0 {
			e = shm.SQE{Op: blk.Flush}
		}
		es = append(es, e)
	}
	for i, errno := range d.all(es) {
		if errno != blk.OK {
			t.Fatalf("%v %d of %d: %v", es[i].Op, i, len(es), errno)
		}
	}
}

func fuaAnswer(t *T) {
	d := t.one()
	if !d.limits.FUA {
		t.Skipf("Limits does not offer FUA")
	}
	want := t.random.bytes(4096)
	d.write(0, want, blk.FUA)
	d.expect("written with FUA", 0, want)
}

var zeroChecks = []Check{
	{"zeroes-read", "write-zeroes reads as zeroes", faithful, func(t *T) { zeroes(t, 0) }},
	{"zeroes-no-unmap", "write-zeroes with no-unmap reads as zeroes", faithful, func(t *T) { zeroes(t, blk.NoUnmap) }},
	{"zeroes-allocated", "write-zeroes with no-unmap leaves the range allocated", append([]string{"zeroes-no-unmap"}, faithful...), zeroesAllocated},
	{"discard-range", "discard and secure erase leave the blocks beside their range alone, which can be written again", append([]string{"limits-operations"}, faithful...), discardRange},
}

func zeroes(t *T, flags blk.Flags) {
	d := t.one()
	if d.limits.MaxWriteZeroes == 0 {
		t.Skipf("Limits does not offer write-zeroes")
	}
	b := int(d.block())
	n := int(min(d.largest(), 16*4096))
	for _, off := range []uint64{0, d.limits.Size - uint64(n)} {
		want := t.random.bytes(n)
		d.write(off, want, 0)
		d.must(shm.SQE{Op: blk.WriteZeroes, Offset: off + uint64(b), Len: uint32(n - 2*b), Flags: flags})
		clear(want[b : n-b])
		d.expect("after write-zeroes of all but the first and the last block", off, want)
	}
}

func zeroesAllocated(t *T) {
	d := t.oneOnMedium()
	if d.limits.MaxWriteZeroes == 0 {
		t.Skipf("Limits does not offer write-zeroes")
	}
	const n = 64 << 10
	d.write(0, t.random.bytes(n), 0)
	d.flush()
	if !d.s.medium.Allocated(0, n) {
		t.Skipf("the plugin does not write to the file at the offsets of the disk")
	}
	d.must(shm.SQE{Op: blk.WriteZeroes, Len: n, Flags: blk.NoUnmap})
	d.flush()
	if !d.s.medium.Allocated(0, n) {
		t.Fatalf("write-zeroes with no-unmap gave the storage of its range back: later writes there may find no space")
	}
}

func discardRange(t *T) {
	d := t.one()
	var ops []blk.Op
	for _, op := range []blk.Op{blk.Discard, blk.SecureErase} {
		if d.offers(op) {
			ops = append(ops, op)
		}
	}
	if len(ops) == 0 {
		t.Skipf("Limits offers neither discard nor secure erase")
	}
	for _, op := range ops {
		const n = 64 << 10
		want := t.random.bytes(3 * n)
		d.write(0, want, 0)
		d.must(shm.SQE{Op: op, Offset: n, Len: uint32(min(n, max(d.limits.MaxDiscard, 4096)))})
		d.expect("before a range that was discarded", 0, want[:n])
		d.expect("behind a range that was discarded", 2*n, want[2*n:])
		d.write(n, want[n:][:n], 0)
		d.expect("written after a discard", 0, want)
	}
}

var openChecks = []Check{
	{"open-again", "data stay over close and open", faithful, openAgain},
	{"open-reader", "a disk opens for reading while it is open for writing", append([]string{"open-again"}, faithful...), openReader},
	{"open-many", "64 disks are open at the same time, and a number that was closed comes again", append([]string{"open-reader"}, faithful...), openMany},
	{"open-number-in-use", "a device number in use is refused, and its disk goes on", faithful, openNumberInUse},
	{"open-failure", "a disk that cannot be opened is an error with an errno, and nothing else suffers", faithful, openFailure},
	{"refuse-read-only", "a read-only disk refuses changes with EROFS, or EOPNOTSUPP where it would not offer them either", append([]string{"open-again", "limits-refusals"}, faithful...), refuseReadOnly},
}

func openAgain(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	m := newModel(h.open(s, false))
	for range 10 {
		m.step(entries)
	}
	ends := t.random.bytes(int(m.d.block()))
	for _, pos := range []int{0, 2*m.half - m.block} {
		m.d.write(m.offset(pos), ends, 0)
		copy(m.data[pos:], ends)
	}
	m.d.flush()
	size := m.d.limits.Size
	for range 5 {
		m.d.close()
		m.on(h.open(s, false))
	}
	if m.d.limits.Size != size {
		t.Fatalf("the size was %d, and is %d after close and open", size, m.d.limits.Size)
	}
	m.verify()
}

func openMany(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	var all []*disk
	for range 64 {
		all = append(all, h.open(s, len(all) > 0)) // one writer
	}
	want := t.random.bytes(int(all[0].block()))
	all[0].write(0, want, 0)
	all[0].flush()
	for _, d := range all {
		d.expect("one of 64 open disks", 0, want)
		d.close()
	}
	d, err := h.openAs(t.ctx, all[5].index, s, false)
	t.must("open a disk under a number that was closed", err)
	d.expect("a disk under a number that was closed", 0, want)
}

func openNumberInUse(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	d := h.open(s, false)
	want := t.random.bytes(int(d.block()))
	d.write(0, want, 0)
	if _, err := h.openAs(t.ctx, d.index, s, true); err == nil {
		t.Fatalf("OpenDisk takes a device number that is in use")
	}
	d.expect("after an open under its number was refused", 0, want)
}

func openFailure(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	d := h.open(s, false)
	want := t.random.bytes(int(d.block()))
	d.write(0, want, 0)
	err := h.try(func(ctx context.Context) error { return h.p.CloseDisk(ctx, 60000) })
	if err == nil {
		t.Fatalf("CloseDisk of a device that is not open succeeds")
	}
	if t.info.Names == plugin.NamesPath {
		folder := storage{name: "folder", path: s.dir}
		if _, err := h.tryOpen(t.ctx, &folder, false); err == nil {
			t.Fatalf("OpenDisk takes a folder for a disk")
		}
		nothing := storage{name: s.name}
		if _, err := h.tryOpen(t.ctx, &nothing, false); err == nil {
			t.Fatalf("OpenDisk succeeds without a descriptor, and names are paths")
		}
	}
	d.expect("after opens that failed", 0, want)
}

func openReader(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	w := h.open(s, false)
	r, err := h.tryOpen(t.ctx, s, true)
	if err != nil {
		t.Fatalf("a reader beside a writer: %v", err)
	}
	for range 10 {
		want := t.random.bytes(8 * int(w.block()))
		w.write(0, want, 0)
		w.flush()
		r.expect("a reader beside a writer", 0, want)
	}
}
