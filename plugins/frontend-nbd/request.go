package main

import "github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"

// request is a command of a client until its last reply byte is sent. Its range
// is covered by children, each an op with a slot. The first error of a child is
// the request's error.
type request struct {
	cookie  uint64
	op      blk.Op
	flags   blk.Flags
	errno   blk.Errno
	next    uint64 // bytes of the device before next are covered by children
	end     uint64
	pending int   // children that have not ended
	began   int64 // time of arrival by queue.now; 0: not measured

	one        bool // block status: one extent is asked for
	flushAfter bool // a flush follows the last child (FUA where the device has none)
	ordered    bool // read with a simple reply: payload leaves in the order of the device
	stream     bool // ordered, and replied to before the last child is done
	headed     bool // the header of the simple reply is queued
	first      *op  // ordered: children that are not in the reply queue yet
	last       *op
}

// allCovered reports whether the request has all of its children. The last one may
// still wait for payload.
func (r *request) allCovered() bool { return r.next == r.end }

// streamingPayload reports whether part of the payload of a streamed read is not
// queued yet.
func (r *request) streamingPayload() bool {
	return r.stream && (r.pending > 0 || r.first != nil && r.errno == blk.OK)
}

// recordError records e unless an earlier error is recorded.
func (r *request) recordError(e blk.Errno) {
	if r.errno == blk.OK {
		r.errno = e
	}
}

// appendChild appends a child in the order of the device.
func (r *request) appendChild(o *op) {
	if r.last == nil {
		r.first = o
	} else {
		r.last.sibling = o
	}
	r.last = o
}

// opStep is the current step of an op; each step is one request to the device.
type opStep uint8

const (
	stepPlain      opStep = iota // the child's operation, on whole blocks
	stepReadBlock                // read the block around a part that is to be written
	stepWriteBlock               // write the changed block back
	stepFlush                    // flush after the request's last child
)

// op is one slot and the child request in it.
type op struct {
	sh   *slotShare
	conn *conn
	req  *request
	tag  uint32 // slot in the arena
	step opStep
	sent bool // the device has it
	done bool // read, ordered: payload is in the slot

	claimed bool // claims: holds the block (stepReadBlock and later)
	plain   bool // claims: published as a plain write

	off  uint64 // range on the device, whole blocks
	n    uint32
	skip uint32 // the client's bytes within the range
	len  uint32
	got  uint32 // write: payload bytes received

	next    *op // in a queue's list
	sibling *op // in request.first
}

// clientBytes returns the part of the slot for the client's bytes. For a write of part
// of a block that is the memory behind the block, until the two are merged.
func (o *op) clientBytes() []byte {
	b := o.sh.exp.slotMemory(o.tag)
	if o.step == stepReadBlock {
		return b[o.sh.exp.block:][:o.len]
	}
	return b[o.skip:][:o.len]
}

// blockOp returns the block operation of the step.
func (o *op) blockOp() blk.Op {
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

// mergeBlock puts the client's bytes into the block that was read.
func (o *op) mergeBlock() {
	block := o.sh.exp.slotMemory(o.tag)[o.skip:][:o.len]
	if o.req.op == blk.WriteZeroes {
		clear(block)
		return
	}
	o.sh.q.place(block, o.clientBytes())
}

// childRange is the next part of a request: a range of whole blocks, and the client's
// bytes within it.
type childRange struct {
	off  uint64
	n    uint64
	skip uint64
	len  uint64
	part bool // write of a part of one block
}

// nextRange returns the next child of r on a device with limits l.
func (r *request) nextRange(e *export, l *blk.Limits) childRange {
	switch r.op {
	case blk.Read:
		return cutRead(r.next, r.end, e.block, e.slotBytes(l))
	case blk.Write:
		return cutWrite(r.next, r.end, e.block, e.slotBytes(l))
	case blk.WriteZeroes:
		return cutWrite(r.next, r.end, e.block, rangeChunk(l.MaxWriteZeroes, e.block))
	case blk.Discard:
		return cutWrite(r.next, r.end, e.block, rangeChunk(l.MaxDiscard, e.block))
	case blk.Extents:
		return cutRead(r.next, r.end, e.block, rangeChunk(maxStatus, e.block))
	}
	return childRange{} // flush
}

// rangeChunk returns the longest child without payload, in bytes: the device's
// limit, bounded by the 32 bits of a ring entry.
func rangeChunk(most, block uint64) uint64 {
	return max(min(most, 1<<31)&^(block-1), block)
}

// cutRead returns a child of up to most bytes: the whole blocks around
// [off, end).
func cutRead(off, end, block, most uint64) childRange {
	start := off &^ (block - 1)
	stop := min(end, start+most)
	n := (stop - start + block - 1) &^ (block - 1)
	return childRange{off: start, n: n, skip: off - start, len: stop - off}
}

// cutWrite returns a child of up to most bytes of whole blocks, or of the part
// of the first block that [off, end) touches.
func cutWrite(off, end, block, most uint64) childRange {
	start := off &^ (block - 1)
	if skip := off - start; skip != 0 || end-off < block {
		stop := min(end, start+block)
		return childRange{off: start, n: block, skip: skip, len: stop - off, part: true}
	}
	n := min(end-off, most) &^ (block - 1)
	return childRange{off: off, n: n, len: n}
}

// opList is a queue of ops linked by next.
type opList struct {
	head, tail *op
}

func (l *opList) empty() bool { return l.head == nil }

func (l *opList) push(o *op) {
	o.next = nil
	if l.tail == nil {
		l.head = o
	} else {
		l.tail.next = o
	}
	l.tail = o
}

func (l *opList) pop() *op {
	o := l.head
	l.head = o.next
	if l.head == nil {
		l.tail = nil
	}
	o.next = nil
	return o
}
