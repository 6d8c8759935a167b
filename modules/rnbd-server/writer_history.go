package server

import (
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// The record of the writers of a node, and the answer to the question whether a
// client may repeat a write: writerHistory and departedWriters. replay.go uses them.

// noteWrite records that writer may have written until at. If at is 0 it has not.
func (d *departedWriters) noteWrite(writer uint64, at int64) {
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
func (d *departedWriters) butOf(writer uint64) int64 {
	if writer == d.latest {
		return d.others
	}
	return d.at
}

// maxHistories bounds the records of nodes without a writer.
const maxHistories = 4096

// historyOf returns the history of a node. The caller holds the nodeLock.
func (s *Server) historyOf(id nodeID) *writerHistory {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u := s.histories[id]; u != nil {
		return u
	}
	if len(s.histories) >= maxHistories {
		s.forgetHistories()
	}
	u := &writerHistory{}
	u.gone.noteWrite(0, s.forgotten) // a client may have written until then
	s.histories[id] = u
	return u
}

// knownUsage returns the history of a node, nil if there is none.
func (s *Server) knownUsage(id nodeID) *writerHistory {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.histories[id]
}

// forgetHistories removes a record to make room for another one. The caller holds
// mu.
func (s *Server) forgetHistories() {
	var oldest nodeID
	var left *writerHistory
	for id, u := range s.histories {
		if s.writers[id] == 0 && (left == nil || u.leftAt() < left.leftAt()) {
			oldest, left = id, u
		}
	}
	if left != nil {
		s.forgotten = max(s.forgotten, left.leftAt())
		delete(s.histories, oldest)
	}
}

func (u *writerHistory) leftAt() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.gone.at
}

// addWriter adds m to the writers. Earlier writers did not store the time of their
// last write, so it counts as now.
func (u *writerHistory) addWriter(m *mapping) {
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

// removeWriter undoes add. shown reports that m was open and may have written.
func (u *writerHistory) removeWriter(m *mapping, shown bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.writers = slices.DeleteFunc(u.writers, func(o *mapping) bool { return o == m })
	switch {
	case shown && u.shared.Load():
		u.gone.noteWrite(m.writer, m.lastWrite())
	case shown:
		u.gone.noteWrite(m.writer, latency.Now())
	}
	if !shown {
		return
	}
	u.shared.Store(true)
	if u.calm == nil {
		u.calm = time.AfterFunc(relaxAfter, u.stopTiming)
	} else {
		u.calm.Reset(relaxAfter)
	}
}

// relaxAfter is longer than the time that requests wait for a server. A client
// that has closed the node may return and repeat writes within that time. Until
// then the times of the others' writes are known exactly.
const relaxAfter = 10 * time.Minute

// stopTiming makes writes store no times any more if there is at most one writer.
func (u *writerHistory) stopTiming() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.writers) < 2 {
		u.shared.Store(false)
	}
}

// lastWrite returns the time of m's last write, as far as writes have stored it,
// and 0 if there was none.
func (m *mapping) lastWrite() int64 {
	at := m.wroteBefore.Load()
	for i := range m.flows {
		at = max(at, m.flows[i].wroteAt.Load())
	}
	return at
}

// snapshotOthers reports whether clients other than m's may write, and returns the current
// time.
func (u *writerHistory) snapshotOthers(m *mapping) (shared bool, now int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.otherWriters(m)) > 0, latency.Now()
}

// otherWriters returns the mappings of other clients that may write. The caller holds
// mu.
func (u *writerHistory) otherWriters(m *mapping) (out []*mapping) {
	for _, o := range u.writers {
		if o.writer != m.writer {
			out = append(out, o)
		}
	}
	return out
}

// beginRepetition begins a repetition by m of a write that may have been carried out
// since the time since. It reports whether the repetition is allowed. If
// since is 0, the write was sent before this server was started.
func (u *writerHistory) beginRepetition(m *mapping, since int64) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.addReason(m) {
		return false
	}
	if u.noOtherWrites(m, since) {
		return true
	}
	u.repeats.Add(-1)
	return false
}

// beginPrecedence makes the writes of other clients than m's wait until repeated is called.
// It returns false if m's have to wait for those of another client.
func (u *writerHistory) beginPrecedence(m *mapping) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.addReason(m)
}

// addReason counts one more reason for others than m's client to wait. The caller holds
// mu.
func (u *writerHistory) addReason(m *mapping) bool {
	if u.repeats.Load() > 0 && u.by != m.writer {
		return false
	}
	u.by = m.writer
	u.repeats.Add(1)
	return true
}

// unfencedWriter returns a mapping that may write, has requests in flight and has lost all
// of its paths. It returns nil if there is none.
func (u *writerHistory) unfencedWriter() *mapping {
	u.mu.Lock()
	writers := slices.Clone(u.writers)
	u.mu.Unlock()
	for _, o := range writers {
		if o.inFlight() > 0 && o.session.isCut() {
			return o
		}
	}
	return nil
}

// sinceShared means a time before another client had the device open for
// writing. That client may have written since, and may not have opened the
// device again.
const sinceShared = -1

// noOtherWrites reports whether no other client can have written since the time
// since, and none has a write under way. If since is 0, a client that is
// connected may have written before this server was started. The caller holds
// mu.
func (u *writerHistory) noOtherWrites(m *mapping, since int64) bool {
	if since == sinceShared {
		return false
	}
	if at := u.gone.butOf(m.writer); at != 0 && at >= since {
		return false
	}
	for _, o := range u.otherWriters(m) {
		busy := o.inFlight() > 0
		if at := o.lastWrite(); since == 0 || at != 0 && (busy || at >= since) {
			return false
		}
	}
	return true
}

// endRepetition ends a repetition.
func (u *writerHistory) endRepetition() {
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

// awaitRepetitions arranges a call of resume at the end of the repetitions of other clients
// than m's. It returns false if there are none.
func (u *writerHistory) awaitRepetitions(m *mapping, resume func()) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.repeats.Load() == 0 || u.by == m.writer {
		return false
	}
	u.held = append(u.held, resume)
	return true
}
