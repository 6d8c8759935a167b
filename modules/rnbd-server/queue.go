package server

// DATA PATH. One ioQueue joins one pump with one io plugin process. In the
// order a request meets them:
//
//	onIO    wire -> checks -> admit      the RNBD message is read once; a write that was
//	                                     sent before: replay.go
//	admit   checks -> ring or backlog    room, by device and session: window.go
//	Poll    ring -> onDone -> wire       completions, then the backlog
//
// Everything here runs on the pump. A request is a slot of its session's reqs,
// found by chunk; the ring's tag is (session, chunk).

import (
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// reqState tells where a request is.
type reqState uint8

const (
	reqIdle    reqState = iota
	reqBacklog          // waits in its mapping's flow for room in the ring
	reqSent             // in the ring or in the plugin
	reqParked           // waits for its device to come back after a plugin's death
	reqHeld             // a write that waits for a repetition of another client's
)

// request is what we know of the I/O in one chunk.
type request struct {
	op    *rtrs.Op
	m     *mapping
	sqe   shm.SQE
	next  int32 // chunk of the next request in the flow; -1: last
	state reqState
	// retired: its path has gone without it; only its end is awaited.
	retired bool
	// repeats: it was sent before, and counts in usage.repeats.
	repeats bool
	// The number of a write, and that of the last write in this chunk that a plugin
	// has finished, with its result; 0: none.
	number, done uint64
	doneErrno    blk.Errno
	// The number of the last write in this chunk that ended while a dead plugin had
	// it, 0 if there is none, and when the plugin was first asked. It may have been
	// carried out.
	maybe      uint64
	maybeSince int64
	// When it came from the client, and when the plugin was first asked; 0:
	// not yet.
	arrived, sent int64
	// owner is the queue that has the request, as ioQueue.owner; 0: none. The
	// rest of the struct is that queue's pump's. Atomic, because a pump that
	// looks for its own requests passes those of others.
	owner atomic.Int32
}

// ioQueue is one pump's ring to one plugin process.
type ioQueue struct {
	server *Server
	plugin *ioPlugin
	pump   int
	index  int // in session.lanes
	ring   *shm.Ring
	sub    *shm.Submitter // nil: the plugin is down
	// The session that used the queue last, and when, by the pump's clock; until
	// when sessions share it, and until when one of them is modest.
	last                                  *lane
	now, lastAt, sharedUntil, modestUntil time.Duration
	// waiting are the lanes with a backlog, served round-robin from turn.
	waiting []*lane
	turn    int
	cqes    [64]shm.CQE
}

// owner marks requests of q.
func (q *ioQueue) owner() int32 { return int32(q.index) + 1 }

// onIO serves the RNBD I/O message of op. number is that of a write, 0 if it has none;
// again is the whole message if it was sent before, else nil.
func (s *Server) onIO(op *rtrs.Op, sess *session, msg rnbdwire.IO, number uint64, again rnbdwire.IOAgain) {
	m := sess.lookup(msg.DeviceID())
	if m == nil {
		op.Respond(int(blk.ENOTCONN))
		return
	}
	r := &sess.reqs[op.Chunk()]
	if number != 0 && number == r.done { // on a path whose answer was lost
		op.Respond(int(r.doneErrno))
		return
	}
	if errno := r.fill(op, sess, m, msg); errno != blk.OK {
		op.Respond(int(errno))
		return
	}
	m.flows[op.Poller()].inflight.Add(1)
	q := m.dev.plugin.queues[op.Poller()]
	r.owner.Store(q.owner())
	r.arrived, r.sent, r.number = q.clock(), 0, number
	if !r.sqe.Op.Modifies() {
		q.admit(r)
		return
	}
	repeats, since := s.repetition(r, again)
	if q.inOrder(r, repeats, since) {
		q.admit(r)
	}
}

// prioVersion is the first version of the protocol that has priorities.
const prioVersion = 2

// fill turns the message into a ring entry, or says why it is refused.
func (r *request) fill(op *rtrs.Op, s *session, m *mapping, msg rnbdwire.IO) blk.Errno {
	bop, n := blk.Op(msg.Op()), uint64(msg.BISize())
	if !dataFits(bop, op.IsRead(), n, uint64(op.DataLen()), uint64(op.ReplyLen())) {
		return blk.EINVAL
	}
	if m.mode == blk.ReadOnly && bop.Modifies() {
		return blk.EPERM
	}
	if msg.Sector() > 1<<54 && bop != blk.Flush {
		return blk.EIO
	}
	off := msg.Sector() * blk.SectorSize
	if errno := m.dev.check(bop, off, n); errno != blk.OK {
		return errno
	}
	r.op, r.m = op, m
	r.sqe = shm.SQE{
		Tag:      uint64(s.index)<<32 | uint64(op.Chunk()),
		Offset:   off,
		ArenaOff: uint64(op.Chunk()) * s.chunkSize,
		Device:   m.dev.index,
		Arena:    s.index,
		Len:      uint32(n),
		Op:       bop,
	}
	if s.version.Load() >= prioVersion {
		r.sqe.Prio = msg.Prio()
	}
	if bop == blk.Flush {
		r.sqe.Offset, r.sqe.Len = 0, 0
	}
	if msg.FUA() && (bop == blk.Write || bop == blk.WriteZeroes) {
		l := m.dev.limits.Load()
		if l.WriteCache && !l.FUA {
			return blk.EOPNOTSUPP // the client was told so
		}
		if l.FUA {
			r.sqe.Flags |= blk.FUA
		}
	}
	if msg.Sync() {
		r.sqe.Flags |= blk.Sync
	}
	return blk.OK
}

// dataFits reports whether a message about n bytes goes with what RTRS announced:
// the direction, the bytes of data in the chunk, and the bytes that the answer sends.
// The answer may send more than the data: what else is in the session's chunk.
func dataFits(op blk.Op, read bool, n, data, reply uint64) bool {
	switch op {
	case blk.Read:
		return read && n == data && n <= reply
	case blk.Write: // what is in the chunk must have come with this request
		return !read && n == data
	}
	return data == 0 || n == data
}

// admit sends r to the plugin, or lets it wait its turn.
func (q *ioQueue) admit(r *request) {
	f := &r.m.flows[q.pump]
	q.note(f.lane)
	switch {
	case r.m.dev.fails(), r.retired: // what was not begun must not be, after its path
		q.finish(r, blk.EIO)
	case !r.m.dev.serves():
		r.state = reqParked
	case f.head < 0 && q.roomFor(f) && q.send(f, r):
		q.noteSent(r)
	default:
		q.wait(f, r)
	}
}

// clock looks at the pump's clock and keeps the time in now.
func (q *ioQueue) clock() int64 {
	t := q.server.pumps[q.pump].pump.Now()
	q.now = time.Duration(t)
	return t
}

func (q *ioQueue) send(f *flow, r *request) bool {
	if !q.sub.Push(&r.sqe) {
		return false
	}
	r.state = reqSent
	f.enter()
	return true
}

// noteSent counts the time that a request waited here, unless a plugin has died
// with it: then it is the plugin's time all along.
func (q *ioQueue) noteSent(r *request) {
	if r.sent == 0 {
		r.sent = q.clock()
		r.m.dev.latency[q.pump].queue.Record(r.sqe.Op, r.sent-r.arrived)
	}
}

// Poll takes completions from the ring and fills it again.
func (q *ioQueue) Poll() int {
	if q.sub == nil {
		return 0
	}
	n := q.reap()
	if len(q.waiting) > 0 {
		q.clock()
		n += q.feed()
	}
	q.sub.Publish()
	return n
}

func (q *ioQueue) reap() (total int) {
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
		q.plugin.corrupt(q.sub.Err())
	}
	return total
}

