package client

import (
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// Changes of a running session: its paths, their policy, the tries for a lost one.
// The next daemon gets them. It gets paths as users wrote them: a path without a
// fabric may use another one then.

// addPath connects another path and returns its id. text is the path as users
// wrote it. The next daemon uses it, too.
func (s *session) addPath(ctx context.Context, text string, addr rtrs.PathAddr) (id int, err error) {
	s.spelling.note(addr, text)
	if id, err = s.transport.AddPath(ctx, addr); err == nil {
		s.client.sessionChanged()
	}
	return id, err
}

// removePath ends a path for this daemon and the next one. The error is EBUSY
// for the last path, unless force is set.
func (s *session) removePath(ctx context.Context, id int, force bool) error {
	last, done := s.beginRemove(id)
	defer done()
	if last && !force {
		return fmt.Errorf("remove path %d of session %q: it is the last one, devices would be without a server; forced, it goes: %w", id, s.name, syscall.EBUSY)
	}
	err := s.transport.RemovePath(ctx, id)
	if err == nil {
		s.client.sessionChanged()
	}
	return err
}

// beginRemove reports whether the session has no other path than id and those
// that are being removed. done ends the removal.
func (s *session) beginRemove(id int) (last bool, done func()) {
	paths := s.transport.Paths()
	s.mu.Lock()
	defer s.mu.Unlock()
	last = true
	for _, p := range paths {
		last = last && (p.ID == id || p.State == rtrs.PathDead || s.removing[p.ID] > 0)
	}
	if s.removing == nil {
		s.removing = map[int]int{}
	}
	s.removing[id]++
	return last, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.removing[id]--; s.removing[id] == 0 {
			delete(s.removing, id)
		}
	}
}

// setPolicy changes the path policy from the next request on.
func (s *session) setPolicy(name string) error {
	p, err := rtrs.ParsePolicy(name)
	if err != nil {
		return err
	}
	return s.tune(func(t *tuning) error {
		t.Policy = p.String()
		return s.transport.SetPolicy(p)
	})
}

// setMaxReconnects sets the number of tries for a lost path; -1: no limit. The
// bounds are the kernel's.
func (s *session) setMaxReconnects(n int) error {
	if n < -1 || n > 9999 {
		return fmt.Errorf("max_reconnect_attempts: %d is not from -1 to 9999: %w", n, syscall.EINVAL)
	}
	return s.tune(func(t *tuning) error {
		t.MaxReconnects = &n
		timing := s.transport.Timing()
		timing.MaxReconnectAttempts = n
		return s.transport.SetTiming(timing)
	})
}

// tune makes a change and records it if it succeeded.
func (s *session) tune(change func(*tuning) error) error {
	s.tuning.mu.Lock()
	next := s.tuning.now
	err := change(&next)
	if err == nil {
		s.tuning.now = next
	}
	s.tuning.mu.Unlock()
	if err == nil {
		s.client.sessionChanged()
	}
	return err
}
