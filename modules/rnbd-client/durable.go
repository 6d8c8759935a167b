package client

// Writes that a power cut loses: docs/extend/protocol/rnbd.md. The server tells the incarnation
// of the storage with each OPEN. If a device comes back with another one, and writes were
// acknowledged since the last flush, these may be lost. Then one flush, or one write with
// FUA, fails with EIO, as if the disk had been lost with the host of its users.
//
// Pumps count, each in its share of the device, the writes that were acknowledged without
// FUA. A flush is sent with the sum of these counts (request.covers): the writes in it are
// durable when the flush is answered. A count that is read late makes the sum too small, so
// in doubt a write counts as not flushed.

import (
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// mayBeCached reports whether e, once it is acknowledged, may still be lost with a cache. The
// loss of a discard breaks no promise: reads after a discard may return anything.
func mayBeCached(e *shm.SQE) bool {
	return e.Op.Modifies() && e.Op != blk.Discard && e.Flags&blk.FUA == 0
}

// promisesDurability reports whether users take the success of e for a promise that writes survive
// a power cut.
func promisesDurability(e *shm.SQE) bool { return e.Op == blk.Flush || e.Flags&blk.FUA != 0 }

// ackedWrites returns the number of acknowledged writes of d that need a flush.
func (d *Device) ackedWrites() (n uint64) {
	for i := range d.shares {
		n += d.shares[i].cached.Load()
	}
	return n
}

// noteFlushed records the success of a flush. It runs on the pump of sh.
func (sh *deviceShare) noteFlushed(covers uint64) {
	if have := sh.flushed.Load(); covers > have {
		sh.flushed.Add(covers - have)
	}
}

// isDirty reports whether a write was acknowledged that no flush has covered since. The
// caller holds mu, or no pump has a request of d.
func (d *Device) isDirty() bool {
	flushed := d.settled
	for i := range d.shares {
		flushed = max(flushed, d.shares[i].flushed.Load())
	}
	return d.ackedWrites() > flushed
}

// errWritesLost is the reason of the EIO that a flush gets.
var errWritesLost = fmt.Errorf("the storage was restarted without its caches: writes that were acknowledged after the last flush may be lost: %w", syscall.EIO)

// errFlushUntold is the reason of the EIO that another flush gets.
var errFlushUntold = fmt.Errorf("a flush has failed, and its front end ended before any user was told for sure: %w", syscall.EIO)

// toldAfter is the time within which a front end that lives tells its user of an answer.
const toldAfter = 5 * time.Second

// noteFlush records the answer of the server to r, a flush or a request with FUA: the next one
// fails if the answer may not reach a user, since the front end has ended, or ends before
// toldAfter has passed and a later flush has succeeded. It runs on the pump.
func (d *Device) noteFlush(r *request, errno blk.Errno, orphaned bool, now int64) {
	switch {
	case errno == blk.EOPNOTSUPP, errno == blk.EINVAL:
	case orphaned && errno != blk.OK:
		d.owe()
	case errno != blk.OK:
		d.flushFailed.Store(now)
	default:
		if failed := d.flushFailed.Load(); failed != 0 && r.sqe.Op == blk.Flush && r.arrived > failed+int64(toldAfter) {
			d.flushFailed.CompareAndSwap(failed, 0)
		}
	}
}

// forgetAnswers makes the next flush of each device of f fail of which one has failed lately:
// f's process has ended, and may have told no user.
func (c *Client) forgetAnswers(f *frontend) {
	for _, d := range c.Devices() {
		if d.fe.Load() == f && d.flushFailed.Swap(0) != 0 {
			d.owe()
		}
	}
}

// owe makes the next flush fail, because an earlier one has failed and users may not know.
// Any goroutine or pump may call it.
func (d *Device) owe() {
	d.untold.Store(true)
	d.unreported.Store(true)
	d.session.wakeRun()
}

// onOwed records that owe was called.
func (d *Device) onOwed() {
	if !d.untold.Swap(false) {
		return
	}
	d.log.Error("the next flush fails", "err", errFlushUntold)
	d.mu.Lock()
	d.losses++
	d.lossWhy = errFlushUntold
	d.recordLoss("flushed", "writes lost", errFlushUntold.Error())
	d.mu.Unlock()
	d.client.sessionChanged()
}

// compareVerifier makes the next flush fail if now is another incarnation of the storage
// than d has written to. It reports whether the state file has to be written. The caller
// holds mu, and the gate of d is shut, or d has failed on the server.
func (d *Device) compareVerifier(now *deviceFacts) (changed bool) {
	if d.known == nil {
		return false
	}
	was := d.known.Verifier
	if now.Verifier == 0 {
		now.Verifier = was // compared when it is told again
	}
	dirty := d.isDirty()
	switch {
	case !was.LosesWrites(): // every write was durable when it was acknowledged
		d.settled = d.ackedWrites()
		return was != now.Verifier
	case was.IsSame(now.Verifier) || !dirty:
		return was != now.Verifier
	}
	d.settled = d.ackedWrites()
	d.losses++
	d.lossWhy = errWritesLost
	d.unreported.Store(true)
	d.log.Error("the next flush fails", "err", errWritesLost)
	d.recordLoss("flushed", "writes lost", errWritesLost.Error())
	return true
}

// inheritLosses takes over the record of an earlier process about lost writes, before d is open.
// Where the record says nothing of flushes, a write counts as not flushed.
func (d *Device) inheritLosses(r *MapRequest) {
	if r.known == nil {
		return
	}
	if !r.clean {
		d.shares[0].cached.Add(1)
	}
	d.unreported.Store(r.unreported)
}

// onReported records that a flush has failed for lost writes.
func (d *Device) onReported() {
	if !d.reported.Swap(false) {
		return
	}
	d.mu.Lock()
	d.log.Error("a flush has failed", "err", d.whyLost())
	d.recordLoss("writes lost", "flushed", "a flush has failed with EIO for the lost writes")
	d.mu.Unlock()
	d.client.sessionChanged()
}

// lossText returns the reason of a failed flush in words, empty if d has lost no writes. The caller holds mu.
func (d *Device) lossText() string {
	switch {
	case d.unreported.Load():
		return d.whyLost().Error() + "; the next flush fails"
	case d.losses > 0:
		return d.whyLost().Error() + "; a flush has failed for that"
	}
	return ""
}

// whyLost returns the reason of the last loss. One of an earlier process counts as a restart
// of the storage. The caller holds mu.
func (d *Device) whyLost() error {
	if d.lossWhy == nil {
		return errWritesLost
	}
	return d.lossWhy
}
