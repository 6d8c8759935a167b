package server

// Writes that are sent again: docs/protocol/rnbd.md, "Writes that are repeated".
//
// A write without an answer may have been carried out. Carried out once more it
// overwrites what another client has written since. So a repetition is refused
// if another client may have written between the first time and now, and while one
// is under way the writes of other clients wait. Who repeats:
//
//   - a client on another path of its session, with the same number (IO_ONCE) and
//     in the same chunk: request.done has the answer, nothing is carried out; or
//     request.maybe has the number, of a write that ended while a dead plugin had it
//   - a client in another session (IO_AGAIN), which says since when
//   - this server, what a dead plugin had: since request.sent
//
// The rule is that of a whole node; what a write covers is not looked at.

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// usage is what the server knows of the writers of one node. Times are latency.Now.
//
// Writes leave a time in their flow only while two mappings may write, and for a while
// afterwards. The order matters: a write stores its time, then looks at repeats; a repetition counts
// itself in repeats, then looks at the times of others. So one of them sees the
// other. At the end a write stores its time before it leaves flow.inflight, and a
// repetition reads inflight before the time.
type usage struct {
	shared  atomic.Bool  // two mappings may write, or might until lately
	repeats atomic.Int32 // repetitions under way

	mu      sync.Mutex  // the last to take
	writers []*mapping  // that may write
	by      uint64      // writer of the repetitions under way
	held    []func()    // resume the writes that wait for their end
	gone    departures  // mappings that are closed
	calm    *time.Timer // runs relax; nil before the first departure
}

// departures say until when writers that have left may have written.
type departures struct {
	latest uint64 // the writer that wrote last
	at     int64  // its last write, or when it left; 0: there is none
	others int64  // the same of the others
}

// note records that writer may have written until at; 0: it has not.
func (d *departures) note(writer uint64, at int64) {
	switch {
	case at == 0:
	case writer == d.latest:
		d.at = max(d.at, at)
	case at >= d.at:
		d.latest, d.at, d.others = writer, at, max(d.others, d.at)
	default:
		d.others = max(d.others, at)
	}
}

// butOf returns until when others than writer may have written; 0: none has.
func (d *departures) butOf(writer uint64) int64 {
	if writer == d.latest {
		return d.others
	}
	return d.at
}

// maxUsages bounds the nodes without a writer whose past is remembered.
const maxUsages = 4096

// usageOf returns the usage of a node. Caller has the node's turn.
func (s *Server) usageOf(id nodeID) *usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u := s.usages[id]; u != nil {
		return u
	}
	if len(s.usages) >= maxUsages {
		s.forgetUsage()
	}
	u := &usage{}
	u.gone.note(0, s.forgotten) // a client may have written until then
	s.usages[id] = u
	return u
}

// forgetUsage makes room for one. Caller holds mu.
func (s *Server) forgetUsage() {
	var oldest nodeID
	var left *usage
	for id, u := range s.usages {
		if s.writers[id] == 0 && (left == nil || u.leftAt() < left.leftAt()) {
			oldest, left = id, u
		}
	}
	if left != nil {
		s.forgotten = max(s.forgotten, left.leftAt())
		delete(s.usages, oldest)
	}
}

func (u *usage) leftAt() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.gone.at
}

// enter makes m one of the writers. What those before it wrote until now has left no
// time: it counts as now.
func (u *usage) enter(m *mapping) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.writers) > 0 && !u.shared.Swap(true) {
		now := latency.Now()
		for _, o := range u.writers {
			o.wroteBefore.Store(now)
		}
	}
	u.writers = append(u.writers, m)
}

// leave ends what enter began. shown: m was open, and may have written.
func (u *usage) leave(m *mapping, shown bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.writers = slices.DeleteFunc(u.writers, func(o *mapping) bool { return o == m })
	switch {
	case shown && u.shared.Load():
		u.gone.note(m.writer, m.wrote())
	case shown:
		u.gone.note(m.writer, latency.Now())
	}
	if !shown {
		return
	}
	u.shared.Store(true)
	if u.calm == nil {
		u.calm = time.AfterFunc(relaxAfter, u.relax)
	} else {
		u.calm.Reset(relaxAfter)
	}
}

// relaxAfter is longer than requests wait for a server: while a writer that has left may
// come back with some, it is known exactly whether the others have written.
const relaxAfter = 10 * time.Minute

