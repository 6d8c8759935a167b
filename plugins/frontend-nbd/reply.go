package main

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// DATA PATH, the way back:
//
//	onCompletion -> onDone -> finish             completions come back
//	answer* -> enqueue -> flush -> onSent        replies leave
//
// Replies are queued per connection, headers in the queue, payload in the slots,
// and leave in one vectored call per round.

// queuedReply is one header, and the payload of one slot, either possibly missing.
type queuedReply struct {
	header [maxHeader]byte
	n      uint8    // bytes of header
	op     *op      // payload; its slot is given back when sent
	ends   *request // answered for good when sent
}

// onCompletion finds the op of a completion. The host is not trusted: a
// completion without a request in the ring is counted and dropped.
func (q *queue) onCompletion(e *shm.CQE) {
	o := q.opOf(e.Tag)
	if o == nil || !o.sent {
		q.stats.strayCompletions.Add(1)
		return
	}
	o.sent = false
	o.sh.sent--
	errno := blk.Errno(e.Errno)
	if uint32(errno) != e.Errno {
		errno = blk.EIO
	}
	o.conn.onDone(o, errno)
}

// onDone handles the end of a child's step: the next step follows, or the child
// ends.
func (c *conn) onDone(o *op, e blk.Errno) {
	r := o.req
	if o.step == stepReadBlock && e == blk.OK {
		o.mergeBlock()
		o.step = stepWriteBlock
		c.q.push(o) // the block stays claimed
		return
	}
	c.q.unclaimRange(o)
	if r.op != blk.Extents { // there is always an answer
		r.recordError(e)
	}
	if r.flushAfter && r.errno == blk.OK && r.pending == 1 && r.allCovered() {
		r.flushAfter = false
		o.step = stepFlush
		c.q.push(o)
		return
	}
	r.pending--
	c.onEnd(o, e)
	if r.pending == 0 && r.allCovered() && c.cur != r {
		c.finish(r)
	}
}

// onEnd gives the slot back unless it holds payload for the client.
func (c *conn) onEnd(o *op, e blk.Errno) {
	r := o.req
	switch {
	case r.op == blk.Read && r.ordered:
		o.done = true
	case r.op == blk.Read && e == blk.OK && c.state != connDead:
		c.answerData(o)
	case r.op == blk.Extents && c.state != connDead:
		c.answerStatus(o, e)
	default:
		c.sh.putSlot(o)
	}
}

// finish answers a request when all of its children have ended. Structured
// reads end with their last chunk of data, see answerData.
func (c *conn) finish(r *request) {
	switch {
	case c.state == connDead:
		c.dropChildren(r)
		c.giveRequest(r)
	case r.errno != blk.OK && r.headed:
		c.closeSocket(errLateRead)
		c.dropChildren(r)
		c.giveRequest(r)
	case r.errno != blk.OK:
		c.dropChildren(r)
		c.answerError(r)
	case r.op == blk.Read && r.ordered:
		c.answerOrdered(r)
	case r.op == blk.Read:
		c.answerEmptyRead(r)
	case r.op == blk.Extents: // answerStatus has
	default:
		c.answerSimple(r)
	}
}

// answerSimple answers success without payload.
func (c *conn) answerSimple(r *request) {
	e := c.appendReply()
	nbdwire.PutSimple(e.header[:], r.cookie, 0)
	e.n = nbdwire.SimpleSize
	c.endReply(e, r)
}

// answerError answers a failed request. Only a read and block status must be answered
// in the structured way.
func (c *conn) answerError(r *request) {
	c.q.stats.errors.Add(1)
	e := c.appendReply()
	c.endReply(e, r)
	if c.structured && (r.op == blk.Read || r.op == blk.Extents) {
		nbdwire.PutErrorChunk(e.header[:], r.cookie, nbdErrno(r.errno))
		e.n = nbdwire.ErrorChunkSize
		return
	}
	nbdwire.PutSimple(e.header[:], r.cookie, nbdErrno(r.errno))
	e.n = nbdwire.SimpleSize
}

// answerData queues the payload of one child of a structured read: a chunk of
// its own, in any order. The last child ends the request.
func (c *conn) answerData(o *op) {
	r := o.req
	e := c.appendReply()
	flags := uint16(0)
	if r.pending == 0 && r.allCovered() && r.errno == blk.OK {
		flags, r.headed = nbdwire.ChunkDone, true
		c.endReply(e, r)
	}
	nbdwire.PutDataChunk(e.header[:], flags, r.cookie, o.off+uint64(o.skip), o.len)
	e.n, e.op = nbdwire.DataChunkSize, o
}

