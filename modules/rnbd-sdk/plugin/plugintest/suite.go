package plugintest

import (
	"bytes"
	"context"
	"math"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// RunIO checks that a backend keeps the contract of storage plugins. The
// contents of the disk within Options.Span are overwritten. The backend is
// used for several processes' lives, one after the other.
func RunIO(t *testing.T, b plugin.Backend, o Options) {
	o = o.withDefaults()
	t.Logf("plugintest: seed %d", o.Seed)
	o.ReadOnly = false
	for _, test := range []struct {
		name string
		run  func(*testing.T, *IO)
	}{
		{"limits make sense", limitsMakeSense},
		{"one request at a time agrees with a model", oneAtATime},
		{"many requests in flight agree with a model", manyInFlight},
		{"first and last block and the largest request", edges},
		{"write zeroes reads as zeroes, unmapped or not", writeZeroes},
		{"flush and FUA are answered, among other requests", flushAndFUA},
		{"requests that break the limits are refused and change nothing", refusals},
		{"requests that name no memory, disk or flag are refused", strangers},
		{"data stay over close and open", reopen},
		{"a read-only disk reads and refuses the rest", readOnly},
		{"close and open without I/O", closeOpen},
		{"a disk opens for reading while it is open for writing", readerBesideWriter},
		{"holes read as zeroes, and hold nothing that was written", holesAreEmpty},
		{"what is written lies in no hole from its answer on", holesBesideWrites},
		{"the writes that Describe promises survive SIGKILL", crash},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, StartIO(t, b, o)) })
	}
}

func limitsMakeSense(t *testing.T, h *IO) {
	l := h.Limits
	if l.Size == 0 {
		t.Error("size is 0")
	}
	if p := l.PhysicalBlockSize; p != 0 && p%l.LogicalBlockSize != 0 {
		t.Errorf("physical block size %d is no multiple of the logical one, %d", p, l.LogicalBlockSize)
	}
	if m := l.MaxIOSize; m != 0 && (m < 4096 || m%l.LogicalBlockSize != 0) {
		t.Errorf("largest request is %d bytes", m)
	}
	if g := l.DiscardGranularity; l.MaxDiscard != 0 && g%l.LogicalBlockSize != 0 {
		t.Errorf("discard granularity %d is no multiple of the block size %d", g, l.LogicalBlockSize)
	}
	info := h.Process.Info()
	if info.Name == "" || info.Version == "" {
		t.Errorf("plugin without name or version: %+v", info)
	}
}

func oneAtATime(t *testing.T, h *IO) {
	m := newModel(t, h)
	for range 200 {
		m.step(1)
	}
	m.verify()
}

func manyInFlight(t *testing.T, h *IO) {
	m := newModel(t, h)
	for range 60 {
		m.step(h.Ring.Entries())
	}
	m.verify()
}

// largest is the most one request may carry here.
func (h *IO) largest() uint32 {
	n := uint64(min(h.o.ArenaSize/2, 1<<20))
	if m := h.Limits.MaxIOSize; m != 0 {
		n = min(n, uint64(m))
	}
	n = min(n, h.Limits.Size)
	return uint32(n - n%uint64(h.Limits.LogicalBlockSize))
}

// roundTrip writes random bytes at off and reads them back into other memory.
func (h *IO) roundTrip(t *testing.T, r *random, off uint64, n uint32, flags blk.Flags) {
	t.Helper()
	mem := h.Memory.Bytes()
	src, back := mem[:n], mem[len(mem)/2:][:n]
	r.fill(src)
	if e := h.Do(shm.SQE{Op: blk.Write, Offset: off, Len: n, Flags: flags}); e != blk.OK {
		t.Fatalf("write %d bytes at %d: %v", n, off, e)
	}
	want := bytes.Clone(src)
	r.fill(back)
	if e := h.Do(shm.SQE{Op: blk.Read, Offset: off, Len: n, ArenaOff: uint64(len(mem) / 2)}); e != blk.OK {
		t.Fatalf("read %d bytes at %d: %v", n, off, e)
	}
	if !bytes.Equal(want, back) {
		t.Fatalf("read at %d returns other bytes than were written (%d bytes, first difference at %d)", off, n, differ(want, back))
	}
}

func edges(t *testing.T, h *IO) {
	r := newRandom(h.o.Seed)
	b := h.Limits.LogicalBlockSize
	for _, n := range []uint32{b, h.largest()} {
		h.roundTrip(t, r, 0, n, 0)
		h.roundTrip(t, r, h.Limits.Size-uint64(n), n, 0)
	}
}

