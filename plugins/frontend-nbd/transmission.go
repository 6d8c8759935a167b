package main

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// DATA PATH, the way there. The functions stand in the order a request meets them:
//
//	look                                         sockets are found worth a read
//	receive -> advance -> header -> onCommand    a command leaves the socket
//	cover -> nextChild -> fill -> place          its range gets slots, payload goes there
//	admit -> submit -> push                      children go to the device
//
// The way back is in reply.go; of block status in status.go. All of it runs on the thread of the connection's
// queue. Commands of one connection are taken in order, one at a time; children and
// replies of many commands are in flight at once. Nothing here locks, allocates or
// blocks: a step that cannot go on (no slot, no bytes, full socket) returns, and a
// later Poll tries it again.

// receive reads from the socket. Payload with a known slot goes into the slot,
// all other bytes into the staging buffer.
func (c *conn) receive() {
	for range receiveRounds {
		if !c.readable || c.stalled || c.state != connOpen {
			return
		}
		if c.handed != nil && c.readAgain() {
			continue
		}
		want := c.nextWindow()
		n, errno := readv(c.fd, c.q.iov[:want.vectors])
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			c.readable = false
			c.quiet++
			return
		case errno != 0:
			c.closeSocket(errno)
			return
		case n == 0:
			c.onEOF()
			return
		}
		c.q.events++
		c.drained = n < want.bytes // a short read
		c.readable = !c.drained || c.hangup
		c.quiet = 0
		c.onBytes(n)
		c.advance()
	}
}

type readWindow struct {
	vectors, bytes int
}

// nextWindow points the queue's vector at the memory for the next bytes. In a run
// of large writes only a header is staged, so that the payload behind it is
// received into its slot.
func (c *conn) nextWindow() (w readWindow) {
	stage := c.stageRoom()
	if c.bulk && (c.cur == nil || c.fill != nil) {
		stage = stage[:min(len(stage), max(0, nbdwire.RequestSize-(c.w-c.r)))]
	}
	if o := c.fill; o != nil {
		rest := o.clientBytes()[o.got:]
		setIovec(&c.q.iov[0], rest)
		w = readWindow{1, len(rest)}
		if c.bulk && !c.cur.allCovered() {
			return w // more payload follows, for the next slot
		}
	}
	setIovec(&c.q.iov[w.vectors], stage)
	return readWindow{w.vectors + 1, w.bytes + len(stage)}
}

// onBytes accounts for n bytes in the memory that window returned.
func (c *conn) onBytes(n int) {
	if o := c.fill; o != nil {
		direct := min(n, int(o.len-o.got))
		o.got += uint32(direct)
		n -= direct
	}
	c.w += n
}

// advance takes commands from the staging buffer until it needs more bytes or
// slots.
func (c *conn) advance() {
	for c.state != connDead {
		if c.cur != nil {
			if !c.coverRequest() {
				return
			}
			continue
		}
		if c.refuseNew(); c.state != connOpen || !c.nextCommand() {
			return
		}
	}
}

// nextCommand takes one command. It returns false if the header is incomplete or too
// many commands are in flight.
func (c *conn) nextCommand() bool {
	if c.w-c.r < nbdwire.RequestSize {
		return false
	}
	h := nbdwire.Request(c.stage[c.r : c.r+nbdwire.RequestSize])
	if h.Magic() != nbdwire.MagicRequest {
		c.closeSocket(errGarbage)
		return false
	}
	r := c.takeRequest()
	if r == nil {
		c.stalled = true
		return false
	}
	c.r += nbdwire.RequestSize
	c.q.stats.requests.Add(1)
	c.bulk = h.Type() == nbdwire.CmdWrite && h.Length() >= bulkSize
	c.q.large = h.Length() >= largeSize
	c.onCommand(r, h)
	return true
}

