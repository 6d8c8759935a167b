package server

import (
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// The record of the writers of a node, and the answer to the question whether a
// client may repeat a write: usage and departures. replay.go asks it.

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

// knownUsage returns the usage of a node, nil if there is none.
func (s *Server) knownUsage(id nodeID) *usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.usages[id]
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
	if !u.begin(m) {
		return false
	}
	if u.undisturbed(m, since) {
		return true
	}
	u.repeats.Add(-1)
	return false
}

// precede makes the writes of other clients than m's wait until repeated is called.
// It returns false if m's have to wait for those of another client.
func (u *usage) precede(m *mapping) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.begin(m)
}

// begin counts one more reason for others than m's client to wait. The caller holds
// mu.
func (u *usage) begin(m *mapping) bool {
	if u.repeats.Load() > 0 && u.by != m.writer {
		return false
	}
	u.by = m.writer
	u.repeats.Add(1)
	return true
}

// unfenced returns a mapping that may write, has requests in flight and has lost all
// of its paths. It returns nil if there is none.
func (u *usage) unfenced() *mapping {
	u.mu.Lock()
	writers := slices.Clone(u.writers)
	u.mu.Unlock()
	for _, o := range writers {
		if o.inflight() > 0 && o.session.isCut() {
			return o
		}
	}
	return nil
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
