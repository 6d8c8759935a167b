package client

import (
	"fmt"
	"sync"

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
