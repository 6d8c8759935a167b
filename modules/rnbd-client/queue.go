package client

// DATA PATH, the way there. A source joins one ring of a front end with one
// pump. In the order a request meets them:
//
//	Poll       ring -> onRequest               entries are snapshots
//	onRequest  check -> admit                  bounds and limits
//	admit      gate, window -> submit          or park in the device's list: lane.go
//	submit     -> post                         RTRS may have no permit, or no path
//	post       RNBD message -> RTRS queue
//
// The way back is in answer.go. Everything here runs on the pump. A request is a
// slot of its source's reqs; RTRS's tag is (source, slot).

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// gate is the treatment of a device's requests by the pumps.
type gate = uint32

const (
	gateWait gate = iota // park them: the session may come back
	gateOpen             // send them
	gateFail             // answer EIO
)

type request struct {
	sqe  shm.SQE
	dev  *Device // nil: free
	next uint64  // in the list of waiting requests
	held bool    // it holds a permit; otherwise it waits
	id   uint32  // id of the device, as sent
	// number is the number of a write. sharing is the server's answer about
	// other writers when the write was first sent; see again.go.
	number  uint64
	sharing *sharing
	// arrived is the time at which the request came from the front end, sent
	// that at which it was first sent; 0: not yet.
	arrived, sent int64
}

// source is one ring of a front end on one pump.
type source struct {
	pump  *pumpShare
	host  *host  // requests may name only devices that it is shown; nil: of an IO
	index uint32 // in pump.sources
	comp  *shm.Completer

	reqs     []request
	free     []uint32 // slots
	inflight int
	// orphaned reports that the front end is gone. Answers are dropped.
	orphaned bool
	ended    chan struct{} // of an orphan: closed when its last request has ended
	large    bool
	answered bool         // there are answers to publish
	caller   *pump.Caller // of an IO

	sqes [64]shm.SQE
	cqe  shm.CQE
	msg  [rnbdwire.IOAgainSize]byte
}

func newSource(p *pumpShare, h *host, comp *shm.Completer, entries int) *source {
	s := &source{pump: p, host: h, comp: comp, reqs: make([]request, entries), free: make([]uint32, entries)}
	for i := range s.free {
		s.free[i] = uint32(entries - 1 - i)
	}
	return s
}

// tag identifies request i on the pump and to RTRS.
func (s *source) tag(i uint32) uint64 { return uint64(s.index)<<32 | uint64(i) }

// Poll sends waiting requests of the pump, takes requests from the ring and
// publishes answers.
func (s *source) Poll() int {
	if s.orphaned {
		return s.drop()
	}
	n := s.pump.serve() + s.take()
	s.publish()
	return n
}

// drop ends the waiting requests. Their answers are not read any more.
func (s *source) drop() (n int) {
	for i := range s.reqs {
		if r := &s.reqs[i]; r.dev != nil && !r.held {
			before := s.inflight
			s.pump.dismiss(r.dev, s)
			n += before - s.inflight
		}
	}
	return n
}

// publish shows answers to the front end.
func (s *source) publish() {
	if s.answered {
		s.answered = false
		s.comp.Publish()
		if s.caller != nil {
			s.caller.Notify()
		}
	}
}

// take takes requests from the ring, as many as there is room for.
func (s *source) take() int {
	room := min(len(s.sqes), len(s.reqs)-s.inflight)
	if room == 0 {
		return 0
	}
	n := s.comp.Pop(s.sqes[:room])
	s.large = false
	for i := range s.sqes[:n] {
		s.onRequest(&s.sqes[i])
	}
	if s.comp.Err() != nil {
		s.host.corrupt(s.comp.Err())
	}
	return n
}

// onRequest checks an entry of the front end and passes it to admit.
func (s *source) onRequest(e *shm.SQE) {
	d := s.pump.client.deviceAt(e.Device)
	if d == nil || d.host.Load() != s.host {
		s.answer(e.Tag, blk.ENODEV)
		return
	}
	if errno := d.check(e); errno != blk.OK {
		s.noteFailed(d, e, watchdog.Check, errno)
		s.answer(e.Tag, errno)
		return
	}
	i := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	r := &s.reqs[i]
	r.sqe, r.dev = *e, d
	r.number, r.sharing = 0, nil
	r.arrived, r.sent = s.pump.pump.Now(), 0
	s.inflight++
	d.shares[s.pump.index].inflight.Add(1)
	s.large = s.large || e.Len >= largeIO
	s.admit(i)
}

// largeIO is the smallest size, in bytes, at which spinning costs more than it
// saves.
const largeIO = 256 << 10

// check checks an entry of a front end, which is not trusted.
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

// admit submits request i, or makes it wait or fail, as its device's gate and
// window decide.
func (s *source) admit(i uint32) {
	d := s.reqs[i].dev
	l, sh := d.session.lanes[s.pump.index], &d.shares[s.pump.index]
	gate := d.gate.Load()
	switch {
	case gate == gateFail:
		s.finish(i, blk.EIO, watchdog.Queue)
		return
	case gate == gateOpen && sh.waiting.empty() && l.turn.head == nil && l.admits(sh):
		if s.submit(i) == served {
			return
		}
	}
	l.wait(d, s.tag(i))
}

// submit hands request i to RTRS.
func (s *source) submit(i uint32) verdict {
	r := &s.reqs[i]
	switch err := s.post(i); {
	case err == nil:
		r.held = true
		r.dev.session.lanes[s.pump.index].began(&r.dev.shares[s.pump.index])
		s.noteSent(r)
	case err == rtrs.ErrNoPermit:
		return noPermit
	case err == rtrs.ErrDisconnected && r.dev.loss.Queue != 0:
		return noPath
	case err == rtrs.ErrDisconnected:
		s.finish(i, blk.EIO, watchdog.Wire)
	default:
		s.finish(i, blk.ToErrno(err), watchdog.Wire)
	}
	return served
}

// post writes the RNBD message of request i and gives it to RTRS.
func (s *source) post(i uint32) error {
	r := &s.reqs[i]
	d, e := r.dev, &r.sqe
	msg := s.msg[:rnbdwire.IOSize]
	r.id = d.id.Load()
	d.encode(msg, e, r.id)
	if e.Op.Modifies() && d.session.features.Load()&rnbdwire.FeatureOnce != 0 {
		msg = s.number(r)
	}
	q, tag := d.session.lanes[s.pump.index].queue, s.tag(i)
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
// again because its path was lost counts as on the wire since it was first
// sent.
func (s *source) noteSent(r *request) {
	if r.sent == 0 {
		r.sent = s.pump.pump.Now()
		r.dev.latency[s.pump.index].queue.Record(r.sqe.Op, r.sent-r.arrived)
	}
}

// encode fills the RNBD message for e: docs/protocol/rnbd.md, "IO".
func (d *Device) encode(msg rnbdwire.IO, e *shm.SQE, id uint32) {
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
		DeviceID: id, Sector: sector, RW: rw, BISize: e.Len, Prio: prio,
	}.Put(msg)
}

// Arm, Disarm and FD make s a source of the pump. Other goroutines wake the
// pump after they have moved a gate.
func (s *source) Arm() bool {
	if s.orphaned {
		return true
	}
	if s.pump.lanes != nil {
		return false
	}
	if s.inflight == len(s.reqs) {
		return true // no room for more; answers wake the pump by other means
	}
	return s.comp.Arm()
}

func (s *source) Disarm() { s.comp.Disarm() }

func (s *source) FD() int { return s.comp.FD() }

// LargeIO reports whether the pump should not spin.
func (s *source) LargeIO() bool { return s.large }
