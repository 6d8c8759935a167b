package sim

import (
	"slices"
	"strings"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// loss is what the users of a device may expect after a failure of power of its server.
// load.mu guards it.
type loss struct {
	owed    bool   // acknowledged writes are lost, and no flush has failed since
	mapping string // that users had then: another one knows nothing of these writes
	excused bool   // one flush may fail: whether writes were lost is not seen by clients
}

// isDurable reports whether the success of r promises that writes survive a failure of
// power.
func (r *userRequest) isDurable() bool { return r.op == blk.Flush || r.flags&blk.FUA != 0 }

// judgeLoss judges the answer of a flush, or of a write with FUA, that began after so many
// failures of power. It must not succeed if acknowledged writes were lost, before another
// one has failed. judgeLoss reports whether an error is the one that tells of the loss.
func (l *load) judgeLoss(r *userRequest, cuts int64, errno blk.Errno) (tells bool) {
	mapping, failed := l.user.mapping(), l.disk.hasFailedFlush()
	l.mu.Lock()
	defer l.mu.Unlock()
	lost := &l.loss
	if lost.mapping != mapping {
		lost.owed = false
	}
	switch {
	case errno != blk.OK:
		tells = lost.owed || lost.excused || failed // the error of the disk comes again if its answer may be lost
		lost.owed = false
		lost.excused = l.w.plan.tellsAgain()
	case lost.owed && cuts == l.cuts.Load() && !l.othersMayTell(r):
		lost.owed = false
		l.w.violate("data: %s of %s succeeds, though acknowledged writes were lost and no flush has failed", r.op, l.name)
	}
	return tells
}

// othersMayTell reports whether the error may be on its way to another request than r. The
// caller holds mu.
func (l *load) othersMayTell(r *userRequest) bool {
	for other := range l.pending {
		if other != r && other.isDurable() {
			return true
		}
	}
	return false
}

// tellsAgain reports whether a flush may fail for a loss that users know of: the next client
// may not know that they were told, nor the server that a client was, nor the client that
// users were before their front end ended.
func (s *Schedule) tellsAgain() bool {
	return s.has("kill-client") || s.has("fail-write-back") ||
		slices.ContainsFunc(s.Faults, func(f Fault) bool { return strings.HasSuffix(f.Kind, "-front") })
}

// excuseLoss lets one flush fail though nothing is lost.
func (l *load) excuseLoss() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loss.excused = true
}

// forgetLoss lets flushes succeed and one of them fail: nothing is known of who was told.
func (l *load) forgetLoss() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loss.owed, l.loss.excused = false, true
}
