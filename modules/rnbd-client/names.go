package client

import (
	"context"
	"time"
)

// A name is free again when the server has done with the session that had it.
// Linux's server lets go of a new session that comes before; ours lets it wait.

const (
	// nameLingers is how long a server may take to forget a session.
	nameLingers = 3 * time.Second
	namePause   = 50 * time.Millisecond
)

// endedSessions are sessions of this client that ended lately, by name.
type endedSessions map[string]time.Time

// note is called when the session of that name has ended here.
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

// lately reports whether a server may not have forgotten the name yet.
func (e *endedSessions) lately(name string) bool {
	at, ok := (*e)[name]
	return ok && time.Since(at) < nameLingers
}

// pauseFor waits, and reports whether ctx goes on.
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
