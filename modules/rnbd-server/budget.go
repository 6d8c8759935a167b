package server

// DATA PATH. The limits of an access rule, for requests. All devices that
// a rule allows share its budget, on all pumps: two token buckets and a number of
// requests, in atomic words. In the order a request meets them:
//
//	admit, feedOne -> affords   check; a request that must wait stays in its flow
//	noteSent       -> pay       the request is in the ring
//	onDone         -> refund    its place in the queue depth is free
//
// A request that waits takes no room of other devices: it waits in the flow of its
// own (window.go), and flows are fed in turn. Pumps that check at the same time may
// let one request each through for the same token. A bucket then owes it, so that
// the rate stays exact.

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// depthPause is the pause before a check for room in the queue depth. Another pump
// may have made some.
const depthPause = int64(time.Millisecond)

// dueTime returns the time of the next request's begin: now if it may begin at once.
func (b *budget) dueTime(now int64) int64 {
	p := b.pace.Load()
	if p.QueueDepth > 0 && b.queued.Load() >= int64(p.QueueDepth) {
		return now + depthPause
	}
	at := now
	if p.op > 0 {
		at = max(at, b.ops.paid.Load()-p.opSlack)
	}
	if p.Bytes > 0 {
		at = max(at, b.bytes.paid.Load()-p.byteSlack)
	}
	return at
}

// canAfford reports whether r may begin. If not, the pump wakes when it may. A request
// that a plugin has had before is paid for. A device that is being closed owes no
// more.
func (q *ioQueue) canAfford(r *request) bool {
	b := r.m.budget.Load()
	if b == nil || r.sent != 0 || r.m.closed.Load() {
		return true
	}
	now := int64(q.now)
	at := b.dueTime(now)
	if at <= now {
		return true
	}
	q.server.pumps[q.pump].pacer.wakeAt(min(at, now+longestNap))
	return false
}

// longestNap bounds the sleep of a pump beside requests that wait, since a waiting
// request also ends with its path.
const longestNap = int64(100 * time.Millisecond)

// mayOvertake reports whether r may begin before requests that wait. With a budget it
// may not: it would take the token that a device in its turn waits for.
func (q *ioQueue) mayOvertake(r *request) bool {
	return r.m.budget.Load() == nil || len(q.waiting) == 0 && q.canAfford(r)
}

// noteWaiting counts a request with a budget that could not begin at once.
func (q *ioQueue) noteWaiting(r *request) {
	if b := r.m.budget.Load(); b != nil {
		b.waited.Add(1)
	}
}

// payFor takes the price of a request that a plugin gets. The first plugin that gets it
// costs the tokens.
func (q *ioQueue) payFor(r *request) {
	b := r.m.budget.Load()
	if b == nil {
		return
	}
	r.budget = b
	b.queued.Add(1)
	p, now := b.pace.Load(), int64(q.now)
	if r.sent != 0 {
		return
	}
	if p.op > 0 {
		b.ops.takeTokens(now, p.op)
	}
	if p.Bytes > 0 && (r.sqe.Op == blk.Read || r.sqe.Op == blk.Write) {
		b.bytes.takeTokens(now, p.byteCost(int64(r.sqe.Len)))
	}
}

// freeDepth frees r's place in the queue depth.
func (r *request) freeDepth() {
	if r.budget != nil {
		r.budget.queued.Add(-1)
		r.budget = nil
	}
}
