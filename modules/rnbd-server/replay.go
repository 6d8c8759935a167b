package server

// Writes that are sent again: docs/protocol/rnbd.md, "Writes that are repeated".
//
// A write without an answer may have been carried out. Carrying it out again
// would overwrite later writes of other clients. So a repetition is refused if
// another client may have written since the first try. While a repetition is
// under way the writes of other clients wait. Repetitions come from:
//
//   - a client on another path of its session, with the same number (IO_ONCE) and
//     in the same chunk: request.done has the answer, nothing is carried out; or
//     request.maybe has the number, of a write that ended while a dead plugin had it
//   - a client in another session (IO_AGAIN), with the time since when
//   - this server, for the requests of a dead plugin: since request.sent
//
// The rule applies to a whole node; the ranges of writes are not compared.

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// usage is the record of the writers of one node. Times are latency.Now.
//
// Writes store a time in their flow only while two mappings may write, and for a while afterwards.
// The order matters: a write stores its time, then reads repeats; a repetition increments repeats,
// then reads the times of others. So one of them sees the other. At its end a write stores its time
// before it leaves flow.inflight, and a repetition reads inflight before the time.
type usage struct {
	shared  atomic.Bool  // two mappings may write, or could until lately
	repeats atomic.Int32 // repetitions under way

	mu      sync.Mutex  // taken after all other locks
	writers []*mapping  // mappings that may write
	by      uint64      // writer of the repetitions under way
	held    []func()    // functions that continue the writes waiting for the end of repetitions
	gone    departures  // mappings that were closed
	calm    *time.Timer // runs relax; nil before the first departure
}

// departures are the times of the last writes of mappings that were closed.
type departures struct {
	latest uint64 // the writer that wrote last
	at     int64  // its last write, or its close; 0: there is none
	others int64  // the same of the others
}

// note records that writer may have written until at. If at is 0 it has not.
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

// butOf returns the time until which writers other than writer may have
// written. It returns 0 if none has.
func (d *departures) butOf(writer uint64) int64 {
	if writer == d.latest {
		return d.others
	}
	return d.at
}

// maxUsages bounds the records of nodes without a writer.
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

// forgetUsage removes a record to make room for another one. The caller holds
// mu.
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

// add adds m to the writers. Earlier writers did not store the time of their
// last write, so it counts as now.
func (u *usage) add(m *mapping) {
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

// remove undoes add. shown reports that m was open and may have written.
func (u *usage) remove(m *mapping, shown bool) {
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

// relaxAfter is longer than the time that requests wait for a server. A client
// that has closed the node may return and repeat writes within that time. Until
// then the times of the others' writes are known exactly.
const relaxAfter = 10 * time.Minute

// relax makes writes store no times any more if there is at most one writer.
func (u *usage) relax() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.writers) < 2 {
		u.shared.Store(false)
	}
}

// wrote returns the time of m's last write, as far as writes have stored it,
// and 0 if there was none.
func (m *mapping) wrote() int64 {
	at := m.wroteBefore.Load()
	for i := range m.flows {
		at = max(at, m.flows[i].wroteAt.Load())
	}
	return at
}

// ask reports whether clients other than m's may write, and returns the current
// time.
func (u *usage) ask(m *mapping) (shared bool, now int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.others(m)) > 0, latency.Now()
}

// others returns the mappings of other clients that may write. The caller holds
// mu.
func (u *usage) others(m *mapping) (out []*mapping) {
	for _, o := range u.writers {
		if o.writer != m.writer {
			out = append(out, o)
		}
	}
	return out
}

// repeat begins a repetition by m of a write that may have been carried out
// since the time since. It reports whether the repetition is allowed. If
// since is 0, the write was sent before this server was started.
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

// sinceShared means a time before another client had the device open for
// writing. That client may have written since, and may not have opened the
// device again.
const sinceShared = -1

// undisturbed reports whether no other client can have written since the time
// since, and none has a write under way. If since is 0, a client that is
// connected may have written before this server was started. The caller holds
// mu.
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

// hold arranges a call of resume at the end of the repetitions of other clients
// than m's. It returns false if there are none.
func (u *usage) hold(m *mapping, resume func()) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.repeats.Load() == 0 || u.by == m.writer {
		return false
	}
	u.held = append(u.held, resume)
	return true
}

// repetition reports whether r repeats a write that may have been carried out,
// and returns the time of the first try. again is its message if the client
// says so, else nil.
func (s *Server) repetition(r *request, again rnbdwire.IOAgain) (repeats bool, since int64) {
	switch {
	case again != nil:
		return true, s.since(again.Fields())
	case r.number != 0 && r.number == r.maybe:
		return true, r.maybeSince
	}
	return false, 0
}

// inOrder reports whether a write may go on. If not, it was answered or waits.
// repeats reports that it may have been carried out since the time since. It
// runs on the pump.
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

// since converts the time in a client's message to a time of this server's
// clock. It returns 0 or sinceShared for a time of another server.
func (s *Server) since(f rnbdwire.AgainFields) int64 {
	switch {
	case f.Since.Server == s.number && f.Since.Time>>63 == 0:
		return max(int64(f.Since.Time), 1)
	case f.Shared:
		return sinceShared
	}
	return 0
}
