package rtrs

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Manual reconnects of a path.

// reconnectPatience is how long a manual reconnect goes on when it is refused:
// longer than our server needs to notice a dead path.
const reconnectPatience = 6 * time.Second

// reconnectPath connects the path again, or joins the attempt in progress, and waits
// for the result. A server that is still ending the old connections refuses new
// ones. So reconnect waits for later automatic attempts too, for reconnectPatience
// at most.
func (p *path) reconnectPath(ctx context.Context) error {
	patience := time.Now().Add(min(reconnectPatience, p.session.Timing().ConnectTimeout))
	p.mu.Lock()
	n := p.results
	if p.state != PathConnecting {
		p.wantLocked(wantReconnect)
	}
	p.mu.Unlock()
	for {
		var result error
		over := false
		err := p.awaitCondition(ctx, func() bool {
			result, over = p.err, p.state == PathClosed || p.state == PathDead
			if p.state == PathConnected {
				result, over = nil, true
			}
			done := p.results > n
			if done {
				n = p.results
			}
			return done || p.state == PathDead
		})
		switch {
		case err != nil:
			return err
		case over && result == nil && p.State() != PathConnected:
			return fmt.Errorf("path is %v: %w", p.State(), syscall.ECONNRESET)
		case over, !mayPass(result), time.Now().After(patience):
			return result
		}
	}
}

// returnPause is the wait between two attempts while the server is expected back.
const returnPause = 20 * time.Millisecond

// ExpectReturn says that the server ends all paths and is back within d, since it
// hands over to another process. Until then lost paths are tried again at short
// intervals, and these attempts do not count. A d of 0 ends that.
func (s *Session) ExpectReturn(d time.Duration) {
	end := time.Now().Add(d)
	s.returns.Store(&end)
}

// isExpected reports whether the server is expected back.
func (s *Session) isExpected() bool {
	end := s.returns.Load()
	return end != nil && time.Now().Before(*end)
}

// mayPass reports whether an attempt failed for a passing reason: the server
// refused it, or accepted and closed it, since it was still ending the path's
// last connections (a FENCE about these may arrive late, on another path).
func mayPass(err error) bool {
	return errors.Is(err, errRefused) || errors.Is(err, ErrConnLost) || errors.Is(err, errInterrupted)
}

// awaitCondition waits until done returns true, or ctx ends. done is called with mu held.
func (p *path) awaitCondition(ctx context.Context, done func() bool) error {
	for {
		p.mu.Lock()
		ok, changed := done(), p.changed
		p.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
