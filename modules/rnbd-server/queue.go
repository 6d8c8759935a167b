package server

// DATA PATH. One ioQueue joins one pump with one io plugin process. In the
// order a request meets them:
//
//	onIO    wire -> checks -> admit      the RNBD message is read once
//	admit   checks -> ring or backlog    fairness between sessions
//	Poll    ring -> onDone -> wire       completions, then the backlog
//
// Everything here runs on the pump. A request is a slot of its session's reqs,
// found by chunk; the ring's tag is (session, chunk).

import (
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// reqState tells where a request is.
type reqState uint8

const (
	reqIdle    reqState = iota
	reqBacklog          // waits in its session's lane for room in the ring
	reqSent             // in the ring or in the plugin
	reqParked           // waits for its device to come back after a plugin's death
)

// request is what we know of the I/O in one chunk.
type request struct {
	op    *rtrs.Op
	m     *mapping
	sqe   shm.SQE
	next  int32 // chunk of the next request in the lane; -1: last
	state reqState
	// retired: its path has gone without it; only its end is awaited.
	retired bool
	// When it came from the client, and when the plugin was first asked; 0:
	// not yet.
	arrived, sent int64
	// owner is the queue that has the request, as ioQueue.owner; 0: none. The
	// rest of the struct is that queue's pump's. Atomic, because a pump that
	// looks for its own requests passes those of others.
	owner atomic.Int32
}

// lane is the share of one session in one ioQueue.
type lane struct {
	s          *session
	head, tail int32 // backlog of chunks; -1: empty
	sent       int32
	listed     bool // in ioQueue.waiting
}

// How many requests of one session may be in a plugin at once: as many as the
// ring takes while it is alone; fewer while others use the same queue; and few
// while one of them is modest, that is, has little in flight: a session at depth
// 1 then waits behind modestWindow of a session at depth 512, not behind 512.
const (
	contendedWindow = 24
	modestWindow    = 8
	modestDepth     = 2
	// modestFor is how long a modest session is remembered. It has nothing in
	// flight half of the time; a deep one would fill the ring each time.
	modestFor = time.Second
)

// ioQueue is one pump's ring to one plugin process.
type ioQueue struct {
	server *Server
	plugin *ioPlugin
	pump   int
	index  int // in session.lanes
	ring   *shm.Ring
	sub    *shm.Submitter // nil: the plugin is down
	busy   int            // sessions with requests sent
	// Who used the queue last, and when, by the pump's clock.
	last                     *lane
	now, lastAt, modestUntil time.Duration
	// waiting are the lanes with a backlog, served round-robin from turn.
	waiting []*lane
	turn    int
	cqes    [64]shm.CQE
}

// owner marks requests of q.
func (q *ioQueue) owner() int32 { return int32(q.index) + 1 }

// onIO serves the RNBD I/O message of op.
func (s *Server) onIO(op *rtrs.Op, sess *session, msg rnbdwire.IO) {
	m := sess.lookup(msg.DeviceID())
	if m == nil {
		op.Respond(int(blk.ENOTCONN))
		return
	}
	r := &sess.reqs[op.Chunk()]
	if errno := r.fill(op, sess, m, msg); errno != blk.OK {
		op.Respond(int(errno))
		return
	}
	u := &m.use[op.Poller()]
	u.inflight.Add(1)
	q := m.dev.plugin.queues[op.Poller()]
	r.owner.Store(q.owner())
	r.arrived, r.sent = q.clock(), 0
	q.admit(r)
}

// prioVersion is the first version of the protocol that has priorities.
const prioVersion = 2

// fill turns the message into a ring entry, or says why it is refused.
func (r *request) fill(op *rtrs.Op, s *session, m *mapping, msg rnbdwire.IO) blk.Errno {
	bop, n := blk.Op(msg.Op()), uint64(msg.BISize())
	if op.DataLen() != 0 && uint64(op.DataLen()) != n {
		return blk.EINVAL
	}
	if bop == blk.Write && (op.IsRead() || n != uint64(op.DataLen())) {
		return blk.EINVAL // what is in the chunk was not sent with this request
	}
	if bop == blk.Read && (n != uint64(op.DataLen()) || n != uint64(op.ReplyLen())) {
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

// admit sends r to the plugin, or lets it wait its turn.
func (q *ioQueue) admit(r *request) {
	l := &r.m.session.lanes[q.index]
	q.note(l)
	switch {
	case r.m.dev.failed.Load(), r.retired: // what was not begun must not be, after its path
		q.finish(r, blk.EIO)
	case !r.m.dev.ready.Load():
		r.state = reqParked
	case l.head < 0 && q.roomFor(l) && q.send(l, r):
		q.noteSent(r)
	default:
		q.wait(l, r)
	}
}

// clock looks at the pump's clock and keeps the time in now.
func (q *ioQueue) clock() int64 {
	t := q.server.pumps[q.pump].pump.Now()
	q.now = time.Duration(t)
	return t
}

// note remembers that l uses the queue.
func (q *ioQueue) note(l *lane) {
	if q.last != l {
		if q.last != nil && q.now-q.lastAt < modestFor && l.sent < modestDepth && !l.listed {
			q.modestUntil = q.now + modestFor
		}
		q.last = l
	}
	q.lastAt = q.now
}

// roomFor reports whether l may have one more request in the plugin.
func (q *ioQueue) roomFor(l *lane) bool {
	switch {
	case q.sub == nil:
		return false
	case q.now < q.modestUntil:
		return l.sent < modestWindow
	}
	return l.sent < contendedWindow || q.alone(l)
}

// alone tells whether no other session has requests here.
func (q *ioQueue) alone(l *lane) bool {
	busy, waiting := q.busy, len(q.waiting)
	if l.sent > 0 {
		busy--
	}
	if l.listed {
		waiting--
	}
	return busy == 0 && waiting == 0
}

func (q *ioQueue) send(l *lane, r *request) bool {
	if !q.sub.Push(&r.sqe) {
		return false
	}
	r.state = reqSent
	if l.sent++; l.sent == 1 {
		q.busy++
	}
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

func (q *ioQueue) wait(l *lane, r *request) {
	r.state, r.next = reqBacklog, -1
	chunk := int32(r.op.Chunk())
	if l.head < 0 {
		l.head = chunk
	} else {
		l.s.reqs[l.tail].next = chunk
	}
	l.tail = chunk
	if !l.listed {
		l.listed = true
		q.waiting = append(q.waiting, l)
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
	l := &s.lanes[q.index]
	if l.sent--; l.sent == 0 {
		q.busy--
	}
	errno := blk.Errno(c.Errno)
	if c.Errno > maxWireErrno {
		errno = blk.EIO
	}
	r.m.dev.latency[q.pump].plugin.Record(r.sqe.Op, q.clock()-r.sent)
	q.finish(r, errno)
}

// maxWireErrno is what the nine errno bits of a response can hold.
const maxWireErrno = 1<<9 - 1

// finish answers r with errno and forgets it.
func (q *ioQueue) finish(r *request, errno blk.Errno) {
	u := &r.m.use[q.pump]
	u.inflight.Add(-1)
	if errno == blk.OK {
		sectors := uint64(r.sqe.Len) / blk.SectorSize
		if r.sqe.Op == blk.Read {
			u.tx.Add(sectors)
		} else {
			u.rx.Add(sectors)
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

// feed moves waiting requests to the ring, one of each lane in turn.
func (q *ioQueue) feed() (n int) {
	for idle := 0; idle < len(q.waiting); {
		if q.turn >= len(q.waiting) {
			q.turn = 0
		}
		l := q.waiting[q.turn]
		if !q.feedOne(l) {
			idle++
			q.turn++
			continue
		}
		n, idle = n+1, 0
		if l.head < 0 {
			l.listed = false
			q.waiting = append(q.waiting[:q.turn], q.waiting[q.turn+1:]...)
		} else {
			q.turn++
		}
	}
	return n
}

// feedOne moves the first request of l on. False: it must go on waiting.
func (q *ioQueue) feedOne(l *lane) bool {
	r := &l.s.reqs[l.head]
	dev := r.m.dev
	if r.retired {
		l.head = r.next
		q.finish(r, blk.EIO)
		return true
	}
	if !dev.failed.Load() && dev.ready.Load() {
		if !q.roomFor(l) || !q.send(l, r) {
			return false
		}
		q.noteSent(r)
		l.head = r.next
		return true
	}
	l.head = r.next
	if dev.failed.Load() {
		q.finish(r, blk.EIO)
	} else {
		r.state = reqParked
	}
	return true
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
