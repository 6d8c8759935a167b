package plugin

// DATA PATH of front ends.

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// FrontQueue is a front end's end of one ring: it asks, the host answers. It
// belongs to the thread that Serve runs on; only Closed may be called from
// elsewhere.
type FrontQueue struct {
	asks asks
	pump int
	s    *shm.Submitter
	size int
	// stats by index of the device; others change the table.
	stats *table[deviceStats]
}

func newFrontQueue(pump int, ring *shm.Ring, stats *table[deviceStats]) *FrontQueue {
	q := &FrontQueue{pump: pump, s: ring.Submitter(), size: ring.Entries(), stats: stats}
	q.asks.init(q.s.FD())
	return q
}

// Push queues a request; it is visible after Publish. False: full, answers
// have to be popped first.
func (q *FrontQueue) Push(e *shm.SQE) bool { return q.s.Push(e) }

// Space is how many requests Push takes now.
func (q *FrontQueue) Space() int { return q.s.Space() }

// Fits reports whether a device with sent requests in flight may have one more: see
// shm.Submitter.Fits. A front end that asks keeps a device that does not answer from
// taking the ring from all others.
func (q *FrontQueue) Fits(sent int) bool { return q.s.Fits(sent) }

// Publish shows the host everything pushed so far.
func (q *FrontQueue) Publish() { q.s.Publish() }

// Pop takes answers and returns their number. Call it in every turn of the
// loop, because it also notices the host's requests.
func (q *FrontQueue) Pop(dst []shm.CQE) int {
	n := q.s.Pop(dst)
	if n == 0 && q.s.Err() != nil {
		q.asks.broken.Store(true)
	}
	if q.asks.pending() {
		q.asks.answer()
	}
	return n
}

// Served counts a request of a user of the device that took ns nanoseconds:
// from its arrival to the reply's leaving, as the user would measure it.
func (q *FrontQueue) Served(device uint32, op blk.Op, ns int64) {
	if d := q.stats.get(device); d != nil && q.pump < len(d.queues) {
		d.queues[q.pump].Record(op, ns)
	}
}

// Arm asks for FD to become readable at the next event. False: something is
// there already, do not sleep.
func (q *FrontQueue) Arm() bool {
	if q.asks.pending() || q.Closed() || !q.s.Arm() {
		return false
	}
	if q.asks.pending() || q.Closed() {
		q.s.Disarm()
		return false
	}
	return true
}

// Disarm withdraws Arm after waking.
func (q *FrontQueue) Disarm() { q.s.Disarm() }

// FD is the descriptor to sleep on.
func (q *FrontQueue) FD() int { return q.s.FD() }

// Closed tells Serve to return: the host detached, or it broke the ring.
func (q *FrontQueue) Closed() bool { return q.asks.ended() }

// Pump is the number of the queue, from 0.
func (q *FrontQueue) Pump() int { return q.pump }

// Depth is the most requests that can be in flight.
func (q *FrontQueue) Depth() int { return q.size }

// InFlight is how many requests have no answer yet.
func (q *FrontQueue) InFlight() int { return q.s.InFlight() }

func (q *FrontQueue) idle() bool { return q.InFlight() == 0 }
