package main

// DATA PATH. A request of the kernel meets these functions in this order:
//
//	receive -> dispatch         one read takes the request, a write with its payload
//	start -> advance -> place   its range gets slots, the payload is copied into them
//	submit -> push              entries for the daemon
//	popAnswers -> onDone        their answers
//	finish -> reply             one writev: header and, for a read, the slots
//
// The last two lines are in reply.go. All of it runs on the queue's thread.

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// request is a request of the kernel until its reply. Its range is covered by ops. The
// first error of an op is the error of the request.
type request struct {
	unique  uint64 // the kernel's number of the request
	op      blk.Op
	flags   blk.Flags
	errno   blk.Errno
	start   uint64 // range on the device in bytes
	next    uint64 // bytes before next are covered by ops
	end     uint64
	pending int   // ops that have not ended
	began   int64 // time of arrival by queue.now; 0: not measured

	whence     uint32 // lseek: what is looked for
	flushAfter bool   // a flush follows the last op: FUA where the device has none
	first      *op    // read: ops in the order of the device
	last       *op
	free       *request // next request in device.freeRequests
}

// fail records e unless an earlier error is recorded.
func (r *request) fail(e blk.Errno) {
	if r.errno == blk.OK {
		r.errno = e
	}
}

// step is the current step of an op. Each step is one request to the daemon.
type step uint8

const (
	stepWhole      step = iota // whole blocks
	stepReadBlock              // read the block around a part that is to be written
	stepWriteBlock             // write the changed block back
	stepFlush                  // flush after the request's last op
)

// op is one slot of a device and the part of a request in the slot.
type op struct {
	dev  *device
	req  *request // nil: the slot is free
	slot uint32
	step step
	sent bool // the daemon has the slot

	off  uint64 // range on the device in bytes, whole blocks
	n    uint32
	skip uint32 // the user's bytes within the range
	len  uint32

	next    *op // in a list of the device
	sibling *op // next op of the same read
}

// memory returns the slot of the op.
func (o *op) memory() []byte {
	d := o.dev
	return d.arena[int(o.slot)*d.slotSize:][:d.slotSize:d.slotSize]
}

// isPart reports whether the op changes a part of a block.
func (o *op) isPart() bool { return o.step == stepReadBlock || o.step == stepWriteBlock }

// kind returns the block operation of the step.
func (o *op) kind() blk.Op {
	switch o.step {
	case stepReadBlock:
		return blk.Read
	case stepWriteBlock:
		return blk.Write
	case stepFlush:
		return blk.Flush
	}
	return o.req.op
}

// receive takes requests from the kernel while the device has slots for the largest one.
func (q *queue) receive(d *device) {
	for range receiveBatch {
		if d.freeOps < d.opsPerRequest || d.freeRequests == nil {
			return // a slot that becomes free makes the queue look again
		}
		n, err := unix.Read(d.fd, d.message)
		switch err {
		case nil:
			q.events++
			q.dispatch(d, inMessage(d.message[:n]))
		case unix.EINTR:
		case unix.ENOENT: // the request was cancelled before it was read
		case unix.EAGAIN:
			d.readable = false
			return
		default: // ENODEV: the mount is gone
			d.readable = false
			d.disconnect(err)
			return
		}
	}
}

// dispatch begins a request. A message that is malformed gets EINVAL, and reaches no
// other device.
func (q *queue) dispatch(d *device, m inMessage) {
	if len(m) < inHeaderSize {
		q.stats.malformed.Add(1)
		return
	}
	if !m.isValid(len(m), argsSize(m.opcode())) {
		q.stats.malformed.Add(1)
		q.answer(d, m.unique(), blk.EINVAL, nil)
		return
	}
	switch m.opcode() {
	case opRead, opWrite, opFsync, opFallocate, opLseek:
		q.stats.requests.Add(1)
		q.start(d, m)
	default:
		q.control(d, m)
	}
}

