package client

// DATA PATH, the way back. In the order an answer meets them:
//
//	onDone    RTRS -> finish, lost, deny or refuse
//	lost      no path is left: back into the device's list, or finish
//	finish    statistics -> answer; a failure is counted
//	answer    completion in the ring
//
// Everything here runs on the pump of the request.

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// onDone handles RTRS's answer to the request of tag.
func (p *pumpShare) onDone(tag uint64, errno int) {
	s, i := p.locateTag(tag)
	r := &s.reqs[i]
	r.held = false
	r.dev.session.lanes[p.index].onEnded(&r.dev.shares[p.index])
	switch {
	case errno == rtrs.Lost:
		s.onPathLost(i)
	case errno == int(blk.ENOTCONN):
		s.onDenied(i)
	case errno == int(blk.EREMCHG) && r.number != 0:
		s.onRefused(i)
	default:
		if promisesDurability(&r.sqe) {
			r.dev.noteFlush(r, blk.Errno(errno), s.orphaned, s.pump.pump.Now())
		}
		s.finish(i, blk.Errno(errno), watchdog.Server)
	}
}

// onDenied handles a request of a device that the server does not know. The server
// has done nothing. The device is opened again; until then loss decides about
// the request.
func (s *ringSource) onDenied(i uint32) {
	r := &s.reqs[i]
	d := r.dev
	shut := gateWait
	if !d.waitsForPath() {
		shut = gateFail
	}
	if r.id == d.id.Load() && d.gate.CompareAndSwap(gateOpen, shut) {
		s.pump.client.gates.Add(1)
		d.denied.Store(true)
		d.session.wakeRun()
	}
	s.onPathLost(i)
}

// onRefused ends a write that may have been carried out and must not be repeated.
// It runs on the pump.
func (s *ringSource) onRefused(i uint32) {
	d := s.reqs[i].dev
	d.refused.Add(1)
	d.session.wakeRun()
	s.finish(i, blk.EIO, watchdog.Server)
}

// onPathLost handles a request that has no path left.
func (s *ringSource) onPathLost(i uint32) {
	r := &s.reqs[i]
	d, now := r.dev, s.pump.pump.Now()
	if r.lost == 0 {
		r.lost = now
	}
	if !d.waitsForPath() || d.gate.Load() == gateFail || s.orphaned || d.loss.isOver(now-r.lost) {
		s.finish(i, blk.EIO, watchdog.Wire)
		return
	}
	d.session.lanes[s.pump.index].waitAgain(d, s.requestTag(i))
}

// finish answers request i and frees it. at is the stage of a failure.
func (s *ringSource) finish(i uint32, errno blk.Errno, at watchdog.Stage) {
	r := &s.reqs[i]
	share := &r.dev.shares[s.pump.index]
	if errno == blk.OK {
		share.countDone(r)
	} else {
		s.noteFailed(r.dev, &r.sqe, at, errno)
	}
	if r.sent != 0 {
		r.dev.latency[s.pump.index].wire.Record(r.sqe.Op, s.pump.pump.Now()-r.sent)
	}
	s.pushAnswer(r.sqe.Tag, errno)
	d := r.dev
	r.dev = nil
	s.free = append(s.free, i)
	s.inflight--
	share.inflight.Add(-1)
	s.pump.ended.Add(1)
	if s.orphaned {
		s.onOrphanDone(d)
	}
}

// countDone counts a request that has succeeded.
func (s *deviceShare) countDone(r *request) {
	e := &r.sqe
	switch e.Op {
	case blk.Read:
		s.rx.Add(uint64(e.Len) / blk.SectorSize)
	case blk.Write:
		s.tx.Add(uint64(e.Len) / blk.SectorSize)
	case blk.Flush:
		s.noteFlushed(r.covers)
	}
	if mayBeCached(e) {
		s.cached.Add(1)
	}
}

// failedAt is the stage at which r fails if no path is left.
func (r *request) failedAt() watchdog.Stage {
	if r.sent != 0 {
		return watchdog.Wire
	}
	return watchdog.Queue
}

// noteFailed counts a request that fails, and passes it on to the log. Answers
// to an orphan are dropped, and are not counted.
func (s *ringSource) noteFailed(d *Device, e *shm.SQE, at watchdog.Stage, errno blk.Errno) {
	if s.orphaned {
		return
	}
	d.shares[s.pump.index].failures.Count(at, errno)
	s.pump.failed.Add(watchdog.Failure[*Device]{Device: d, Op: e.Op, Stage: at, Errno: errno, Len: e.Len, Offset: e.Offset})
}

func (s *ringSource) pushAnswer(tag uint64, errno blk.Errno) {
	if s.orphaned {
		return
	}
	s.cqe = shm.CQE{Tag: tag, Errno: uint32(errno)}
	s.comp.Push(&s.cqe)
	s.answered = true
}

// onOrphanDone is called by the pump when a request of an orphan has ended: its
// device may be shown again.
func (s *ringSource) onOrphanDone(d *Device) {
	if a := d.att.Load(); a != nil {
		a.wakeWorker()
	}
	if s.inflight == 0 && s.ended != nil {
		close(s.ended)
		s.ended = nil
	}
}
