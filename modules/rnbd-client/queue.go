package client

// DATA PATH, the way there. A source joins one ring of a front end with one
// pump. In the order a request meets them:
//
//	Poll       ring -> onRequest               entries are snapshots
//	onRequest  check -> admit                  bounds and limits
//	admit      gate, window -> submit          or park in the device's list: lane.go
//	submit     -> post                         RTRS may have no permit, or no path
//	post       RNBD message -> RTRS queue
//	serve      parked requests -> submit       in rounds, when something has changed
//
// The way back is in answer.go. Everything here runs on the pump. A request is a
// slot of its source's reqs, not of the arena; RTRS's tag is (source, slot).

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

func newSource(p *pumpShare, h *frontendProcess, comp *shm.Completer, entries int) *ringSource {
	s := &ringSource{pump: p, host: h, comp: comp, reqs: make([]request, entries), free: make([]uint32, entries)}
	for i := range s.free {
		s.free[i] = uint32(entries - 1 - i)
	}
	return s
}

// Poll sends waiting requests of the pump, takes requests from the ring and
// publishes answers.
func (s *ringSource) Poll() int {
	if s.orphaned {
		return s.dropWaiting()
	}
	n := s.pump.serveLanes() + s.takeRequests()
	s.publishAnswers()
	return n
}

// dropWaiting ends the waiting requests of a source without a front end: nothing reads
// their answers. It returns their number.
func (s *ringSource) dropWaiting() (n int) {
	for i := range s.reqs {
		if r := &s.reqs[i]; r.dev != nil && !r.held {
			before := s.inflight
			s.pump.dropRequests(r.dev, s)
			n += before - s.inflight
		}
	}
	return n
}

// publishAnswers shows answers to the front end.
func (s *ringSource) publishAnswers() {
	if s.answered {
		s.answered = false
		s.comp.Publish()
		if s.caller != nil {
			s.caller.Notify()
		}
	}
}

// takeRequests takes requests from the ring, as many as there is room for in reqs.
func (s *ringSource) takeRequests() int {
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
		s.host.Kill(s.comp.Err()) // the process broke its ring
	}
	return n
}

// onRequest checks an entry of the front end and passes it to admit.
func (s *ringSource) onRequest(e *shm.SQE) {
	d := s.pump.client.deviceAt(e.Device)
	if d == nil || d.host.Load() != s.host {
		s.pushAnswer(e.Tag, blk.ENODEV)
		return
	}
	if e.Op == blk.Extents {
		s.onExtents(d, e)
		return
	}
	if errno := d.checkEntry(e); errno != blk.OK {
		s.noteFailed(d, e, watchdog.Check, errno)
		s.pushAnswer(e.Tag, errno)
		return
	}
	i := s.beginRequest(d, e)
	s.large = s.large || e.Len >= largeIO
	s.admit(i)
}

// beginRequest makes e a request, and returns its slot. There is a free one.
func (s *ringSource) beginRequest(d *Device, e *shm.SQE) uint32 {
	i := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	r := &s.reqs[i]
	r.sqe, r.dev = *e, d
	r.number, r.writerNotice = 0, nil
	r.arrived, r.sent, r.lost = s.pump.pump.Now(), 0, 0
	s.inflight++
	d.shares[s.pump.index].inflight.Add(1)
	s.pump.begun.Add(1)
	return i
}

// largeIO is the smallest size, in bytes, at which spinning costs more than it
// saves.
const largeIO = 256 << 10