func writeZeroes(t *testing.T, h *IO) {
	if h.Limits.MaxWriteZeroes == 0 {
		t.Skip("the disk does not offer write-zeroes")
	}
	r := newRandom(h.o.Seed)
	b := h.Limits.LogicalBlockSize
	n := min(h.largest(), 16*4096)
	for _, flags := range []blk.Flags{0, blk.NoUnmap} {
		h.roundTrip(t, r, 0, n, 0)
		if e := h.Do(shm.SQE{Op: blk.WriteZeroes, Offset: uint64(b), Len: n - 2*b, Flags: flags}); e != blk.OK {
			t.Fatalf("write zeroes, flags %d: %v", flags, e)
		}
		want := bytes.Clone(h.Memory.Bytes()[:n])
		clear(want[b : n-b])
		h.expect(t, 0, want)
	}
}

// expect reads and compares.
func (h *IO) expect(t *testing.T, off uint64, want []byte) {
	t.Helper()
	got := h.Memory.Bytes()[:len(want)]
	for i := range got {
		got[i] = ^want[i]
	}
	if e := h.Do(shm.SQE{Op: blk.Read, Offset: off, Len: uint32(len(want))}); e != blk.OK {
		t.Fatalf("read %d bytes at %d: %v", len(want), off, e)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("the disk differs at byte %d", off+uint64(differ(got, want)))
	}
}

func flushAndFUA(t *testing.T, h *IO) {
	r := newRandom(h.o.Seed)
	if h.Limits.FUA {
		h.roundTrip(t, r, 0, 4096, blk.FUA|blk.Sync)
	}
	if e := h.Do(shm.SQE{Op: blk.Flush}); e != blk.OK {
		t.Errorf("flush: %v", e)
	}
	if e := h.Do(shm.SQE{Op: blk.Flush, Offset: math.MaxUint64, Len: 1, Arena: 99}); e != blk.OK {
		t.Errorf("flush with a range, which means nothing: %v", e)
	}
	var es []shm.SQE
	for i := range 4 * uint64(h.Ring.Entries()) {
		e := shm.SQE{Op: blk.Write, Len: 4096, Offset: i % 64 * 4096, ArenaOff: i % 64 * 4096}
		if i%7 == 0 {
			e = shm.SQE{Op: blk.Flush}
		}
		es = append(es, e)
	}
	for i, e := range h.All(es) {
		if e != blk.OK {
			t.Fatalf("%v %d of %d: %v", es[i].Op, i, len(es), e)
		}
	}
}

func refusals(t *testing.T, h *IO) {
	l := h.Limits
	b := uint64(l.LogicalBlockSize)
	mem := h.Memory.Bytes()[:2*b]
	newRandom(h.o.Seed).fill(mem)
	for _, off := range []uint64{0, l.Size - 2*b} {
		if e := h.Do(shm.SQE{Op: blk.Write, Offset: off, Len: uint32(2 * b)}); e != blk.OK {
			t.Fatal(e)
		}
	}
	before := bytes.Clone(mem)
	for i := range mem {
		mem[i] ^= 0xff
	}
	for _, test := range []struct {
		name string
		e    shm.SQE
		want blk.Errno
	}{
		{"behind the end", shm.SQE{Offset: l.Size, Len: uint32(b)}, blk.EIO},
		{"across the end", shm.SQE{Offset: l.Size - b, Len: uint32(2 * b)}, blk.EIO},
		{"far behind the end", shm.SQE{Offset: math.MaxUint64 - b + 1, Len: uint32(b)}, blk.EIO},
		{"offset within a block", shm.SQE{Offset: 1, Len: uint32(b)}, blk.EINVAL},
		{"length within a block", shm.SQE{Len: uint32(b - 1)}, blk.EINVAL},
		{"no length", shm.SQE{}, blk.EINVAL},
	} {
		for _, op := range []blk.Op{blk.Read, blk.Write} {
			test.e.Op = op
			if e := h.Do(test.e); e != test.want {
				t.Errorf("%v %s: %v, want %v", op, test.name, e, test.want)
			}
		}
	}
	if m := l.MaxIOSize; m != 0 && uint64(m)+b <= uint64(len(h.Memory.Bytes())) && uint64(m)+b <= l.Size {
		if e := h.Do(shm.SQE{Op: blk.Write, Len: m + uint32(b)}); e != blk.EINVAL {
			t.Errorf("larger than the largest request: %v", e)
		}
	}
	h.refuseUnsupported(t)
	h.expect(t, 0, before)
	h.expect(t, l.Size-2*b, before)
}

func (h *IO) refuseUnsupported(t *testing.T) {
	l := h.Limits
	for _, test := range []struct {
		op   blk.Op
		have bool
	}{
		{blk.Discard, l.MaxDiscard != 0}, {blk.WriteZeroes, l.MaxWriteZeroes != 0},
		{blk.SecureErase, l.SecureErase}, {blk.Op(6), false}, {blk.Op(255), false},
	} {
		if test.have {
			continue
		}
		if e := h.Do(shm.SQE{Op: test.op, Len: l.LogicalBlockSize}); e != blk.EOPNOTSUPP {
			t.Errorf("operation %d, which the disk does not offer: %v", test.op, e)
		}
	}
}

