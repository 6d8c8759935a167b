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
// no CLOSE of its path can be executed any more. A CLOSE that was lost with a path
// ends nothing at all: the OPEN gets the id of the previous mapping, and requests of
// that one that are still under way would overwrite later ones. Therefore an OPEN
// waits for their end, too.

// beginClose is called before a CLOSE is sent in that epoch. Its result must be
// called when the server cannot execute the CLOSE any more.
func (s *session) beginClose(path string, epoch uint64) (settled func()) {
	c := &pendingClose{path: path, epoch: epoch, settled: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing == nil {
		s.closing = map[*pendingClose]struct{}{}
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
func (s *session) closingOf(path string) *pendingClose {
	epoch := s.currentEpoch()
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

// awaitClosed waits until the server cannot execute a CLOSE of path, or a request of
// an earlier mapping of it, any more.
func (s *session) awaitClosed(ctx context.Context, path string) error {
	for {
		c := s.closingOf(path)
		n := s.client.requestsLeft(s, path)
		if c == nil && n == 0 {
			return nil
		}
		var settled chan struct{}
		why := fmt.Sprintf("%d requests of the last mapping have not ended", n)
		if c != nil {
			settled, why = c.settled, "the server has not answered the CLOSE of the last mapping"
		}
		select {
		case <-settled:
		case <-time.After(epochPause):
		case <-s.done:
			return syscall.ECONNABORTED
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", why, context.Cause(ctx))
		}
	}
}

// requestsLeft returns the number of requests under way of unmapped devices of path.
func (c *Client) requestsLeft(s *session, path string) (n int64) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	for _, d := range c.retired {
		if d.session == s && d.path == path {
			n += d.inFlight()
		}
	}
	return n
}
