package client

// DATA PATH. A source joins one ring of a front end with one pump. In the
// order a request meets them:
//
//	Poll      ring -> onSubmit                entries are snapshots
//	onSubmit  checks -> gate -> send          bounds, limits, device's state
//	send      RNBD message -> RTRS queue      or wait for a permit
//	onDone    RTRS -> completion in the ring  or wait for the session
//
// Everything here runs on the pump. A request is a slot of its source's reqs;
// RTRS's tag is (source, slot).

import (
	"slices"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// gate tells the pumps what to do with a device's requests.
type gate = uint32

const (
	gateWait gate = iota // park them: the session may come back
	gateOpen             // send them
	gateFail             // answer EIO
)

type request struct {
	sqe  shm.SQE
	dev  *Device // nil: free
	next uint32  // of the list it is in; none: last
	// When it came from the front end, and when it was first sent; 0: not yet.
	arrived, sent int64
}

// none ends a list of requests.
const none = ^uint32(0)

// list is a queue of requests of one source, by slot.
type list struct{ head, tail uint32 }

func emptyList() list { return list{none, none} }

func (l *list) empty() bool { return l.head == none }

// source is one ring of a front end on one pump.
type source struct {
	pump  *pumpShare
	owner *frontend // only its devices may be named
	index uint32    // in pump.sources
	comp  *shm.Completer

	reqs     []request
	free     list
	inflight int
	waiting  list // for a permit
	parked   list // for their device's gate
	// orphaned: the front end is gone, nobody reads answers.
	orphaned bool
	large    bool
	answered bool   // there are answers to publish
	caller   rester // of an IO

	sqes [64]shm.SQE
	cqe  shm.CQE
	msg  [rnbdwire.IOSize]byte
}

func newSource(p *pumpShare, owner *frontend, comp *shm.Completer, entries int) *source {
	s := &source{pump: p, owner: owner, comp: comp, reqs: make([]request, entries),
		free: emptyList(), waiting: emptyList(), parked: emptyList()}
	for i := range s.reqs {
		s.push(&s.free, uint32(i))
	}
	return s
}

func (s *source) push(l *list, i uint32) {
	s.reqs[i].next = none
	if l.head == none {
		l.head = i
	} else {
		s.reqs[l.tail].next = i
	}
	l.tail = i
}

func (s *source) pop(l *list) uint32 {
	i := l.head
	l.head = s.reqs[i].next
	return i
}

// Poll takes requests from the ring and publishes answers.
func (s *source) Poll() int {
	n := 0
	if !s.parked.empty() {
		n += s.recheck()
	}
	if !s.waiting.empty() {
		n += s.resend()
	}
	if !s.orphaned {
		n += s.take()
		s.publish()
	}
	return n
}

// publish shows answers to the front end.
func (s *source) publish() {
	if s.answered {
		s.answered = false
		s.comp.Publish()
		s.rouse()
	}
}

func (s *source) take() int {
	room := min(len(s.sqes), len(s.reqs)-s.inflight)
	if room == 0 {
		return 0
	}
	n := s.comp.Pop(s.sqes[:room])
	s.large = false
	for i := range s.sqes[:n] {
		s.onSubmit(&s.sqes[i])
	}
	if s.comp.Err() != nil {
		s.owner.corrupt(s.comp.Err())
	}
	return n
}

// onSubmit checks an entry of the front end and lets it through the gate.
func (s *source) onSubmit(e *shm.SQE) {
	d := s.pump.client.deviceAt(e.Device)
	if d == nil || d.fe.Load() != s.owner {
		s.answer(e.Tag, blk.ENODEV)
		return
	}
	if errno := d.check(e); errno != blk.OK {
		s.answer(e.Tag, errno)
		return
	}
	i := s.pop(&s.free)
	r := &s.reqs[i]
	r.sqe, r.dev = *e, d
	r.arrived, r.sent = s.pump.pump.Now(), 0
	s.inflight++
	d.shares[s.pump.index].inflight.Add(1)
	s.large = s.large || e.Len >= largeIO
	s.enter(i)
}

// largeIO is the size from which spinning costs more than it saves.
const largeIO = 256 << 10

// check is the gate for entries of an untrusted front end.
func (d *Device) check(e *shm.SQE) blk.Errno {
	if errno := d.limits.Load().Check(e.Op, e.Offset, uint64(e.Len)); errno != blk.OK {
		return errno
	}
	if e.Op.HasData() {
		size := uint64(d.arena.Size())
		if e.Arena != d.index || uint64(e.Len) > size || e.ArenaOff > size-uint64(e.Len) {
			return blk.EINVAL
		}
	}
	return blk.OK
}

// enter sends request i, parks or fails it, as its device's gate says.
func (s *source) enter(i uint32) {
	r := &s.reqs[i]
	switch r.dev.gate.Load() {
	case gateOpen:
		if !s.waiting.empty() {
			s.push(&s.waiting, i) // not past those that wait for a permit
			return
		}
		s.send(i)
	case gateWait:
		s.push(&s.parked, i)
	default:
		s.finish(i, blk.EIO)
	}
}

// send hands request i to RTRS.
func (s *source) send(i uint32) {
	switch err := s.transmit(i); err {
	case nil:
		s.noteSent(&s.reqs[i])
	case rtrs.ErrNoPermit:
		s.push(&s.waiting, i)
	case rtrs.ErrDisconnected:
		s.lost(i)
	default:
		s.finish(i, blk.ToErrno(err))
	}
}

func (s *source) transmit(i uint32) error {
	r := &s.reqs[i]
	d, e := r.dev, &r.sqe
	msg := rnbdwire.IO(s.msg[:])
	d.encode(msg, e)
	q := d.session.queues[s.pump.index]
	tag := uint64(s.index)<<32 | uint64(i)
	switch e.Op {
	case blk.Read:
		return q.Read(tag, rtrs.Data{Region: d.region, Off: int(e.ArenaOff), Len: int(e.Len)}, msg)
	case blk.Write:
		return q.Write(tag, rtrs.Data{Region: d.region, Off: int(e.ArenaOff), Len: int(e.Len)}, msg)
	case blk.Flush: // as the kernel's client does it
		return q.Read(tag, rtrs.Data{}, msg)
	}
	return q.Write(tag, rtrs.Data{}, msg)
}

// noteSent counts the time that a request waited here. A request that is sent
// again because its path was lost has been on the wire all the time.
func (s *source) noteSent(r *request) {
	if r.sent == 0 {
		r.sent = s.pump.pump.Now()
		r.dev.latency[s.pump.index].queue.Record(r.sqe.Op, r.sent-r.arrived)
	}
}

// encode fills the RNBD message for e: docs/protocol/rnbd.md, "IO".
func (d *Device) encode(msg rnbdwire.IO, e *shm.SQE) {
	rw := uint32(e.Op)
	if e.Flags&blk.FUA != 0 || e.Op == blk.Flush {
		rw |= rnbdwire.FlagFUA
	}
	if e.Flags&(blk.Sync|blk.FUA) != 0 || e.Op == blk.Read || e.Op == blk.Flush {
		rw |= rnbdwire.FlagSync
	}
	sector, prio := e.Offset/blk.SectorSize, e.Prio
	if e.Op == blk.Flush {
		sector, prio = ^uint64(0), 0
	}
	rnbdwire.IOFields{
		DeviceID: d.id.Load(), Sector: sector, RW: rw, BISize: e.Len, Prio: prio,
	}.Put(msg)
}

// onDone is RTRS's answer to the request of tag.
func (p *pumpShare) onDone(tag uint64, errno int) {
	s := p.sources[tag>>32]
	i := uint32(tag)
	if errno == int(blk.ECONNABORTED) {
		s.lost(i)
	} else {
		s.finish(i, blk.Errno(errno))
	}
}

// lost handles a request that no path is left for.
func (s *source) lost(i uint32) {
	d := s.reqs[i].dev
	if d.loss.Queue == 0 || d.gate.Load() == gateFail || s.orphaned {
		s.finish(i, blk.EIO)
		return
	}
	s.push(&s.parked, i)
}

// finish answers request i and forgets it.
func (s *source) finish(i uint32, errno blk.Errno) {
	r := &s.reqs[i]
	share := &r.dev.shares[s.pump.index]
	if errno == blk.OK {
		share.count(&r.sqe)
	}
	if r.sent != 0 {
		r.dev.latency[s.pump.index].wire.Record(r.sqe.Op, s.pump.pump.Now()-r.sent)
	}
	s.answer(r.sqe.Tag, errno)
	r.dev = nil
	s.push(&s.free, i)
	s.inflight--
	share.inflight.Add(-1)
}

func (s *source) answer(tag uint64, errno blk.Errno) {
	if s.orphaned {
		return
	}
	s.cqe = shm.CQE{Tag: tag, Errno: uint32(errno)}
	s.comp.Push(&s.cqe)
	s.answered = true
}

// resend tries the requests that wait for a permit, in order. Their gates may have
// moved since: what is sent past one that is shut bears the id of a device that is
// open no more, and the server may have given it to another.
func (s *source) resend() (n int) {
	waiting := s.waiting
	s.waiting = emptyList()
	for !waiting.empty() {
		i := s.pop(&waiting)
		if s.enter(i); !s.waiting.empty() { // still no permit
			s.reqs[i].next = waiting.head
			if waiting.head != none {
				s.waiting.tail = waiting.tail
			}
			return n
		}
		n++
	}
	return n
}

// recheck looks whether the gates of parked requests have changed; those that
// may go are sent in the order of their tags.
func (s *source) recheck() (n int) {
	var ready []uint32
	// A gate that moves meanwhile must not split a device's requests: each is
	// looked at once.
	for i := s.parked.head; i != none; i = s.reqs[i].next {
		d := s.reqs[i].dev
		d.shares[s.pump.index].gate = d.gate.Load()
	}
	parked := s.parked
	s.parked = emptyList()
	for !parked.empty() {
		i := s.pop(&parked)
		if s.orphaned {
			s.finish(i, blk.EIO)
			n++
		} else if s.reqs[i].dev.shares[s.pump.index].gate == gateWait {
			s.push(&s.parked, i)
		} else {
			ready = append(ready, i)
		}
	}
	slices.SortFunc(ready, func(a, b uint32) int {
		ta, tb := s.reqs[a].sqe.Tag, s.reqs[b].sqe.Tag
		switch {
		case ta < tb:
			return -1
		case ta > tb:
			return 1
		}
		return 0
	})
	for _, i := range ready {
		s.enter(i)
	}
	return n + len(ready)
}

// Arm, Disarm and FD make it a source of the pump. Parked requests are woken
// by the control side, which calls pump.Do after it moved a gate.
func (s *source) Arm() bool {
	if s.orphaned {
		return true
	}
	if s.inflight == len(s.reqs) {
		return true // no room for more; answers come from elsewhere
	}
	return s.comp.Arm()
}

func (s *source) Disarm() { s.comp.Disarm() }

func (s *source) FD() int { return s.comp.FD() }

// LargeIO tells the pump not to spin.
func (s *source) LargeIO() bool { return s.large }
