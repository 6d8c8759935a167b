package client

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// Changes of a running session: its paths, their policy, the tries for a lost one.
// The next daemon gets them. It gets paths as users wrote them: a path without a
// fabric may use another one then.

// addPath connects another path and returns its id. text is the path as users
// wrote it. The next daemon uses it, too.
func (s *session) addPath(ctx context.Context, text string, addr rtrs.PathAddr) (id int, err error) {
	s.spelling.noteSpelling(addr, text)
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

// readdPath removes a path and adds it again, and returns its new id. The end of ctx
// and an address without an answer do not lose the path: it is in the session and
// is tried again, as after a loss.
func (s *session) readdPath(ctx context.Context, id int) (int, error) {
	all := s.transport.Paths()
	i := slices.IndexFunc(all, func(p rtrs.PathInfo) bool { return p.ID == id })
	if i < 0 {
		return 0, fmt.Errorf("session %q has no path %d: %w", s.name, id, syscall.ENOENT)
	}
	type addition struct {
		id  int
		err error
	}
	added := make(chan addition, 1)
	go func() { // to its end, whatever becomes of ctx
		ctx := context.WithoutCancel(ctx)
		_, done := s.beginRemove(id)
		defer done()
		a := addition{err: s.transport.RemovePath(ctx, id)}
		if a.err == nil {
			a.id, a.err = s.addAgain(ctx, all[i].Addr)
		}
		s.client.sessionChanged()
		added <- a
	}()
	select {
	case a := <-added:
		if a.err != nil {
			a.err = fmt.Errorf("session %q: path %d is path %d now, and is tried again: %w", s.name, id, a.id, a.err)
		}
		return a.id, a.err
	case <-ctx.Done():
		return 0, fmt.Errorf("session %q: path %d is added again: %w", s.name, id, context.Cause(ctx))
	}
}

// addAgain adds a path that was removed a moment ago. The path is in the session
// also if the error is not nil, unless the session has another one with these
// addresses. Until the server has noticed the removal it refuses the path, which
// ends then; so addAgain adds it again.
func (s *session) addAgain(ctx context.Context, addr rtrs.PathAddr) (id int, err error) {
	for end := time.Now().Add(nameLingers); ; {
		if id, err = s.transport.AddPathLater(addr); err == nil {
			err = s.transport.ReconnectPath(ctx, id)
		}
		if err == nil || s.hasPath(id) || time.Now().After(end) || !pauseFor(ctx, namePause) {
			return id, err
		}
	}
}

// hasPath reports whether the session has a path of that id, connected or not.
func (s *session) hasPath(id int) bool {
	return slices.ContainsFunc(s.transport.Paths(), func(p rtrs.PathInfo) bool {
		return p.ID == id && p.State != rtrs.PathDead && p.State != rtrs.PathClosing
	})
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
	return s.changeTuning(func(t *sessionTuning) error {
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
	return s.changeTuning(func(t *sessionTuning) error {
		t.MaxReconnects = &n
		timing := s.transport.Timing()
		timing.MaxReconnectAttempts = n
		return s.transport.SetTiming(timing)
	})
}

// changeTuning makes a change and records it if it succeeded.
func (s *session) changeTuning(change func(*sessionTuning) error) error {
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
