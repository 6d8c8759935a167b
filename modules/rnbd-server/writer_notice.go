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
// answered when the client has seen the events. Clients that do not send WRITER
// repeat nothing by IO_AGAIN, and the server does not wait for them.

// writerNoticeTime is the time for a client to see the event. The transport
// notices the loss of a client within it.
const writerNoticeTime = 10 * time.Second

// announceWriter tells the other clients that may write to the node of m that m
// may, too. The error is EBUSY if one of them does not answer.
func (s *Server) announceWriter(ctx context.Context, m *mapping) error {
	if m.writers == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, writerNoticeTime)
	defer cancel()
	for _, o := range m.writers.uninformedWriters(m) {
		if err := s.notifyWriters(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// uninformedWriters returns the mappings of other clients that sent WRITER.
func (u *writerHistory) uninformedWriters(m *mapping) (out []*mapping) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, o := range u.otherWriters(m) {
		if o.named {
			out = append(out, o)
		}
	}
	return out
}

// notifyWriters tells the client of m that others may write. It returns when the
// client has seen that, or is gone.
func (s *Server) notifyWriters(ctx context.Context, m *mapping) error {
	sess := m.session
	sess.mu.Lock()
	sess.events.last++
	number := sess.events.last
	m.writerNotice = number
	op := sess.deliverEvent()
	sess.mu.Unlock()
	if op != nil {
		s.respondOnPump(op, blk.OK)
	}
	for {
		heard, wait := sess.awaitEventSeen(m, number)
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

// awaitEventSeen reports whether the client of m listens and has not seen the event
// with that number. heard is closed when that may have changed.
func (s *session) awaitEventSeen(m *mapping, number uint64) (heard <-chan struct{}, wait bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	in := &s.events
	if !in.listens || in.seen >= number || s.ended.Load() || m.closed.Load() {
		return nil, false
	}
	if in.heard == nil {
		in.heard = make(chan struct{})
	}
	return in.heard, true
}
