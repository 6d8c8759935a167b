package client

import (
	"context"
	"fmt"
	"syscall"
	"time"
)

// A server has one open for each name of a session, so an OPEN that arrives
// before the CLOSE of the previous mapping gets the id that the CLOSE ends. A
// CLOSE whose answer was given up may arrive late. Therefore an OPEN waits until
// no CLOSE of its path can be executed any more.

// beginClose is called before a CLOSE is sent in that epoch. Its result must be
// called when the server cannot execute the CLOSE any more.
func (s *session) beginClose(path string, epoch uint64) (settled func()) {
	c := &closing{path: path, epoch: epoch, settled: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing == nil {
		s.closing = map[*closing]struct{}{}
	}
	s.closing[c] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.closing, c)
		close(c.settled)
	}
}

// closingOf returns a CLOSE of path that the server may still execute, or nil.
func (s *session) closingOf(path string) *closing {
	epoch := s.epoch()
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.closing {
		switch {
		case c.epoch != epoch:
			delete(s.closing, c)
		case c.path == path:
			return c
		}
	}
	return nil
}

// epochPause is how often awaitClosed looks whether the session was lost.
const epochPause = 50 * time.Millisecond

// awaitClosed waits until the server cannot execute a CLOSE of path any more.
func (s *session) awaitClosed(ctx context.Context, path string) error {
	for {
		c := s.closingOf(path)
		if c == nil {
			return nil
		}
		select {
		case <-c.settled:
		case <-time.After(epochPause):
		case <-s.done:
			return syscall.ECONNABORTED
		case <-ctx.Done():
			return fmt.Errorf("the server has not answered the CLOSE of the last mapping: %w", context.Cause(ctx))
		}
	}
}
