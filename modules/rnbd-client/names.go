package client

import (
	"context"
	"time"
)

// The name of a session is free again when the server has ended the session. If
// a new one of that name comes earlier, Linux's server drops it, and rnbd's
// lets it wait.

const (
	// nameLingers is the longest time that a server takes to end a session.
	nameLingers = 3 * time.Second
	namePause   = 50 * time.Millisecond
)

// note records the end of the session of that name.
func (e *endedSessions) note(name string) {
	if *e == nil {
		*e = endedSessions{}
	}
	for other := range *e {
		if !e.lately(other) {
			delete(*e, other)
		}
	}
	(*e)[name] = time.Now()
}

// lately reports whether a server may still know the name.
func (e *endedSessions) lately(name string) bool {
	at, ok := (*e)[name]
	return ok && time.Since(at) < nameLingers
}

// pauseFor waits for d. It reports false if ctx has ended.
func pauseFor(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

func (c *Client) endedLately(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended.lately(name)
}
