package server

// Writes that are sent again: docs/extend/protocol/rnbd.md, "Writes that are repeated".
//
// A write without an answer may have been carried out. Carrying it out again
// would overwrite later writes of other clients. So a repetition is refused if
// another client may have written since the first try. While a repetition is
// under way the writes of other clients wait. Repetitions come from:
//
//   - a client on another path of its session, with the same number (IO_ONCE) and
//     in the same chunk. If the number is request.done, the write has ended: its
//     result is the answer, and nothing is carried out. If it is request.maybe, the
//     write ended while a dead plugin had it, and is repeated
//   - a client in another session (IO_AGAIN). The message has the time of the first try
//   - this server, for the requests of a dead plugin. request.sent is that time
//
// The rule applies to a whole node, a file or block device: the ranges of writes
// are not compared.

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// checkRepetition reports whether r repeats a write that may have been carried out,
// and returns the time of the first try. again is its message if the client
// says so, else nil.
func (s *Server) checkRepetition(r *request, again rnbdwire.IOAgain) (repeats bool, since int64) {
	switch {
	case again != nil:
		return true, s.localTime(again.Fields())
	case r.number != 0 && r.number == r.maybe:
		return true, r.maybeSince
	}
	return false, 0
}

// inOrder reports whether a write may go on. If not, it was answered or waits. If
// repeats is true, the write may have been carried out, and since is the time of
// its first try. inOrder runs on the pump.
func (q *ioQueue) inOrder(r *request, repeats bool, since int64) bool {
	u := r.m.writers
	if repeats && !q.beginRepeat(r, since) {
		return false
	}
	if !u.shared.Load() {
		return true
	}
	r.m.flows[q.pump].wroteAt.Store(latency.Now())
	if r.repeats || u.repeats.Load() == 0 {
		return true
	}
	r.state = reqHeld
	if u.awaitRepetitions(r.m, func() { q.server.pumps[q.pump].pump.Do(func() { q.resumeHeld(r) }) }) {
		return false
	}
	r.state = reqIdle
	return true
}

// resumeHeld continues a write that waited for a repetition. It runs on the
// pump.
func (q *ioQueue) resumeHeld(r *request) {
	if q.inOrder(r, false, 0) {
		q.admit(r)
		if q.sub != nil {
			q.sub.Publish()
		}
	}
}

// beginRepeat reports whether r may be repeated. If not, it was answered. It
// runs on the pump.
func (q *ioQueue) beginRepeat(r *request, since int64) bool {
	if r.repeats {
		return true
	}
	if r.repeats = r.m.writers.beginRepetition(r.m, since); r.repeats {
		return true
	}
	if r.m.refusals.Add(1) == 1 {
		q.server.log.Warn("a write is not repeated, now or later ones: another client may have written to the device since it was sent first",
			"session", r.m.session.name, "device", r.m.name)
	}
	q.finish(r, blk.EREMCHG)
	return false
}

// localTime converts the time in a client's message to a time of this server's
// clock. It returns 0 or sinceShared for a time of another server.
func (s *Server) localTime(f rnbdwire.AgainFields) int64 {
	switch {
	case f.Since.Server == s.number && f.Since.Time>>63 == 0:
		return max(int64(f.Since.Time), 1)
	case f.Shared:
		return sinceShared
	}
	return 0
}