// start makes a request of a message.
func (q *queue) start(d *device, m inMessage) {
	r := d.takeRequest()
	r.unique = m.unique()
	if q.now != nil {
		r.began = q.now()
	}
	l := d.limits.Load()
	errno := r.set(m, l)
	if errno == blk.OK && r.op.HasData() && r.end-r.start > uint64(d.maxWrite) {
		errno = blk.EINVAL // more than was negotiated
	}
	if errno != blk.OK || r.start == r.end && r.op != blk.Flush {
		r.fail(errno)
		q.reply(d, r)
		return
	}
	if r.op == blk.Flush && !l.WriteCache {
		q.reply(d, r)
		return
	}
	if r.flags&blk.FUA != 0 && !l.FUA {
		r.flags &^= blk.FUA
		r.flushAfter = l.WriteCache
	}
	q.large = r.op.HasData() && r.end-r.start >= largeIO
	q.advance(d, r, m)
}

// set fills in the operation and the range of a message, on a device with limits l.
func (r *request) set(m inMessage, l *blk.Limits) blk.Errno {
	switch m.opcode() {
	case opRead:
		a := ioArgs(m.args())
		r.op = blk.Read
		r.setRange(a.offset(), uint64(a.size()), l.Size)
	case opWrite:
		a := ioArgs(m.args())
		r.op = blk.Write
		if a.openFlags()&(unix.O_SYNC|unix.O_DSYNC) != 0 {
			r.flags = blk.FUA
		}
		r.setRange(a.offset(), uint64(a.size()), l.Size)
		switch {
		case uint64(len(a)) != ioInSize+uint64(a.size()):
			return blk.EINVAL
		case l.ReadOnly:
			return blk.EROFS
		case r.start == r.end && a.size() > 0:
			return blk.ENOSPC
		}
	case opFsync:
		r.op = blk.Flush
	case opFallocate:
		return r.setFallocate(fallocateArgs(m.args()), l)
	case opLseek:
		a := lseekArgs(m.args())
		r.op, r.whence = blk.Extents, a.whence()
		r.setRange(a.offset(), l.Size, l.Size)
		switch {
		case r.whence != unix.SEEK_DATA && r.whence != unix.SEEK_HOLE:
			return blk.EINVAL
		case a.offset() >= l.Size:
			return blk.ENXIO
		}
	}
	return blk.OK
}

// setRange sets the part of [off, off+n) that a device of size bytes has.
func (r *request) setRange(off, n, size uint64) {
	r.start = min(off, size)
	r.next, r.end = r.start, r.start+min(n, size-r.start)
}

// setFallocate sets a hole or a range of zeroes. A device cannot grow, so a plain
// allocation is not supported.
func (r *request) setFallocate(a fallocateArgs, l *blk.Limits) blk.Errno {
	r.op = blk.WriteZeroes
	switch a.mode() &^ unix.FALLOC_FL_KEEP_SIZE {
	case unix.FALLOC_FL_PUNCH_HOLE:
	case unix.FALLOC_FL_ZERO_RANGE:
		r.flags = blk.NoUnmap
	default:
		return blk.EOPNOTSUPP
	}
	r.setRange(a.offset(), a.length(), l.Size)
	switch {
	case l.ReadOnly:
		return blk.EROFS
	case l.MaxWriteZeroes == 0:
		return blk.EOPNOTSUPP
	case r.end-r.start != a.length():
		return blk.EINVAL
	}
	return blk.OK
}

// advance makes ops for the range of r that has none. Reads and writes get all of their
// ops at once: receive has seen to the slots. Ranges without payload get a few at a time.
func (q *queue) advance(d *device, r *request, m inMessage) {
	if r.op == blk.Flush {
		q.submit(d.takeOp(r, stepFlush))
		return
	}
	l := d.limits.Load()
	for r.next < r.end && (r.op.HasData() || r.pending < rangesAtOnce && d.freeOps > 0) {
		q.submit(q.makeOp(d, r, l, m))
	}
}

// makeOp covers the next part of r's range by a slot, with the payload of a write.
func (q *queue) makeOp(d *device, r *request, l *blk.Limits, m inMessage) *op {
	var o *op
	if r.op.Modifies() {
		o = q.makeWrite(d, r, l, m)
	} else {
		o = q.makeRead(d, r, l)
	}
	r.next += uint64(o.len)
	return o
}

