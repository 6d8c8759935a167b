package rtrs

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// heartbeatTimer watches one path. Both ends run their own and answer the other's
// at once.
//
// Every interval: if the peer was silent for more than limit intervals since an
// unanswered HB_MSG, it is dead; if one is unanswered, wait; else send one.
// Anything that arrives on any connection of the path counts as an answer.
type heartbeatTimer struct {
	// Of the owner of connection 0.
	next   time.Time
	last   time.Time // of the last tick that was due, or of the start
	missed int
	alarm  pollerAlarm
	posted uint64  // HB_MSGs
	acked  uint64  // how many of them are answered, at least
	asks   []hbAsk // in the order of their numbers

	born    time.Time
	sentAt  atomic.Int64 // ns since born, of the last HB_MSG; 0: answered
	latency atomic.Int64 // ns of the last round trip, 0: none yet
}

// hbAsk is called when the HB_MSG with that number is answered.
type hbAsk struct {
	number uint64
	f      func()
}

// hbAction is the action that a tick asks for.
type hbAction uint8

const (
	hbNothing hbAction = iota
	hbSend             // post an HB_MSG on connection 0
	hbDead             // give the path up
)

// startBeats begins watching: the first HB_MSG goes out between one and two
// intervals from now.
func (h *heartbeatTimer) startBeats(now time.Time, interval time.Duration) {
	h.next, h.last, h.missed, h.born = nextBeat(now.Add(interval), interval), now, 0, now
	h.sentAt.Store(0)
}

// firstBeat is the origin of the times of heartbeats. It has a monotonic clock
// reading.
var firstBeat = time.Now()

// nextBeat returns the next moment, from t on, at which all paths of the process
// with that interval send: together they wake an idle process, and its peer,
// once per interval and not once per path.
func nextBeat(t time.Time, interval time.Duration) time.Time {
	late := t.Sub(firstBeat) % interval
	if late < 0 { // virtual time begins before firstBeat
		late += interval
	}
	if late > 0 {
		return t.Add(interval - late)
	}
	return t
}

// onTick is called at h.next, or before. heard reports whether anything arrived since
// the last call.
func (h *heartbeatTimer) onTick(now time.Time, heard bool, interval time.Duration, limit int) hbAction {
	if heard {
		h.missed = 0
	}
	if now.Before(h.next) {
		return hbNothing
	}
	h.next, h.last = nextBeat(now.Add(1), interval), now
	switch {
	case h.missed > limit:
		return hbDead
	case h.missed > 0:
		h.missed++
		return hbNothing
	}
	h.missed = 1
	return hbSend
}

// probePeer makes the peer dead unless something arrives from it within one interval
// from now. It returns false if such a wait is under way already.
func (h *heartbeatTimer) probePeer(now time.Time, interval time.Duration, limit int) bool {
	if h.missed > limit {
		return false
	}
	h.next, h.missed = now.Add(interval), limit+1
	return true
}

// followPeer is called when an HB_MSG of the peer has come: ours goes out together
// with the answer, so that two idle hosts wake once per interval and not twice.
// Ours is not due again before the peer's next one has had its time and some
// more. Only one end may follow.
func (h *heartbeatTimer) followPeer(now time.Time, interval time.Duration, tick func(now time.Time)) {
	if now.Sub(h.last) >= interval/2 {
		h.next = now
		tick(now)
	}
	h.next = now.Add(interval + interval/8)
}

// lastLatency returns the last round trip, 0 before the first.
func (h *heartbeatTimer) lastLatency() time.Duration { return time.Duration(h.latency.Load()) }

// sendOn posts an HB_MSG on c. The owner of c calls it.
func (h *heartbeatTimer) sendOn(c *conn) {
	h.sentAt.Store(h.monotonicNow())
	h.postBeat(c)
}

func (h *heartbeatTimer) postBeat(c *conn) {
	if c.postImm(rtrswire.HeartbeatImm) {
		h.posted++
	}
}

// askPeer sends one more HB_MSG on c and calls f, on the owner of c, when the peer
// has answered that one or a later one. If the send queue is full it is the next
// that will be sent.
func (h *heartbeatTimer) askPeer(c *conn, f func()) {
	if len(h.asks) == rtrswire.MaxPaths { // of a peer that answers none
		h.asks = slices.Delete(h.asks, 0, 1)
	}
	h.asks = append(h.asks, hbAsk{h.posted + 1, f})
	h.sentAt.CompareAndSwap(0, h.monotonicNow())
	h.postBeat(c)
}

// onAck counts an HB_ACK. Answers are in order; a peer may leave some out.
func (h *heartbeatTimer) onAck() {
	h.acked = min(h.acked+1, h.posted)
	for len(h.asks) > 0 && h.asks[0].number <= h.acked {
		h.asks[0].f()
		h.asks = h.asks[1:]
	}
}

// monotonicNow returns the time in nanoseconds by a monotonic clock, never 0.
func (h *heartbeatTimer) monotonicNow() int64 { return max(int64(time.Since(h.born)), 1) }

// onImm serves the heartbeat immediates that arrive on c, connection 0 of the
// path. Any other immediate is none of ours. Owner of c.
func (h *heartbeatTimer) onImm(c *conn, imm rtrswire.Imm) {
	switch imm.Type() {
	case rtrswire.ImmHeartbeat:
		c.postImm(rtrswire.HeartbeatAckImm)
	case rtrswire.ImmHeartbeatAck:
		if c.cid != 0 {
			return
		}
		if at := h.sentAt.Swap(0); at != 0 {
			h.latency.Store(max(h.monotonicNow()-at, 1))
		}
		h.onAck()
	}
}
