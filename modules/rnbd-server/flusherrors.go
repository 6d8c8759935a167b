package server

// Errors of flushes. The kernel reports an error of write-back once to each open
// description of a file. A plugin that dies after its fsync has failed takes the error with
// it: the flush is sent to the next process, which syncs another description, and succeeds.
// So the server syncs a description of its own, the guard's, whenever a plugin has opened
// a device again. The errors of a node, its plugin's too, are kept until a client of it is
// sure to know them.
//
//	failed        an error of the node gets a number: writerHistory.flushes
//	answerFlush   the next flush of each mapping is answered with the error: mapping.told
//	confirm       the client has the answer, since it has used its chunk again, or has closed
//	              the device
//
// The error is told again if a path is lost before that, and to the client's next session.

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
)

// isDurable reports whether a client takes the success of r for a promise that its writes
// survive a power cut.
func (r *request) isDurable() bool {
	return r.sqe.Op == blk.Flush || r.preflush || r.sqe.Flags&blk.FUA != 0
}

// noteFlush records that the storage has ended r, which is durable, with errno. The error of
// a write with FUA is that of other writes only where the disk fails.
func (r *request) noteFlush(errno blk.Errno) {
	switch {
	case errno == blk.OK, errno == blk.EOPNOTSUPP, errno == blk.EINVAL, r.m.writers == nil:
	case r.sqe.Op == blk.Flush, r.preflush, errno == blk.EIO:
		r.m.writers.flushes.add(errno)
	}
}

// answerFlush returns the errno that answers r, which is durable and has ended with errno:
// the error of the node if r's mapping was not told of it.
func (r *request) answerFlush(errno blk.Errno) blk.Errno {
	m := r.m
	if m.writers == nil || r.retired {
		return errno
	}
	last, told := m.writers.flushes.last.Load(), m.told.Load()
	if last == told || !m.told.CompareAndSwap(told, last) {
		return errno
	}
	r.teller, r.tells = m, last
	if errno == blk.OK {
		errno = flushError(last).errno()
	}
	return errno
}

// confirm records that the client of m knows of the failure last.
func (m *mapping) confirm(last uint64) {
	if m.writers == nil || last == 0 || m.told.Load() < last { // it is to be told again
		return
	}
	raise(&m.known, last)
	raise(&m.writers.flushes.known, last)
}

// tellAgain makes the next flush of m tell of the failures that the client may not know: a
// path is lost, and answers with it.
func (m *mapping) tellAgain() { m.told.Store(m.known.Load()) }

// tellFlushesAgain is tellAgain for all mappings of s.
func (s *session) tellFlushesAgain() {
	for _, m := range s.allMappings() {
		m.tellAgain()
	}
}

// joinFlushes makes m, which is new, one that is to be told of failures that no client knows.
func (m *mapping) joinFlushes() {
	known := m.writers.flushes.known.Load()
	m.told.Store(known)
	m.known.Store(known)
}

// flushFailed records a failure that no request has been answered with. name is the device.
func (s *Server) flushFailed(u *writerHistory, name string, err error) {
	u.flushes.add(blk.ToErrno(err))
	u.losses.Add(1)
	u.mu.Lock()
	u.lossText = err.Error()
	u.mu.Unlock()
	s.log.Error("the next flush fails", "device", name, "err", err)
	s.cfg.Journal.Add(journal.Event{Kind: journal.Device, Device: name, From: "flushed", To: "writes lost", Why: err.Error()})
}

// describeLoss returns the last of u's losses in words, empty if there was none.
func (u *writerHistory) describeLoss() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.lossText
}

// FlushErrors returns the failures of flushes that no client is sure to know, for
// InheritFlushErrors of the next process.
func (s *Server) FlushErrors() []FlushError {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []FlushError
	for id, u := range s.histories {
		if owed := u.flushes.owed(); owed != 0 {
			out = append(out, FlushError{Dev: id.dev, Ino: id.ino, Name: id.opaque, Errno: owed.errno()})
		}
	}
	return out
}

// InheritFlushErrors takes over what FlushErrors of the last process has returned. Call it
// before Serve.
func (s *Server) InheritFlushErrors(all []FlushError) {
	for _, e := range all {
		s.historyOf(nodeID{dev: e.Dev, ino: e.Ino, opaque: e.Name}).flushes.add(e.Errno)
	}
}
