package rtrs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/google/uuid"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// FENCE, the client's side.
//
// A request of a lost path may still sit unread at the server. Executed after
// its repetition it would overwrite newer data. So a server with the FENCE
// extension is asked on another path to close the lost one. Its answers:
//
//	0        nothing of the path can run any more, and nothing uses its chunks
//	EBUSY    nothing new of it can run; but some operations do, and use theirs
//
// If the path is accepted again, it has ended before: that means the same as 0.
// So does a new session at the server: it has other chunks.
//
// After EBUSY the lost requests are sent again, in the same chunk and with the
// same contents: the server lets each wait for the operation in its chunk. The
// permits of aborted requests stay reserved, and the FENCE is repeated until
// its answer is 0. If all requests were aborted, because no path was left in
// between, the session has none of their permits; so a new session is made.
//
// The FENCE itself takes a permit, one that is kept for it. With a queue depth of
// 1 there is none, and where carriers were lost with their FENCEs none may be left:
// a new session is made then as well.

// fencePause is the time between two FENCEs for a path with running
// operations, and after a FENCE that could not be sent.
const fencePause = time.Second

// fenceLost starts the FENCEs that can be sent. mu is held.
func (s *Session) fenceLost() {
	for _, l := range slices.Clone(s.lost) {
		carrier := s.fenceCarrier()
		if carrier == nil {
			return
		}
		switch {
		case l.fencing != nil, l.pausing:
		case l.fences && !carrier.fences, l.incarnation != carrier.incarnation: // not the session that l was of
			s.onFenced(l)
		case !l.fences:
		case l.path.connecting && l.uuid == l.path.uuid:
			l.path.interruptAttempt() // the FENCE would close the new connections; endConnect comes back
		case s.closed: // no memory for a FENCE; the end of the last path answers
		case !carrier.slots.permits.hasSpares():
			s.startAnew(errNoSpare)
		default:
			l.fencing = make(chan struct{})
			go s.fencePath(l, carrier)
		}
	}
}

// Reasons for a new session.
var (
	errNoSpare = fmt.Errorf("%w: a FENCE needs a permit, and none is left for it", ErrConnLost)
	errBusy    = fmt.Errorf("%w: requests that were given up still run at the server", ErrConnLost)
)

// fenceCarrier is a link that can take a FENCE.
func (s *Session) fenceCarrier() *link {
	for _, l := range s.links {
		if !l.isLost() {
			return l
		}
	}
	return nil
}

// fencePath asks the server on carrier to close the path of l, and waits.
func (s *Session) fencePath(l, carrier *link) {
	errno, err := s.sendFence(l, carrier)
	s.mu.Lock()
	defer s.mu.Unlock()
	close(l.fencing)
	l.fencing = nil
	switch {
	case errors.Is(err, verbs.ErrClosed): // the session is
	case err == errNoSpare && !carrier.isLost():
		s.startAnew(err)
	case err != nil: // not the carrier's fault
		s.log.Warn("rtrs: FENCE of a lost path", "path", l.path.addr.String(), "err", err)
		s.fenceLater(l)
	case errno == 0:
		s.log.Info("rtrs: lost path fenced", "path", l.path.addr.String())
		s.onFenced(l)
	case carrier.isLost():
	case errno == syscall.EBUSY && l.aborted:
		s.startAnew(errBusy)
	case errno == syscall.EBUSY:
		s.operationsRun(l)
	default:
		carrier.failLink(fmt.Errorf("FENCE of path %s: %w", l.path.addr, errno))
	}
	s.fenceLost()
	s.publishLocked()
}

// sendFence returns the server's answer. An error says that it was not asked.
func (s *Session) sendFence(l, carrier *link) (errno syscall.Errno, err error) {
	call, err := s.newCall(kindFence, l.uuid[:], 0)
	if err != nil {
		return 0, err
	}
	call.carrier = carrier
	errors.As(call.runCall(context.Background(), s.queues[0]), &errno)
	if call.noPermit {
		return 0, errNoSpare
	}
	return errno, nil
}

// onFenced forgets l: nothing of it can run any more. mu is held.
func (s *Session) onFenced(l *link) {
	if i := slices.Index(s.lost, l); i >= 0 {
		s.lost = slices.Delete(s.lost, i, i+1)
		l.ended.Store(true)
		s.handBack(l)
	}
}

// operationsRun handles the answer EBUSY: the path of l has ended, but some of
// its operations still use their chunks. The path gets another name, because
// the server does not accept the old one before they have ended. mu is held.
func (s *Session) operationsRun(l *link) {
	if !l.busy {
		l.busy = true
		s.log.Warn("rtrs: requests of a lost path still run at the server", "path", l.path.addr.String())
		s.handBack(l)
	}
	if l.path.uuid == l.uuid {
		l.path.uuid = rtrswire.UUID(uuid.New())
	}
	s.fenceLater(l)
}

// fenceLater sends a FENCE for l after a while. mu is held.
func (s *Session) fenceLater(l *link) {
	l.pausing = true
	time.AfterFunc(fencePause, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		l.pausing = false
		s.fenceLost()
	})
}

// startAnew ends all links. When they are drained the session takes another
// name. The server makes a new session for it, with other chunks, when all
// paths of the old one have ended. mu is held.
func (s *Session) startAnew(cause error) {
	s.renew = true
	for _, l := range s.links {
		l.failLink(cause)
	}
}

// changeName gives the session another name. The session has no links. mu is
// held.
func (s *Session) changeName() {
	s.renew, s.uuid = false, rtrswire.UUID(uuid.New())
	s.log.Warn("rtrs: session is made anew")
	for _, p := range s.paths {
		if p.connecting {
			p.interruptAttempt()
		}
	}
	s.abortLost()
	for _, l := range slices.Clone(s.lost) {
		s.onFenced(l)
	}
}

// allFenced reports whether no request of a lost link can run late, except
// those with a held repetition. mu is held.
func (s *Session) allFenced() bool {
	return !slices.ContainsFunc(s.lost, func(l *link) bool { return !l.busy })
}

// beginConnect waits until no FENCE for p is under way, and keeps new ones from
// starting until endConnect.
func (s *Session) beginConnect(ctx context.Context, p *path) error {
	for {
		s.mu.Lock()
		pending := s.pendingFence(p)
		if pending == nil {
			p.connecting = true
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		select {
		case <-pending:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pendingFence is closed at the end of a FENCE for p, nil if there is none. mu
// is held.
func (s *Session) pendingFence(p *path) chan struct{} {
	for _, l := range s.lost {
		if l.uuid == p.uuid && l.fencing != nil {
			return l.fencing
		}
	}
	return nil
}

// endConnect ends the exclusion of beginConnect. If the server has accepted
// the path again, its earlier links are fenced.
func (s *Session) endConnect(p *path, accepted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.connecting = false
	if accepted {
		for _, l := range slices.Clone(s.lost) {
			if l.uuid == p.uuid {
				s.onFenced(l)
			}
		}
	}
	s.fenceLost()
	if !accepted { // else the path's goroutine publishes, with its own news
		s.publishLocked()
	}
}