// onDone answers the request that the plugin has finished. The entry is the
// plugin's word: it is believed only where it names a request that is there.
func (q *ioQueue) onDone(c *shm.CQE) {
	s := q.server.sessionAt(uint32(c.Tag >> 32))
	chunk := c.Tag & (1<<32 - 1)
	if s == nil || chunk >= uint64(len(s.reqs)) {
		return
	}
	r := &s.reqs[chunk]
	if r.owner.Load() != q.owner() || r.state != reqSent {
		return
	}
	errno := blk.Errno(c.Errno)
	if c.Errno > maxWireErrno {
		errno = blk.EIO
	}
	r.m.dev.latency[q.pump].plugin.Record(r.sqe.Op, q.clock()-r.sent)
	f := &r.m.flows[q.pump]
	f.leave()
	q.note(f.lane)
	q.finish(r, errno)
}

// maxWireErrno is what the nine errno bits of a response can hold.
const maxWireErrno = 1<<9 - 1

// finish answers r with errno and forgets it.
func (q *ioQueue) finish(r *request, errno blk.Errno) {
	f := &r.m.flows[q.pump]
	if r.sqe.Op.Modifies() {
		q.ended(r, f, errno)
	}
	f.inflight.Add(-1)
	if errno == blk.OK {
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

// ended notes what replay.go wants to know of a write.
func (q *ioQueue) ended(r *request, f *flow, errno blk.Errno) {
	if u := r.m.usage; u.shared.Load() {
		f.wroteAt.Store(latency.Now())
	}
	switch {
	case r.sent == 0: // no plugin has had it
	case r.retired && r.state != reqSent:
		r.maybe, r.maybeSince = r.number, r.sent
	default:
		r.done, r.doneErrno = r.number, errno
	}
	if r.repeats {
		r.repeats = false
		r.m.usage.repeated()
	}
}

// Arm and FD make the queue a source of its pump.
func (q *ioQueue) Arm() bool {
	if q.sub == nil {
		return true
	}
	return q.sub.Arm()
}

func (q *ioQueue) Disarm() {
	if q.sub != nil {
		q.sub.Disarm()
	}
}

func (q *ioQueue) FD() int {
	if q.sub == nil {
		return -1
	}
	return q.sub.FD()
}
