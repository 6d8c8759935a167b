package client

import (
	"fmt"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// tuning has the values that users have set on a running session. The next
// daemon that serves its disks sets them again. All other values come from that
// daemon's configuration.
type tuning struct {
	Policy        string `json:"mp_policy,omitempty"`              // empty: not set
	MaxReconnects *int   `json:"max_reconnect_attempts,omitempty"` // nil: not set
}

// apply sets the values in the configuration of a new session.
func (t tuning) apply(cfg *rtrs.ClientConfig) (err error) {
	if t.Policy != "" {
		if cfg.Policy, err = rtrs.ParsePolicy(t.Policy); err != nil {
			return err
		}
	}
	if t.MaxReconnects != nil {
		cfg.Timing.MaxReconnectAttempts = *t.MaxReconnects
		if err := cfg.Timing.Validate(); err != nil {
			return fmt.Errorf("%d reconnect attempts: %w", *t.MaxReconnects, err)
		}
	}
	return nil
}

// tuned is the tuning of a running session.
type tuned struct {
	mu  sync.Mutex
	now tuning
}

func (t *tuned) get() tuning {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.now
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
