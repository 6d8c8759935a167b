package plugincheck

import (
	"context"
	"math"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

var refusalChecks = []Check{
	{"refuse-unaligned", "an offset or a length within a block answers EINVAL", faithful, refuseUnaligned},
	{"refuse-no-length", "a request without length answers EINVAL", faithful, refuseNoLength},
	{"refuse-beyond-end", "a request beyond the end of the disk answers EIO", faithful, refuseBeyondEnd},
	{"refuse-too-large", "a request larger than max_io_size answers EINVAL", faithful, refuseTooLarge},
	{"refuse-unknown-operation", "an unknown operation answers EOPNOTSUPP", gate, refuseUnknownOperation},
	{"refuse-unknown-flag", "an unknown flag answers EINVAL", faithful, refuseUnknownFlag},
	{"refuse-unknown-arena", "an arena that is not attached answers EINVAL", faithful, refuseUnknownArena},
	{"refuse-outside-arena", "memory outside of the arena answers EINVAL", faithful, refuseOutsideArena},
	{"refuse-unknown-device", "a device that is not open answers ENODEV", faithful, refuseUnknownDevice},
	{"refuse-closed-device", "a device that was closed answers ENODEV", gate, refuseClosedDevice},
}

// refuses makes a read and a write that must fail, and leave the disk as it was.
func (t *T) refuses(d *disk, cases []refusal) {
	n := int(2 * d.block())
	before := t.random.bytes(n)
	ends := []uint64{0, d.limits.Size - uint64(n)}
	for _, off := range ends {
		d.write(off, before, 0)
	}
	t.random.fill(d.h.mem.Bytes()[:n])
	for _, c := range cases {
		for _, op := range []blk.Op{blk.Read, blk.Write} {
			c.e.Op = op
			if errno := d.do(c.e); errno != c.want {
				t.Errorf("%v with %s: %v, want %v", op, c.what, answer(errno), c.want)
			}
		}
	}
	for _, off := range ends {
		d.expect("after requests that were refused", off, before)
	}
}

type refusal struct {
	what string
	e    shm.SQE
	want blk.Errno
}

// answer spells an errno that should be an error.
func answer(e blk.Errno) string {
	if e == blk.OK {
		return "success"
	}
	return e.Error()
}

func refuseUnaligned(t *T) {
	d := t.one()
	b := uint32(d.block())
	t.refuses(d, []refusal{
		{"an offset of 1", shm.SQE{Offset: 1, Len: b}, blk.EINVAL},
		{"an offset of half a block", shm.SQE{Offset: d.block() / 2, Len: b}, blk.EINVAL},
		{"a length of a block less a byte", shm.SQE{Len: b - 1}, blk.EINVAL},
		{"a length of a block and a half", shm.SQE{Len: b + b/2}, blk.EINVAL},
	})
}

func refuseNoLength(t *T) {
	d := t.one()
	t.refuses(d, []refusal{{"no length", shm.SQE{}, blk.EINVAL}, {"no length, at the end", shm.SQE{Offset: d.limits.Size - d.block()}, blk.EINVAL}})
}

func refuseBeyondEnd(t *T) {
	d := t.one()
	b, size := d.block(), d.limits.Size
	t.refuses(d, []refusal{
		{"an offset at the end", shm.SQE{Offset: size, Len: uint32(b)}, blk.EIO},
		{"a range across the end", shm.SQE{Offset: size - b, Len: uint32(2 * b)}, blk.EIO},
		{"an offset far beyond the end", shm.SQE{Offset: math.MaxUint64 - b + 1, Len: uint32(b)}, blk.EIO},
	})
}

func refuseTooLarge(t *T) {
	d := t.one()
	m := uint64(d.limits.MaxIOSize)
	if m == 0 || m+d.block() > arenaSize || m+d.block() > d.limits.Size {
		t.Skipf("the disk has no limit that the kit can exceed: max_io_size is %d", m)
	}
	t.refuses(d, []refusal{{"a block more than max_io_size", shm.SQE{Len: uint32(m + d.block())}, blk.EINVAL}})
}

func refuseUnknownOperation(t *T) {
	d := t.one()
	for _, op := range []blk.Op{6, 16, 255} {
		if errno := d.do(shm.SQE{Op: op, Len: uint32(d.block())}); errno != blk.EOPNOTSUPP {
			t.Errorf("operation %d: %v, want %v", op, answer(errno), blk.EOPNOTSUPP)
		}
	}
}

func refuseUnknownFlag(t *T) {
	d := t.one()
	t.refuses(d, []refusal{{"flag 0x80", shm.SQE{Flags: 0x80, Len: uint32(d.block())}, blk.EINVAL}, {"flag 0x08", shm.SQE{Flags: 8, Len: uint32(d.block())}, blk.EINVAL}})
}

func refuseUnknownArena(t *T) {
	d := t.one()
	b := uint32(d.block())
	t.refuses(d, []refusal{
		{"an arena that is not attached", shm.SQE{Arena: 7, Len: b}, blk.EINVAL},
		{"an arena of the largest number", shm.SQE{Arena: math.MaxUint32, Len: b}, blk.EINVAL},
	})
}

func refuseOutsideArena(t *T) {
	d := t.one()
	b := d.block()
	t.refuses(d, []refusal{
		{"memory behind the arena", shm.SQE{ArenaOff: arenaSize, Len: uint32(b)}, blk.EINVAL},
		{"memory across the end of the arena", shm.SQE{ArenaOff: arenaSize - b, Len: uint32(2 * b)}, blk.EINVAL},
		{"memory that wraps around", shm.SQE{ArenaOff: math.MaxUint64 - 511, Len: uint32(b)}, blk.EINVAL},
	})
}

func refuseUnknownDevice(t *T) {
	d := t.one()
	b := uint32(d.block())
	t.refuses(d, []refusal{
		{"a device that is not open", shm.SQE{Device: 77, Len: b}, blk.ENODEV},
		{"a device of the largest number", shm.SQE{Device: math.MaxUint32, Len: b}, blk.ENODEV},
	})
}

func refuseClosedDevice(t *T) {
	d := t.one()
	d.close()
	for _, op := range []blk.Op{blk.Read, blk.Write, blk.Flush} {
		if errno := d.do(shm.SQE{Op: op, Len: uint32(d.block())}); errno != blk.ENODEV {
			t.Errorf("%v of a closed device: %v, want %v", op, answer(errno), blk.ENODEV)
		}
	}
}

func refuseReadOnly(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	w := h.open(s, false)
	before := t.random.bytes(int(w.block()))
	w.write(0, before, 0)
	w.flush()
	offers := map[blk.Op]bool{}
	for op := blk.Read; op.Valid(); op++ {
		offers[op] = w.offers(op)
	}
	w.close()
	d := h.open(s, true)
	for _, op := range []blk.Op{blk.Write, blk.Discard, blk.WriteZeroes, blk.SecureErase} {
		errno := d.do(shm.SQE{Op: op, Len: uint32(d.block())})
		if errno != blk.EROFS && (offers[op] || errno != blk.EOPNOTSUPP) {
			t.Errorf("%v of a read-only disk: %v, want %v", op, answer(errno), blk.EROFS)
		}
	}
	if errno := d.do(shm.SQE{Op: blk.Flush}); errno != blk.OK {
		t.Errorf("flush of a read-only disk: %v", errno)
	}
	d.expect("after changes of a read-only disk", 0, before)
	h.call("close", func(ctx context.Context) error { return h.p.CloseDisk(ctx, d.index) })
}
