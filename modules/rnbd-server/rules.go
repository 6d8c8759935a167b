package server

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// The rules are applied to each OPEN and to each path that joins a session, never
// to a request. An OPEN is checked once more when its mapping is in the session's
// table, and a joining path is checked and admitted in one step under
// session.rulesMu. So the later of the two finds the other. A refused path was
// never part of the session: no OPEN is refused because of it.

// Access returns the rules in force.
func (s *Server) Access() *access.Rules { return s.rules.Load().Rules }

// forbiddenMappings lists the mappings that the rules do not allow.
func (s *Server) forbiddenMappings() (out []*mapping) {
	if s.rules.Load().Len() == 0 {
		return nil
	}
	for i := range s.sessions {
		if sess := s.sessions[i].Load(); sess != nil {
			out = append(out, slices.DeleteFunc(sess.openMappings(), func(m *mapping) bool {
				return m.private || !errors.Is(s.checkAllowed(sess, m.name, m.mode), syscall.EACCES)
			})...)
		}
	}
	return out
}

// checkAllowed returns EACCES with the reason if the rules refuse.
func (s *Server) checkAllowed(sess *session, name string, mode blk.AccessMode) error {
	rules := s.rules.Load()
	if rules.Len() == 0 {
		return nil
	}
	c := sess.admittedClient()
	if len(c.Paths) == 0 { // the session ends
		return fmt.Errorf("session %q has no path: %w", sess.name, syscall.ENOTCONN)
	}
	return decideAccess(rules.Rules, c, name, mode)
}

func decideAccess(rules *access.Rules, c access.Client, name string, mode blk.AccessMode) error {
	if d := rules.Decide(c, name, mode); !d.Allowed {
		return fmt.Errorf("not allowed to open it %s: %s: %w", mode, d.Why, errRules)
	}
	return nil
}

// admitPath counts the path with this id as one of the session's, unless the rules
// forbid a mapping then: that one is returned, with the reason.
func (s *Server) admitPath(sess *session, id int) (*mapping, error) {
	sess.rulesMu.Lock()
	defer sess.rulesMu.Unlock()
	rules, c := s.rules.Load(), sess.accessClient(id)
	for _, m := range sess.openMappings() {
		if m.private {
			continue
		}
		if err := decideAccess(rules.Rules, c, m.name, m.mode); err != nil {
			return m, err
		}
	}
	sess.admitted = id
	return nil, nil
}