// relax has writes leave no times any more if there is one writer.
func (u *usage) relax() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.writers) < 2 {
		u.shared.Store(false)
	}
}

// wrote returns when m wrote last, as far as writes leave times; 0: not at all.
func (m *mapping) wrote() int64 {
	at := m.wroteBefore.Load()
	for i := range m.flows {
		at = max(at, m.flows[i].wroteAt.Load())
	}
	return at
}

// ask returns whether other clients than m's may write, and the time of the answer.
func (u *usage) ask(m *mapping) (shared bool, now int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.others(m)) > 0, latency.Now()
}

// others returns the mappings of other clients that may write. Caller holds mu.
func (u *usage) others(m *mapping) (out []*mapping) {
	for _, o := range u.writers {
		if o.writer != m.writer {
			out = append(out, o)
		}
	}
	return out
}

// repeat begins a repetition by m of what may have been carried out since then, and
// reports whether it may be. since 0: before this server was started.
func (u *usage) repeat(m *mapping, since int64) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.repeats.Load() > 0 && u.by != m.writer {
		return false
	}
	u.by = m.writer
	u.repeats.Add(1)
	if u.undisturbed(m, since) {
		return true
	}
	u.repeats.Add(-1)
	return false
}

// sinceShared is a time before which another client had the device open for writing,
// which may have written since and not be back.
const sinceShared = -1

// undisturbed reports whether no other client can have written since then, nor has a
// write under way. One that is here may have written before this server was
// started. Caller holds mu.
func (u *usage) undisturbed(m *mapping, since int64) bool {
	if since == sinceShared {
		return false
	}
	if at := u.gone.butOf(m.writer); at != 0 && at >= since {
		return false
	}
	for _, o := range u.others(m) {
		busy := o.inflight() > 0
		if at := o.wrote(); since == 0 || at != 0 && (busy || at >= since) {
			return false
		}
	}
	return true
}

// repeated ends a repetition.
func (u *usage) repeated() {
	u.mu.Lock()
	var held []func()
	if u.repeats.Add(-1) == 0 {
		held, u.held = u.held, nil
	}
	u.mu.Unlock()
	for _, resume := range held {
		resume()
	}
}

// hold has resume called at the end of the repetitions of others than m's client. False:
// there are none.
func (u *usage) hold(m *mapping, resume func()) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.repeats.Load() == 0 || u.by == m.writer {
		return false
	}
	u.held = append(u.held, resume)
	return true
}

// repetition reports whether r repeats a write that may have been carried out, and since
// when. again is its message if the client says so, else nil.
func (s *Server) repetition(r *request, again rnbdwire.IOAgain) (repeats bool, since int64) {
	switch {
	case again != nil:
		return true, s.since(again.Fields())
	case r.number != 0 && r.number == r.maybe:
		return true, r.maybeSince
	}
	return false, 0
}

// inOrder reports whether a write may go on; otherwise it has been answered, or waits.
// repeats: it may have been carried out since then. Pump.
func (q *ioQueue) inOrder(r *request, repeats bool, since int64) bool {
	u := r.m.usage
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
	if u.hold(r.m, func() { q.server.pumps[q.pump].pump.Do(func() { q.resumeHeld(r) }) }) {
		return false
	}
	r.state = reqIdle
	return true
}

// resumeHeld lets a write go on that waited for a repetition. Pump.
func (q *ioQueue) resumeHeld(r *request) {
	if q.inOrder(r, false, 0) {
		q.admit(r)
		if q.sub != nil {
			q.sub.Publish()
		}
	}
}

// beginRepeat reports whether r may be repeated; otherwise it has been answered. Pump.
func (q *ioQueue) beginRepeat(r *request, since int64) bool {
	if r.repeats {
		return true
	}
	if r.repeats = r.m.usage.repeat(r.m, since); r.repeats {
		return true
	}
	if r.m.refusals.Add(1) == 1 {
		q.server.log.Warn("a write is not repeated, now or later ones: another client may have written to the device since it was sent first",
			"session", r.m.session.name, "device", r.m.name)
	}
	q.finish(r, blk.EREMCHG)
	return false
}

// since is the time by this server's clock that a client means, 0 or sinceShared if it
// is none of it.
func (s *Server) since(f rnbdwire.AgainFields) int64 {
	switch {
	case f.Since.Server == s.number && f.Since.Time>>63 == 0:
		return max(int64(f.Since.Time), 1)
	case f.Shared:
		return sinceShared
	}
	return 0
}