// answerOrdered queues a simple read reply; all of its payload is in the slots.
func (c *conn) answerOrdered(r *request) {
	if r.first == nil && !r.headed { // a read of nothing
		c.answerSimple(r)
		return
	}
	c.answerStream(r)
}

// answerStream queues the payload that has arrived, in the order of the device.
// An incomplete stream begins only when no other command is unanswered.
func (c *conn) answerStream(r *request) {
	if r.stream && !r.headed && c.unanswered > 1 {
		return
	}
	for r.first != nil && r.first.done && r.errno == blk.OK && c.state != connDead {
		o := r.first
		if r.first = o.sibling; r.first == nil {
			r.last = nil
		}
		e := c.appendReply()
		if !r.headed {
			r.headed = true
			nbdwire.PutSimple(e.header[:], r.cookie, 0)
			e.n = nbdwire.SimpleSize
		}
		e.op = o
		if r.first == nil && r.allCovered() {
			c.endReply(e, r)
		}
	}
}

// answerEmptyRead answers a structured read without children.
func (c *conn) answerEmptyRead(r *request) {
	if r.headed {
		return // the last chunk of data has ended it
	}
	e := c.appendReply()
	nbdwire.PutChunk(e.header[:], nbdwire.ChunkDone, nbdwire.ChunkNone, r.cookie, 0)
	e.n = nbdwire.ChunkSize
	c.endReply(e, r)
}

// dropChildren gives back the slots of payload that will not be sent.
func (c *conn) dropChildren(r *request) {
	for o := r.first; o != nil; {
		next := o.sibling
		c.sh.putSlot(o)
		o = next
	}
	r.first, r.last = nil, nil
}

// endReply makes e the last reply to r.
func (c *conn) endReply(e *queuedReply, r *request) {
	e.ends = r
	c.unanswered--
}

// appendReply appends an empty reply. There is room: every reply has a slot or
// ends a request, and the queue is as long as there are of both.
func (c *conn) appendReply() *queuedReply {
	e := &c.out[(c.outHead+c.outLen)%len(c.out)]
	c.outLen++
	*e = queuedReply{}
	return e
}

// flush sends queued replies until the socket is full.
func (c *conn) flush() {
	for c.hasReplies() && c.writable && c.state != connDead {
		n, errno := writev(c.fd, c.gatherReplies())
		switch {
		case errno == unix.EINTR:
		case errno == unix.EAGAIN:
			c.writable = false
			c.q.watchRoom(c, true)
		case errno != 0:
			c.closeSocket(errno)
		default:
			c.q.events++
			c.q.answered = true
			c.onSent(n)
		}
	}
}

// gatherReplies gathers the queued replies, less the bytes that are sent already.
func (c *conn) gatherReplies() []unix.Iovec {
	iov := c.q.iov[:]
	n, skip := 0, c.outSent
	if c.handed != nil && len(c.handed.unsent) > 0 {
		setIovec(&iov[0], c.handed.unsent)
		n = 1
	}
	for i := 0; i < c.outLen && n+2 <= len(iov); i++ {
		e := &c.out[(c.outHead+i)%len(c.out)]
		if skip < int(e.n) {
			setIovec(&iov[n], e.header[skip:e.n])
			n, skip = n+1, 0
		} else {
			skip -= int(e.n)
		}
		if e.op != nil {
			setIovec(&iov[n], e.op.clientBytes()[skip:])
			n++
		}
		skip = 0
	}
	return iov[:n]
}

// onSent accounts for n sent bytes and releases the replies that are complete.
func (c *conn) onSent(n int) {
	c.sent += uint64(n)
	n += c.outSent - c.sentHanded(n)
	for c.outLen > 0 {
		e := &c.out[c.outHead]
		size := e.replyBytes()
		if n < size {
			break
		}
		n -= size
		c.outHead = (c.outHead + 1) % len(c.out)
		c.outLen--
		c.releaseReply(e)
	}
	c.outSent = n
}

// recordLatency records the time of a request when its last reply is sent.
func (c *conn) recordLatency(r *request) {
	if r.began != 0 {
		c.q.served(c.exp.index, r.op, c.q.now()-r.began)
	}
}

func (e *queuedReply) replyBytes() int {
	if e.op == nil {
		return int(e.n)
	}
	return int(e.n) + int(e.op.len)
}

// releaseReply gives back the slot and the request of a reply.
func (c *conn) releaseReply(e *queuedReply) {
	if e.op != nil {
		c.sh.putSlot(e.op)
	}
	if e.ends != nil {
		c.recordLatency(e.ends)
		c.giveRequest(e.ends)
	}
	*e = queuedReply{}
}