// onCommand makes a command a request, or an error to answer. The payload of a
// refused write is still in the stream; cover drops it.
func (c *conn) onCommand(r *request, h nbdwire.Request) {
	l := c.exp.limits.Load()
	r.cookie = h.Cookie()
	if h.Type() == nbdwire.CmdDisc {
		c.giveRequest(r)
		c.setState(connDraining)
		c.noteEnd()
		return
	}
	c.cur = r
	c.unanswered++
	c.inFlight.recordUnanswered(c.unanswered)
	r.op, r.errno = c.checkCommand(l, h)
	if c.handed != nil {
		c.handed.goOn(r)
	}
	if r.errno != blk.OK {
		r.next = 0
		if r.end = 0; h.Type() == nbdwire.CmdWrite {
			r.end = uint64(h.Length())
		}
		return
	}
	if c.q.now != nil && r.op.Valid() { // durations are recorded by operation
		r.began = c.q.now()
		c.q.seat.Came(r.began)
	}
	if r.op == blk.Flush {
		r.next, r.end = 0, 1 // one child without a range
		return
	}
	r.next, r.end = h.Offset(), h.Offset()+uint64(h.Length())
	switch r.op {
	case blk.Read:
		r.ordered = !c.structured
		r.stream = r.ordered && (r.headed || c.tooLong(r, l))
		return
	case blk.Extents:
		r.one = h.Flags()&nbdwire.CmdFlagReqOne != 0
		r.end = r.next + r.nextRange(c.exp, l).len
		return
	case blk.Discard:
		r.next, r.end = wholeBlocks(r.next, r.end, c.exp.block)
	case blk.WriteZeroes:
		if h.Flags()&nbdwire.CmdFlagNoHole != 0 {
			r.flags |= blk.NoUnmap
		}
	}
	if h.Flags()&nbdwire.CmdFlagFUA != 0 && l.WriteCache {
		r.flushAfter = !l.FUA || r.op == blk.Discard
		if !r.flushAfter {
			r.flags |= blk.FUA
		}
	}
}

// checkCommand returns the operation of a command and the error to refuse it with.
func (c *conn) checkCommand(l *blk.Limits, h nbdwire.Request) (blk.Op, blk.Errno) {
	off, n := h.Offset(), uint64(h.Length())
	allowed := uint16(nbdwire.CmdFlagFUA)
	beyond := blk.EINVAL
	var op blk.Op
	switch h.Type() {
	case nbdwire.CmdRead:
		op = blk.Read
	case nbdwire.CmdWrite:
		op, beyond = blk.Write, blk.ENOSPC
	case nbdwire.CmdFlush:
		op, off, n = blk.Flush, 0, 0
	case nbdwire.CmdTrim:
		op = blk.Discard
	case nbdwire.CmdWriteZeroes:
		op, beyond = blk.WriteZeroes, blk.ENOSPC
		allowed |= nbdwire.CmdFlagNoHole
	case nbdwire.CmdBlockStatus:
		op = blk.Extents
		allowed |= nbdwire.CmdFlagReqOne
		if !c.allocation || n == 0 {
			return op, blk.EINVAL
		}
	default:
		return blk.Flush, blk.EINVAL // no payload follows
	}
	switch {
	case h.Flags()&^allowed != 0:
		return op, blk.EINVAL
	case op.Modifies() && (l.ReadOnly || c.readOnly):
		return op, blk.EPERM
	case op == blk.Discard && l.MaxDiscard == 0, op == blk.WriteZeroes && l.MaxWriteZeroes == 0:
		return op, blk.EOPNOTSUPP
	case op.HasData() && n > nbdwire.MaxPayload:
		return op, blk.EINVAL
	case n > l.Size || off > l.Size-n:
		return op, beyond
	case (off|n)&uint64(c.exp.minBlock()-1) != 0:
		return op, blk.EINVAL
	}
	return op, blk.OK
}

// wholeBlocks returns the whole blocks within a range. A discard is a hint; parts of
// blocks are ignored.
func wholeBlocks(off, end, block uint64) (uint64, uint64) {
	off = (off + block - 1) &^ (block - 1)
	end &^= block - 1
	return min(off, end), end
}

// coverRequest gives the current request its children. It returns false if the request
// waits for payload or for a slot. A streamed read stays the current request
// until its payload is queued, since no other reply may come in between.
func (c *conn) coverRequest() bool {
	r := c.cur
	for {
		if r.stream {
			c.answerStream(r)
		}
		switch {
		case c.fill != nil:
			if !c.fillUp() {
				return false
			}
		case r.allCovered() && r.streamingPayload():
			c.stalled = true
			return false
		case r.allCovered():
			c.sh.allowGather(r)
			c.cur = nil
			if r.pending == 0 {
				c.finish(r)
			}
			return true
		case r.errno != blk.OK:
			if !c.dropRequest(r) {
				return false
			}
		case !c.nextChild(r):
			c.stalled = true
			c.q.noSlot(c)
			return false
		}
	}
}

