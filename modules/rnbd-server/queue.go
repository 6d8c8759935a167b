package server

// DATA PATH, the way there. One ioQueue joins one pump with one io plugin
// process. In the order a request meets them:
//
//	onIO    wire -> checks -> admit      the RNBD message is read once; a write that was
//	                                     sent before: replay.go
//	admit   checks -> ring or backlog    room, by device and session: window.go
//	Poll    completions (answer.go), then the backlog
//
// Everything here runs on the pump. A request is a slot of its session's reqs,
// found by chunk; the ring's tag is (session, chunk).

import (
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// reqState is the position of a request.
type reqState uint8

const (
	reqIdle    reqState = iota
	reqBacklog          // waits in its mapping's flow for room in the ring
	reqSent             // in the ring or in the plugin
	reqParked           // waits for its device to return after a plugin's death
	reqHeld             // a write that waits for the end of another client's repetition
)

// request is the state of the I/O in one chunk.
type request struct {
	op    *rtrs.Op
	m     *mapping
	sqe   shm.SQE
	next  int32 // chunk of the next request in the flow; -1: last
	state reqState
	// retired reports that the path has ended without the request. Its
	// completion changes nothing for a client.
	retired bool
	// repeats reports that the write was sent before and counts in
	// usage.repeats.
	repeats bool
	// number is the number of the write. done is the number of the last write
	// in this chunk that a plugin has finished, and doneErrno its result. 0
	// means none.
	number, done uint64
	doneErrno    blk.Errno
	// maybe is the number of the last write in this chunk that ended while a
	// dead plugin had it: it may have been carried out. 0 means none.
	// maybeSince is the time at which the plugin was first asked.
	maybe      uint64
	maybeSince int64
	// arrived is the time at which the request came from the client, sent
	// that at which the plugin was first asked; 0: not yet.
	arrived, sent int64
	budget        *budget // that counts the request in its queue depth; nil: none
	// owner is the queue that has the request, as ioQueue.owner; 0: none.
	// Only that queue's pump uses the rest of the struct. owner is atomic,
	// because a pump reads it of requests of other pumps when it looks for
	// its own.
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
	// last is the session that used the queue last, at the time lastAt.
	// sharedUntil is the end of the time in which sessions count as sharing the
	// queue, modestUntil that in which one of them counts as modest. Times are
	// those of the pump's clock.
	last                                  *lane
	now, lastAt, sharedUntil, modestUntil time.Duration
	// waiting are the lanes with a backlog, served round-robin from turn.
	waiting []*lane
	turn    int
	cqes    [64]shm.CQE
}

// owner returns the value of request.owner for requests of q.
func (q *ioQueue) owner() int32 { return int32(q.index) + 1 }

// onIO handles the RNBD I/O message of op. number is the number of a write, 0
// if it has none. again is the whole message if it was sent before, else nil.
func (s *Server) onIO(op *rtrs.Op, sess *session, msg rnbdwire.IO, number uint64, again rnbdwire.IOAgain) {
	m := sess.lookup(msg.DeviceID())
	if m == nil {
		op.Respond(int(blk.ENOTCONN))
		return
	}
	r := &sess.reqs[op.Chunk()]
	if number != 0 && number == r.done { // on a path that has lost the answer
		op.Respond(int(r.doneErrno))
		return
	}
	if errno := r.fill(op, sess, m, msg); errno != blk.OK {
		s.noteRefused(op, m, msg, errno)
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

// noteRefused counts a request that the checks refuse.
func (s *Server) noteRefused(op *rtrs.Op, m *mapping, msg rnbdwire.IO, errno blk.Errno) {
	e := shm.SQE{Op: blk.Op(msg.Op()), Offset: msg.Sector() * blk.SectorSize, Len: msg.BISize()}
	m.dev.plugin.queues[op.Poller()].noteFailed(m.dev, &e, watchdog.Check, errno)
}

// prioVersion is the first version of the protocol that has priorities.
const prioVersion = 2

// fill converts the message to a ring entry. It returns the errno of a message
// that is refused.
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
			return blk.EOPNOTSUPP // the client knows that
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

// dataFits reports whether a message about n bytes agrees with RTRS: the
// direction, the bytes of data in the chunk, and the bytes that the answer
// sends. A read may be answered with more than n bytes: the rest are other bytes
// of the session's own chunk.
func dataFits(op blk.Op, read bool, n, data, reply uint64) bool {
	switch op {
	case blk.Read:
		return read && n == data && n <= reply
	case blk.Write: // the data in the chunk must have come with this request
		return !read && n == data
	}
	return data == 0 || n == data
}

// admit sends r to the plugin, or lets it wait for its turn.
func (q *ioQueue) admit(r *request) {
	f := &r.m.flows[q.pump]
	q.note(f.lane)
	switch {
	case r.m.dev.fails(), r.retired: // a request that was not begun must not begin after the end of its path
		q.finish(r, blk.EIO)
	case !r.m.dev.serves():
		r.state = reqParked
	case f.head < 0 && q.overtakes(r) && q.roomFor(f) && q.send(f, r):
		q.noteSent(r)
	default:
		q.noteWaiting(r)
		q.wait(f, r)
	}
}

// clock reads the pump's clock and stores the time in now.
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
	f.began()
	return true
}

// noteSent pays for the request and counts the time that it waited here. If a plugin has died
// with the request, all of its time counts as the plugin's.
func (q *ioQueue) noteSent(r *request) {
	q.pay(r)
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