func strangers(t *testing.T, h *IO) {
	b := h.Limits.LogicalBlockSize
	size := uint64(len(h.Memory.Bytes()))
	for _, test := range []struct {
		name string
		e    shm.SQE
		want blk.Errno
	}{
		{"a disk that is not open", shm.SQE{Device: 7, Len: b}, blk.ENODEV},
		{"a disk number out of range", shm.SQE{Device: math.MaxUint32, Len: b}, blk.ENODEV},
		{"an arena that is not attached", shm.SQE{Arena: 7, Len: b}, blk.EINVAL},
		{"an arena number out of range", shm.SQE{Arena: math.MaxUint32, Len: b}, blk.EINVAL},
		{"memory behind the arena", shm.SQE{ArenaOff: size, Len: b}, blk.EINVAL},
		{"memory across the arena's end", shm.SQE{ArenaOff: size - uint64(b) + 1, Len: b}, blk.EINVAL},
		{"memory that wraps around", shm.SQE{ArenaOff: math.MaxUint64, Len: b}, blk.EINVAL},
		{"an unknown flag", shm.SQE{Flags: 0x80, Len: b}, blk.EINVAL},
	} {
		for _, op := range []blk.Op{blk.Read, blk.Write} {
			test.e.Op = op
			if e := h.Do(test.e); e != test.want {
				t.Errorf("%v with %s: %v, want %v", op, test.name, e, test.want)
			}
		}
	}
}

func reopen(t *testing.T, h *IO) {
	m := newModel(t, h)
	for range 10 {
		m.step(h.Ring.Entries())
	}
	if e := h.Do(shm.SQE{Op: blk.Flush}); e != blk.OK {
		t.Fatal(e)
	}
	size := h.Limits.Size
	h.Close()
	if e := h.Do(shm.SQE{Op: blk.Read, Len: h.Limits.LogicalBlockSize}); e != blk.ENODEV {
		t.Errorf("read of a closed disk: %v", e)
	}
	h.Open(false)
	if h.Limits.Size != size {
		t.Errorf("size was %d, is %d", size, h.Limits.Size)
	}
	m.verify()
}

func readOnly(t *testing.T, h *IO) {
	m := newModel(t, h)
	m.step(h.Ring.Entries())
	h.Close()
	h.Open(true)
	if !h.Limits.ReadOnly {
		t.Error("limits do not say read-only")
	}
	for _, op := range []blk.Op{blk.Write, blk.Discard, blk.WriteZeroes, blk.SecureErase} {
		if e := h.Do(shm.SQE{Op: op, Len: h.Limits.LogicalBlockSize}); e != blk.EROFS {
			t.Errorf("%v: %v", op, e)
		}
	}
	if e := h.Do(shm.SQE{Op: blk.Flush}); e != blk.OK {
		t.Errorf("flush: %v", e)
	}
	m.verify()
}

func closeOpen(_ *testing.T, h *IO) {
	for range 10 {
		h.Close()
		h.Open(false)
	}
}

// reader is the number of a second device, beside Device.
const reader = 7

// readerBesideWriter opens the disk a second time, read-only. A plugin that
// takes one fence for readers and writers would wait for the writer.
func readerBesideWriter(t *testing.T, h *IO) {
	m := newModel(t, h)
	m.step(h.Ring.Entries())
	if e := h.Do(shm.SQE{Op: blk.Flush}); e != blk.OK {
		t.Fatal(e)
	}
	h.openAs(reader, true)
	t.Cleanup(func() {
		h.call("close the reader", func(ctx context.Context) error { return h.Process.CloseDisk(ctx, reader) })
	})
	m.eachPiece(func(pos, n int) {
		if e := h.Do(shm.SQE{Op: blk.Read, Device: reader, Offset: m.offset(pos), Len: uint32(n)}); e != blk.OK {
			t.Fatalf("the reader reads %d bytes at %d: %v", n, m.offset(pos), e)
		}
		m.compare(pos, h.Memory.Bytes()[:n])
	})
	if e := h.Do(shm.SQE{Op: blk.Write, Device: reader, Len: h.Limits.LogicalBlockSize}); e != blk.EROFS {
		t.Errorf("the reader writes: %v, want %v", e, blk.EROFS)
	}
	m.step(h.Ring.Entries()) // the writer goes on
	m.verify()
}

// crash kills the process after writes and compares its successor's reads
// with the promise of the plugin's crash class.
func crash(t *testing.T, h *IO) {
	class := h.Process.Info().Crash
	switch {
	case h.o.Executable == "":
		t.Skip("needs the plugin as a process: Options.Executable")
	case class == plugin.LosesAll:
		t.Skip("the plugin promises nothing")
	}
	m := newModel(t, h)
	for range 10 {
		m.step(h.Ring.Entries())
	}
	if class == plugin.KeepsFlushed {
		if e := h.Do(shm.SQE{Op: blk.Flush}); e != blk.OK {
			t.Fatal(e)
		}
	}
	h.kill()
	h.start(nil)
	h.attach()
	h.Open(false)
	m.verify()
}