// checkEntry checks an entry of a front end, which is not trusted.
func (d *Device) checkEntry(e *shm.SQE) blk.Errno {
	if errno := d.limits.Load().Check(e.Op, e.Offset, uint64(e.Len)); errno != blk.OK {
		return errno
	}
	if e.Flags&^blk.KnownFlags != 0 {
		return blk.EINVAL
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
func (s *ringSource) admit(i uint32) {
	d := s.reqs[i].dev
	l, sh := d.session.lanes[s.pump.index], &d.shares[s.pump.index]
	gate := d.gate.Load()
	switch {
	case gate == gateFail:
		s.finish(i, blk.EIO, watchdog.Queue)
		return
	case gate == gateOpen && sh.waiting.empty() && l.turn.head == nil && l.mayAdmit(sh):
		if s.submitRequest(i) == served {
			return
		}
	}
	l.enqueueRequest(d, s.requestTag(i))
}

// submitRequest hands request i to RTRS.
func (s *ringSource) submitRequest(i uint32) sendResult {
	r := &s.reqs[i]
	if r.dev.unreported.Load() && s.failForLoss(i) {
		return served
	}
	switch err := s.post(i); {
	case err == nil:
		r.held = true
		r.dev.session.lanes[s.pump.index].onSent(&r.dev.shares[s.pump.index])
		s.noteSent(r)
	case err == rtrs.ErrNoPermit:
		return noPermit
	case err == rtrs.ErrDisconnected && r.dev.waitsForPath():
		return noPath
	case err == rtrs.ErrDisconnected:
		s.finish(i, blk.EIO, watchdog.Wire)
	default:
		s.finish(i, blk.ToErrno(err), watchdog.Wire)
	}
	return served
}

// failForLoss ends request i with EIO if it is the flush that tells users of lost writes.
// It runs on the pump, with the gate open.
func (s *ringSource) failForLoss(i uint32) bool {
	r := &s.reqs[i]
	if !promisesDurability(&r.sqe) || !r.dev.unreported.CompareAndSwap(true, false) {
		return false
	}
	r.dev.flushFailed.Store(s.pump.pump.Now())
	r.dev.reported.Store(true)
	r.dev.session.wakeRun()
	s.finish(i, blk.EIO, watchdog.Server)
	return true
}

// post writes the RNBD message of request i and hands it to RTRS.
func (s *ringSource) post(i uint32) error {
	r := &s.reqs[i]
	d, e := r.dev, &r.sqe
	msg := s.msg[:rnbdwire.IOSize]
	r.id = d.id.Load()
	d.encodeMessage(msg, e, r.id)
	if e.Op.Modifies() && d.session.features.Load()&rnbdwire.FeatureOnce != 0 {
		msg = s.numberWrite(r)
	}
	q, tag := d.session.lanes[s.pump.index].queue, s.requestTag(i)
	switch e.Op {
	case blk.Read:
		return q.Read(tag, rtrs.Data{Region: d.region, Off: int(e.ArenaOff), Len: int(e.Len)}, msg)
	case blk.Write:
		return q.Write(tag, rtrs.Data{Region: d.region, Off: int(e.ArenaOff), Len: int(e.Len)}, msg)
	case blk.Flush: // as the kernel's client does it
		r.covers = d.ackedWrites()
		return q.Read(tag, rtrs.Data{}, msg)
	}
	return q.Write(tag, rtrs.Data{}, msg)
}

// noteSent records the time that a request waited here. A request that is sent
// again because its path was lost is recorded once: the time since it was first
// sent counts as the wire's.
func (s *ringSource) noteSent(r *request) {
	if r.sent == 0 {
		r.sent = s.pump.pump.Now()
		r.dev.latency[s.pump.index].queue.Record(r.sqe.Op, r.sent-r.arrived)
	}
}

// encodeMessage fills the RNBD message for e: docs/extend/protocol/rnbd.md, "IO".
func (d *Device) encodeMessage(msg rnbdwire.IO, e *shm.SQE, id uint32) {
	rw := uint32(e.Op)
	if e.Flags&blk.FUA != 0 || e.Op == blk.Flush {
		rw |= rnbdwire.FlagFUA
	}
	if e.Flags&blk.NoUnmap != 0 && e.Op == blk.WriteZeroes {
		rw |= rnbdwire.FlagNoUnmap
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
func (s *ringSource) Arm() bool {
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

func (s *ringSource) Disarm() { s.comp.Disarm() }

func (s *ringSource) FD() int { return s.comp.FD() }

// LargeIO reports whether the pump should not spin.
func (s *ringSource) LargeIO() bool { return s.large }

// addSource gives s a number on its pump and starts polling it.
func (p *pumpShare) addSource(s *ringSource) error {
	p.pump.Call(func() {
		for i, old := range p.sources {
			if old == nil {
				s.index = uint32(i)
				p.sources[i] = s
				return
			}
		}
		s.index = uint32(len(p.sources))
		p.sources = append(p.sources, s)
	})
	return p.pump.Add(s)
}

// removeSource stops polling s. All requests of s have ended.
func (p *pumpShare) removeSource(s *ringSource) {
	p.pump.Remove(s)
	p.pump.Call(func() { p.sources[s.index] = nil })
}

// sendResult is the result of an attempt to send a request, or says why there was no
// attempt.
type sendResult uint8

const (
	served   sendResult = iota // sent or answered
	nothing                    // the device has no waiting request
	isShut                     // the device's gate
	isFull                     // the device's window
	noPermit                   // of the session
	noPath                     // no path of the session takes requests; RTRS wakes the lane after it has removed a lost one
)

// serveLanes sends the waiting requests of the lanes that have something to send, and
// returns their number.
func (p *pumpShare) serveLanes() (n int) {
	if g := p.client.gates.Load(); g != p.gates {
		p.gates = g
		p.unparkAll()
	}
	for p.lanes != nil {
		l := p.lanes
		p.lanes, l.listed = l.next, false
		n += l.serveDevices()
	}
	return n
}

// unparkAll moves all devices that wait for a gate, a permit or a window to
// turn, because a gate may have moved to fail.
func (p *pumpShare) unparkAll() {
	for p.parked.head != nil {
		d := p.parked.popDevice(p.index)
		l := d.session.lanes[p.index]
		l.turn.pushDevice(p.index, d)
		l.scheduleServe()
	}
	for p.stuck != nil {
		l := p.stuck
		p.stuck, l.stuck = l.nextStuck, false
		l.turn.takeAll(p.index, &l.full)
		l.resumeServe()
	}
}

// serveDevices sends a request of each device in turn until permits or requests run out,
// and returns the number of requests that were sent or answered.
func (l *sessionLane) serveDevices() (n int) {
	for i := l.pump.index; l.turn.head != nil && !l.blocked; {
		d := l.turn.popDevice(i)
		switch sh := &d.shares[i]; l.serveOne(d, sh) {
		case served:
			n++
			l.turn.pushDevice(i, d)
		case nothing:
			sh.placed = false
		case isShut:
			l.pump.parked.pushDevice(i, d)
		case isFull:
			l.full.pushDevice(i, d)
		case noPermit, noPath: // a path may join meanwhile, and that moves no gate
			l.turn.pushFront(i, d)
			l.blocked = true
		}
	}
	if !l.stuck && (l.blocked || l.full.head != nil) {
		l.stuck, l.nextStuck, l.pump.stuck = true, l.pump.stuck, l
	}
	return n
}

// serveOne sends the next request of d. It checks the gate again: a request
// sent through a closed gate would carry a stale device id, and the server may
// have reassigned that id.
func (l *sessionLane) serveOne(d *Device, sh *deviceShare) sendResult {
	if sh.waiting.empty() {
		return nothing
	}
	s, i := l.pump.locateTag(sh.waiting.head)
	v := served
	switch gate := d.gate.Load(); {
	case s.orphaned || gate == gateFail:
		s.finish(i, blk.EIO, s.reqs[i].failedAt())
	case gate == gateWait:
		return isShut
	case !l.mayAdmit(sh):
		return isFull
	default:
		v = s.submitRequest(i)
	}
	if v == served {
		l.pump.popRequest(&sh.waiting)
	}
	return v
}

// dropRequests ends the waiting requests for d that came from s. Nothing reads answers
// to s any more.
func (p *pumpShare) dropRequests(d *Device, s *ringSource) {
	waiting := &d.shares[p.index].waiting
	all := *waiting
	*waiting = emptyList()
	for !all.empty() {
		tag := p.popRequest(&all)
		if from, i := p.locateTag(tag); from == s {
			s.finish(i, blk.EIO, watchdog.Queue)
		} else {
			p.pushRequest(waiting, tag)
		}
	}
}