// makeRead covers whole blocks around the next part of a read or a seek.
func (q *queue) makeRead(d *device, r *request, l *blk.Limits) *op {
	most := d.chunk(l)
	if r.op == blk.Extents {
		most = maxExtents
	}
	o := d.takeOp(r, stepWhole)
	o.off = r.next &^ (d.block - 1)
	stop := min(r.end, o.off+most)
	o.n = uint32((stop - o.off + d.block - 1) &^ (d.block - 1))
	o.skip, o.len = uint32(r.next-o.off), uint32(stop-r.next)
	if r.last == nil {
		r.first = o
	} else {
		r.last.sibling = o
	}
	r.last = o
	if r.op == blk.Extents {
		clear(o.memory()[:extentsSize]) // an earlier request may have left a list in the slot
	}
	return o
}

// makeWrite covers whole blocks of a write or of a range of zeroes, or the part of the
// first block that the range touches.
func (q *queue) makeWrite(d *device, r *request, l *blk.Limits, m inMessage) *op {
	o := d.takeOp(r, stepWhole)
	o.off = r.next &^ (d.block - 1)
	skip := r.next - o.off
	if skip != 0 || r.end-r.next < d.block {
		o.step = stepReadBlock
		o.n = uint32(d.block)
		o.skip, o.len = uint32(skip), uint32(min(r.end, o.off+d.block)-r.next)
	} else {
		most := d.chunk(l)
		if r.op == blk.WriteZeroes {
			most = max(min(l.MaxWriteZeroes, maxRange)&^(d.block-1), d.block)
		}
		o.n = uint32(min(r.end-r.next, most) &^ (d.block - 1))
		o.len = o.n
	}
	if r.op == blk.Write {
		at := ioInSize + int(r.next-r.start)
		q.place(o.payload(), m.args()[at:][:o.len])
	}
	return o
}

// payload returns the memory of the user's bytes. For a part of a block that is the
// memory behind the block, until the two are merged.
func (o *op) payload() []byte {
	if o.step == stepReadBlock {
		return o.memory()[o.dev.block:][:o.len]
	}
	return o.memory()[o.skip:][:o.len]
}

// place is the one copy of payload.
func (q *queue) place(dst, src []byte) {
	copy(dst, src)
	q.stats.placedBytes.Add(uint64(len(src)))
}

// submit sends an op to the daemon, or keeps the op while a write of a part of a block
// excludes it. Such a write reads the block and writes it back, so no other write may
// come between: it waits for the writes in flight, and later ones wait for it.
func (q *queue) submit(o *op) {
	d := o.dev
	if o.req.op.Modifies() && o.step != stepWriteBlock && o.step != stepFlush {
		if !d.excluded.empty() || !d.admits(o) {
			d.excluded.push(o)
			return
		}
		d.admit(o)
	}
	q.enqueue(o)
}

// admits reports whether a write may go to the daemon now.
func (d *device) admits(o *op) bool {
	return d.partial == nil && (!o.isPart() || d.writes == 0)
}

// admit counts a write that goes to the daemon.
func (d *device) admit(o *op) {
	d.writes++
	if o.isPart() {
		d.partial = o
	}
}

// release ends the exclusion of a write, and submits the writes that waited.
func (q *queue) release(o *op) {
	d := o.dev
	if !o.req.op.Modifies() || o.step == stepFlush {
		return
	}
	d.writes--
	if d.partial == o {
		d.partial = nil
	}
	for !d.excluded.empty() && d.admits(d.excluded.head) {
		next := d.excluded.pop()
		d.admit(next)
		q.enqueue(next)
	}
}

// enqueue puts the op into the ring, or into the device's backlog while the ring has no
// room for the device.
func (q *queue) enqueue(o *op) {
	d := o.dev
	if d.backlog.empty() {
		if q.push(o) {
			return
		}
		q.backlog = append(q.backlog, d)
	}
	d.backlog.push(o)
}

// push puts the entry of an op into the ring, if the device may have one more.
func (q *queue) push(o *op) bool {
	d := o.dev
	if !q.ring.Fits(d.sent) {
		return false
	}
	q.entry = shm.SQE{
		Tag: tagOf(d.index, o.slot), Device: d.index, Arena: d.arenaID, ArenaOff: uint64(o.slot) * uint64(d.slotSize),
		Op: o.kind(), Offset: o.off, Len: o.n,
	}
	if o.kind().Modifies() {
		q.entry.Flags = o.req.flags
	}
	if o.kind() != blk.WriteZeroes {
		q.entry.Flags &^= blk.NoUnmap
	}
	if !q.ring.Push(&q.entry) {
		return false
	}
	o.sent = true
	d.sent++
	return true
}
