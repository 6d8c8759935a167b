package client

import (
	"fmt"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// sessionTuning has the values that users have set on a running session. The next
// daemon that serves its disks sets them again. All other values come from that
// daemon's configuration.
type sessionTuning struct {
	Policy        string `json:"mp_policy,omitempty"`              // empty: not set
	MaxReconnects *int   `json:"max_reconnect_attempts,omitempty"` // nil: not set
}

// applyTo sets the values in the configuration of a new session.
func (t sessionTuning) applyTo(cfg *rtrs.ClientConfig) (err error) {
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

// liveTuning is the tuning of a running session.
type liveTuning struct {
	mu  sync.Mutex
	now sessionTuning
}

func (t *liveTuning) current() sessionTuning {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.now
}
