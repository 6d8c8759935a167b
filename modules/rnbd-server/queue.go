package server

// DATA PATH, the way there: from the wire to the checks. In the order a request
// meets them:
//
//	onIO    wire -> fill -> admit        the RNBD message is read once; a write that was
//	                                     sent before: replay.go
//	fill    message -> ring entry        bounds, limits, access mode
//
// The next stage is in ring.go. Everything here runs on the pump. A request is an
// element of its session's reqs, found by chunk; the ring's tag is (session, chunk).

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// onIO handles the RNBD I/O message of op. number is the number of a write, 0
// if it has none. again is the whole message if the client says that it has sent
// the write before, else nil.
func (s *Server) onIO(op *rtrs.Op, sess *session, msg rnbdwire.IO, number uint64, again rnbdwire.IOAgain) {
	m := sess.mappingByID(msg.DeviceID())
	if m == nil {
		op.Respond(int(blk.ENOTCONN))
		return
	}
	r := &sess.reqs[op.Chunk()]
	if r.teller != nil {
		r.teller.confirm(r.tells)
		r.teller = nil
	}
	if number != 0 && number == r.done { // on a path that has lost the answer
		op.Respond(int(r.doneErrno))
		return
	}
	if errno := r.fillFrom(op, sess, m, msg); errno != blk.OK {
		s.noteRefused(op, m, msg, errno)
		op.Respond(int(errno))
		return
	}
	if msg.HasUnknownFlags() {
		s.unknownFlags.Add(1)
	}
	m.flows[op.Poller()].inflight.Add(1)
	s.pumps[op.Poller()].begun.Add(1)
	q := m.dev.plugin.queues[op.Poller()]
	r.owner.Store(q.ownerNumber())
	r.arrived, r.sent, r.number = q.updateClock(), 0, number
	if !r.sqe.Op.Modifies() {
		q.admit(r)
		return
	}
	repeats, since := s.checkRepetition(r, again)
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

// fillFrom converts the message to a ring entry. It returns the errno of a message
// that is refused.
func (r *request) fillFrom(op *rtrs.Op, s *session, m *mapping, msg rnbdwire.IO) blk.Errno {
	bop, n := opOf(msg), uint64(msg.BISize())
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
	if errno := m.dev.checkRange(bop, off, n); errno != blk.OK {
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
	r.preflush = msg.Preflush() && bop != blk.Flush && m.dev.limits.Load().WriteCache
	if msg.FUA() && (bop == blk.Write || bop == blk.WriteZeroes) {
		l := m.dev.limits.Load()
		if l.WriteCache && !l.FUA {
			return blk.EOPNOTSUPP // the answer to OPEN said so
		}
		if l.FUA {
			r.sqe.Flags |= blk.FUA
		}
	}
	if msg.NoUnmap() && bop == blk.WriteZeroes {
		r.sqe.Flags |= blk.NoUnmap
	}
	if msg.Sync() {
		r.sqe.Flags |= blk.Sync
	}
	return blk.OK
}

// opOf returns the operation of msg. A write of no data that asks for durability is a
// flush: docs/extend/protocol/rnbd.md, "IO".
func opOf(msg rnbdwire.IO) blk.Op {
	op := blk.Op(msg.Op())
	if op == blk.Write && msg.BISize() == 0 && (msg.Preflush() || msg.FUA()) {
		return blk.Flush
	}
	return op
}

// dataFits reports whether a message about n bytes agrees with RTRS: with the
// direction, with data, the number of bytes in the chunk, and with reply, the number
// of bytes that the answer sends. An answer may send more than a read asks for: the
// rest are other bytes of the session's own chunk.
func dataFits(op blk.Op, read bool, n, data, reply uint64) bool {
	switch op {
	case blk.Read:
		return read && n == data && n <= reply
	case blk.Write: // the data in the chunk must have come with this request
		return !read && n == data
	}
	return data == 0 || n == data
}

// checkRange compares a request of n bytes at off with the limits of d.
func (d *device) checkRange(op blk.Op, off, n uint64) blk.Errno {
	return d.limits.Load().Check(op, off, n)
}