// dropRequest skips the rest of a failed request, with its payload.
func (c *conn) dropRequest(r *request) bool {
	if r.op != blk.Write {
		r.next = r.end
		return true
	}
	n := min(uint64(c.w-c.r), r.end-r.next)
	c.r += int(n)
	r.next += n
	return r.allCovered()
}

// nextChild takes a slot for the next part of r. A part with payload is filled
// next, any other is admitted. It returns false if there is no slot.
func (c *conn) nextChild(r *request) bool {
	l := c.exp.limits.Load()
	if !c.exp.claims.mayTake(c.ending) || !c.sh.mayTake(c, r, l) {
		return false
	}
	o := c.sh.takeSlot(c)
	if o == nil {
		return false
	}
	c.q.events++
	o.req = r
	r.pending++
	if r.op == blk.Flush {
		r.next = r.end
		c.q.admit(o)
		return true
	}
	ch := r.nextRange(c.exp, l)
	o.off, o.n, o.skip, o.len = ch.off, uint32(ch.n), uint32(ch.skip), uint32(ch.len)
	if ch.part {
		o.step = stepReadBlock
	}
	r.next += ch.len
	if r.ordered {
		r.appendChild(o)
	}
	switch r.op {
	case blk.Write:
		c.fill = o
		return true
	case blk.Extents:
		o.clearList()
	}
	c.q.admit(o)
	return true
}

// fillUp moves staged payload into the slot. When the payload is complete, the
// child is admitted.
func (c *conn) fillUp() bool {
	o := c.fill
	n := min(c.w-c.r, int(o.len-o.got))
	if n > 0 {
		c.q.place(o.clientBytes()[o.got:], c.stage[c.r:c.r+n])
		c.r += n
		o.got += uint32(n)
	}
	if o.got < o.len {
		return false
	}
	c.fill = nil
	c.q.admit(o)
	return true
}

// place is the only copy of payload: from the staging buffer into the slot, or
// within the slot for a write of part of a block.
func (q *queue) place(dst, src []byte) {
	n := copy(dst, src)
	q.stats.placedBytes.Add(uint64(n))
}

// admit submits a child, or parks it while a conflicting write is in flight.
func (q *queue) admit(o *op) {
	if !q.claimRange(o) {
		q.park(o)
		return
	}
	q.submit(o)
}

// submit gives a child without conflicts to the device. If the kernel has given
// up the child's connection, a write ends here: the kernel sends it again on
// another connection, and may have its answer already. Claiming comes before
// this check, so a repetition that arrives after the check finds the claim.
func (q *queue) submit(o *op) {
	if o.req.op.Modifies() && o.conn.givenUp() {
		o.conn.onDone(o, blk.EIO)
		return
	}
	q.push(o)
}

// push puts an entry into the ring; the batch is published at the end of Poll.
// While the ring has no room for its device the op waits in the share's backlog.
func (q *queue) push(o *op) {
	s := o.sh
	if s.backlog.empty() {
		if q.tryPush(o) {
			return
		}
		q.backlog = append(q.backlog, s)
	}
	s.backlog.push(o)
}

func (q *queue) tryPush(o *op) bool {
	if !q.ring.Fits(o.sh.sent) {
		return false
	}
	e := o.sh.exp
	q.sqe = shm.SQE{
		Tag: tagOf(e.index, o.tag), Device: e.index, Arena: e.arenaID,
		Op: o.blockOp(), ArenaOff: uint64(o.tag) * uint64(e.slotSize),
	}
	if q.sqe.Op != blk.Flush {
		q.sqe.Offset, q.sqe.Len = o.off, o.n
	}
	if q.sqe.Op.Modifies() {
		q.sqe.Flags = o.req.flags
	}
	if o.step == stepWriteBlock {
		q.sqe.Flags &^= blk.NoUnmap
	}
	if o.sent = q.ring.Push(&q.sqe); o.sent {
		o.sh.sent++
	}
	return o.sent
}
