package client

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// A session that runs: what happens when its last path is lost, and when a path
// is back.

// exchangeInfo exchanges SESS_INFO.
func (s *session) exchangeInfo(ctx context.Context) error {
	msg := make(rnbdwire.SessInfo, rnbdwire.SessInfoSize)
	rnbdwire.SessInfoFields{Version: rnbdwire.Version}.Put(msg)
	rsp := make(rnbdwire.SessInfoRsp, rnbdwire.SessInfoRspSize)
	if err := s.transport.AdminRead(ctx, msg, rsp); err != nil {
		return fmt.Errorf("session %q: session info: %w", s.name, err)
	}
	if !rsp.IsValid() {
		return fmt.Errorf("session %q: the server's session info is malformed: %w", s.name, syscall.EPROTO)
	}
	s.version = min(rsp.Version(), rnbdwire.Version)
	s.features.Store(uint32(rsp.Features()))
	s.startEvents()
	return s.sayWriter(ctx)
}

// onEvent handles an event of RTRS, on a goroutine of the RTRS session. It closes the
// devices after a total loss; run handles the other events.
func (s *session) onEvent(e rtrs.Event) {
	s.recordEvent(e)
	if e.Kind == rtrs.PathChanged && !s.leaving.Load() {
		s.redundancy.comparePaths(e.Session.Paths())
	}
	if e.Kind == rtrs.SessionDown {
		s.downs.Add(1) // before onDown: an OPEN that onDown finds under way is void
	}
	s.mu.Lock()
	first := e.Kind == rtrs.SessionUp && !s.wasUp
	s.wasUp = s.wasUp || first
	if e.Kind == rtrs.PathChanged || first { // openSession handles the first connection
		s.mu.Unlock()
		return
	}
	s.events = append(s.events, e.Kind)
	s.mu.Unlock()
	s.wakeRun()
	if e.Kind == rtrs.SessionDown {
		s.onDown(e.Session) // called directly: onDown does not block
	}
}

// onDown closes the devices after the loss of the last path. lost is the transport:
// s.transport may not be set yet, because events come while connect still adds
// paths.
func (s *session) onDown(lost *rtrs.Session) {
	s.ready.Store(false)
	why := lossReason(lost.Paths())
	for _, d := range s.listDevices() {
		d.onLost(why)
	}
	select {
	case <-s.done: // the session was closed
	default:
		if s.leaving.Load() {
			s.log.Info("session waits for the server's next process")
			return
		}
		s.log.Warn("session lost its last path")
	}
}

// run handles the events of the session until it is closed.
func (s *session) run() {
	for {
		var again <-chan time.Time
		if s.resumeServer() != nil {
			again = time.After(s.reopenPause(0))
		}
		select {
		case <-s.done:
			return
		case <-s.signal:
		case <-again:
		}
	}
}

// resumeServer exchanges SESS_INFO with a server that is back, and starts to open
// closed devices again. After an error the caller tries again.
func (s *session) resumeServer() error {
	if !s.isBack() {
		return nil
	}
	if !s.ready.Load() {
		if err := s.greetServer(); err != nil {
			s.log.Warn("session is back, but does not answer", "err", err)
			return err
		}
	}
	devices := 0
	for _, d := range s.listDevices() {
		d.onDenied()
		d.onRefused()
		d.onOwed()
		d.onReported()
		if d.beginReopen() {
			devices++
			go d.reopenUntilOpen()
		}
	}
	if devices > 0 {
		s.log.Info("devices are opened again", "devices", devices)
	}
	return nil
}

// isBack handles the events since the last call and reports whether the session is
// connected.
func (s *session) isBack() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.events {
		s.ready.Store(false) // even if the loss is over already
		s.back = k == rtrs.SessionUp
	}
	s.events = nil
	return s.back
}

// greetServer exchanges SESS_INFO with a server that is back.
func (s *session) greetServer() error {
	ctx, cancel := context.WithTimeout(context.Background(), s.client.cfg.MapTimeout)
	defer cancel()
	epoch := s.currentEpoch()
	if err := s.exchangeInfo(ctx); err != nil {
		return err
	}
	s.log.Info("session is back")
	s.client.mu.Lock()
	s.dividePermits() // the server may have another queue depth now
	s.client.mu.Unlock()
	s.ready.Store(epoch == s.currentEpoch())
	return nil
}
