package main

// DATA PATH, the way back: see request.go.

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// popAnswers handles the daemon's completions.
func (q *queue) popAnswers() {
	for {
		n := q.ring.Pop(q.answers[:])
		for i := range n {
			q.onDone(&q.answers[i])
		}
		q.events += n
		if n < len(q.answers) {
			return
		}
	}
}

// onDone handles a completion of the daemon. The daemon is not trusted: a completion
// without a request in the ring is counted and dropped.
func (q *queue) onDone(c *shm.CQE) {
	o := q.findOp(c.Tag)
	if o == nil || !o.sent {
		q.stats.stray.Add(1)
		return
	}
	o.sent = false
	o.dev.sent--
	errno := blk.Errno(c.Errno)
	if uint32(errno) != c.Errno {
		errno = blk.EIO
	}
	if errno == blk.OK && o.step == stepReadBlock {
		o.merge(q)
		o.step = stepWriteBlock
		q.enqueue(o)
		return
	}
	q.finish(o, errno)
}

// merge puts the user's bytes into the block that was read.
func (o *op) merge(q *queue) {
	block := o.memory()[o.skip:][:o.len]
	if o.req.op == blk.WriteZeroes {
		clear(block)
		return
	}
	q.place(block, o.payload())
}

// finish ends an op, and its request with the last one.
func (q *queue) finish(o *op, errno blk.Errno) {
	d, r := o.dev, o.req
	q.release(o)
	r.pending--
	if errno != blk.OK {
		r.fail(errno)
	}
	if r.op == blk.Extents {
		q.seek(d, r, o)
	}
	if r.errno != blk.OK {
		r.next = r.end // no further part is begun
	}
	if r.op != blk.Read {
		d.putOp(o)
	}
	if r.next < r.end {
		q.advance(d, r, nil)
	}
	if r.pending > 0 {
		return
	}
	if r.flushAfter && r.errno == blk.OK {
		r.flushAfter = false
		q.submit(d.takeOp(r, stepFlush))
		return
	}
	q.reply(d, r)
}

// reply sends the reply of a request, and frees its slots.
func (q *queue) reply(d *device, r *request) {
	q.answerRequest(d, r)
	for o := r.first; o != nil; {
		next := o.sibling
		if o.req == r {
			d.putOp(o)
		}
		o = next
	}
	if r.errno != blk.OK {
		q.stats.errors.Add(1)
	}
	if r.began != 0 && r.op != blk.Extents {
		q.served(d.index, r.op, q.now()-r.began)
	}
	d.putRequest(r)
	q.again = true
}

// answerRequest writes the reply of a request.
func (q *queue) answerRequest(d *device, r *request) {
	switch {
	case r.errno != blk.OK:
		q.answer(d, r.unique, r.errno, nil)
	case r.op == blk.Read:
		q.answerRead(d, r)
	case r.op == blk.Write:
		native.PutUint32(q.body[:], uint32(r.end-r.start))
		native.PutUint32(q.body[4:], 0)
		q.answer(d, r.unique, blk.OK, q.body[:writeOutSize])
	case r.op == blk.Extents:
		native.PutUint64(q.body[:], r.start)
		q.answer(d, r.unique, blk.OK, q.body[:lseekOutSize])
	default:
		q.answer(d, r.unique, blk.OK, nil)
	}
}

// answerRead sends header and payload from the slots.
func (q *queue) answerRead(d *device, r *request) {
	putOutHeader(q.header[:], r.unique, 0, int(r.end-r.start))
	iov := append(q.iov[:0], vector(q.header[:]))
	for o := r.first; o != nil; o = o.sibling {
		iov = append(iov, vector(o.payload()))
	}
	d.write(iov)
}

// answer sends a reply with an errno or a body.
func (q *queue) answer(d *device, unique uint64, errno blk.Errno, body []byte) {
	putOutHeader(q.header[:], unique, int32(errno), len(body))
	iov := append(q.iov[:0], vector(q.header[:]))
	if len(body) > 0 {
		iov = append(iov, vector(body))
	}
	d.write(iov)
}
