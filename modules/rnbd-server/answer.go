package server

// DATA PATH, the way back. In the order a completion meets them:
//
//	reap    ring -> onDone
//	onDone  checks -> finish             the plugin is not trusted
//	finish  statistics -> wire; a failure is counted
//
// Everything here runs on the pump of the queue.

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
)

func (q *ioQueue) reapCompletions() (total int) {
	for total < 4*len(q.cqes) {
		n := q.sub.Pop(q.cqes[:])
		for i := range q.cqes[:n] {
			q.onDone(&q.cqes[i])
		}
		total += n
		if n < len(q.cqes) {
			break
		}
	}
	if q.sub.Err() != nil {
		q.plugin.killCorrupt(q.sub.Err())
	}
	return total
}

// errUnknownTag ends a plugin: the request that it means would never be answered.
var errUnknownTag = fmt.Errorf("an answer names a request that the plugin does not have: %w", syscall.EBADMSG)

// onDone answers the request that the plugin has finished. The entry is not
// trusted: it must name a request that the plugin has.
func (q *ioQueue) onDone(c *shm.CQE) {
	s := q.server.sessionAt(uint32(c.Tag >> 32))
	chunk := c.Tag & (1<<32 - 1)
	if s == nil || chunk >= uint64(len(s.reqs)) {
		q.plugin.killCorrupt(errUnknownTag)
		return
	}
	r := &s.reqs[chunk]
	if r.owner.Load() != q.ownerNumber() || r.state != reqSent {
		q.plugin.killCorrupt(errUnknownTag)
		return
	}
	errno := storageErrno(c.Errno)
	f := &r.m.flows[q.pump]
	f.onReturned()
	r.freeDepth()
	q.noteLane(f.lane)
	if r.isDurable() {
		r.noteFlush(errno)
	}
	if r.preflush && errno == blk.OK { // of the flush; feed sends r itself
		r.preflush = false
		q.enqueueWaiting(f, r)
		return
	}
	r.m.dev.latency[q.pump].plugin.Record(r.sqe.Op, q.updateClock()-r.sent)
	q.finish(r, errno)
}

// maxWireErrno is the largest number in the nine errno bits of a response.
const maxWireErrno = 1<<9 - 1

// storageErrno returns the errno for the client of a request that the storage has answered
// with n. The errnos of the protocol itself mean other things to clients, so the storage
// does not speak them: docs/extend/protocol/rnbd.md, "I/O errors".
func storageErrno(n uint32) blk.Errno {
	switch e := blk.Errno(n); {
	case n > maxWireErrno, e == blk.ENOTCONN, e == blk.ECONNABORTED, e == blk.EREMCHG:
		return blk.EIO
	default:
		return e
	}
}

// finish answers r with errno and frees its slot.
func (q *ioQueue) finish(r *request, errno blk.Errno) {
	f := &r.m.flows[q.pump]
	if r.isDurable() {
		errno = r.answerFlush(errno)
	}
	if r.sqe.Op.Modifies() {
		q.recordWriteEnd(r, f, errno)
	}
	f.inflight.Add(-1)
	q.server.pumps[q.pump].ended.Add(1)
	if errno != blk.OK {
		q.noteFailed(r.m.dev, &r.sqe, r.failedAt(), errno)
	} else {
		sectors := uint64(r.sqe.Len) / blk.SectorSize
		if r.sqe.Op == blk.Read {
			f.tx.Add(sectors)
		} else {
			f.rx.Add(sectors)
		}
	}
	if r.retired {
		r.retired = false
		r.m.dev.retired.Add(-1)
	}
	op := r.op
	r.op, r.m, r.state = nil, nil, reqIdle
	r.owner.Store(0)
	op.Respond(int(errno))
}

// failedAt is the stage at which r fails.
func (r *request) failedAt() watchdog.Stage {
	if r.sent != 0 {
		return watchdog.Plugin
	}
	return watchdog.Queue
}

// noteFailed counts a request that fails, and passes it on to the log.
func (q *ioQueue) noteFailed(d *device, e *shm.SQE, at watchdog.Stage, errno blk.Errno) {
	d.failures[q.pump].Count(at, errno)
	q.server.pumps[q.pump].failed.Add(watchdog.Failure[*device]{Device: d, Op: e.Op, Stage: at, Errno: errno, Len: e.Len, Offset: e.Offset})
}

// recordWriteEnd records the end of a write for replay.go.
func (q *ioQueue) recordWriteEnd(r *request, f *mappingFlow, errno blk.Errno) {
	if u := r.m.writers; u.shared.Load() {
		f.wroteAt.Store(latency.Now())
	}
	switch {
	case r.sent == 0: // no plugin has got it
	case r.retired && r.state != reqSent:
		r.maybe, r.maybeSince = r.number, r.sent
	default:
		r.done, r.doneErrno = r.number, errno
	}
	if r.repeats {
		r.repeats = false
		r.m.writers.endRepetition()
	}
}

// killCorrupt kills a plugin that broke its ring. A pump calls it.
func (p *ioPlugin) killCorrupt(err error) {
	p.mu.Lock()
	in := p.in
	p.mu.Unlock()
	if in != nil {
		in.Kill(err)
	}
}

// ownerNumber returns the value of request.owner for requests of q.
func (q *ioQueue) ownerNumber() int32 { return int32(q.index) + 1 }
