package server

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// A server that was started meanwhile knows nothing of earlier writers. So a
// client that knows of other writers does not repeat its writes at such a
// server. It must hear of other writers before they can write: their OPEN is
// answered when the client has seen the news. Clients that do not send WRITER
// repeat nothing by IO_AGAIN, and the server does not wait for them.

// sharingPatience is the time for a client to see the news. The transport
// notices the loss of a client within it.
const sharingPatience = 10 * time.Second

// tellSharing tells the other clients that may write to the node of m that m
// may, too. The error is EBUSY if one of them does not answer.
func (s *Server) tellSharing(ctx context.Context, m *mapping) error {
	if m.usage == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, sharingPatience)
	defer cancel()
	for _, o := range m.usage.toTell(m) {
		if err := s.tellShared(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// toTell returns the mappings of other clients that sent WRITER.
func (u *usage) toTell(m *mapping) (out []*mapping) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, o := range u.others(m) {
		if o.named {
			out = append(out, o)
		}
	}
	return out
}

// tellShared tells the client of m that others may write. It returns when the
// client has seen that, or is gone.
func (s *Server) tellShared(ctx context.Context, m *mapping) error {
	sess := m.session
	sess.mu.Lock()
	sess.inbox.last++
	number := sess.inbox.last
	m.sharing = number
	op := sess.deliver()
	sess.mu.Unlock()
	if op != nil {
		s.respond(op, blk.OK)
	}
	for {
		heard, wait := sess.awaitsNews(m, number)
		if !wait {
			return nil
		}
		select {
		case <-heard:
		case <-ctx.Done():
			return fmt.Errorf("session %q has it open for writing, and does not answer that another client may: %w", sess.name, syscall.EBUSY)
		}
	}
}

// awaitsNews reports whether the client of m listens and has not seen the news
// with that number. heard is closed when that may have changed.
func (s *session) awaitsNews(m *mapping, number uint64) (heard <-chan struct{}, wait bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	in := &s.inbox
	if !in.listens || in.seen >= number || s.ended.Load() || m.closed.Load() {
		return nil, false
	}
	if in.heard == nil {
		in.heard = make(chan struct{})
	}
	return in.heard, true
}
