package rtrs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// Timing holds the timers of one side. Each side owns its own: nothing is
// negotiated, and heartbeats are answered at once whatever the timers are.
type Timing struct {
	// Heartbeat is the time between two heartbeat ticks.
	Heartbeat time.Duration
	// HeartbeatMisses is the number of ticks that may pass without an
	// answer before the peer is dead.
	HeartbeatMisses int

	// ReconnectFirst is the wait before the first reconnect after a loss.
	ReconnectFirst time.Duration
	// ReconnectMin is the wait before the second attempt; it doubles with
	// each further attempt until ReconnectMax.
	ReconnectMin time.Duration
	ReconnectMax time.Duration
	// Jitter is the part of the wait, 0 to 1, that is added at random at most.
	Jitter float64
	// MaxReconnectAttempts ends automatic reconnects after that many failed
	// attempts in a row: 0 means never try, negative means for ever.
	MaxReconnectAttempts int

	// ConnectTimeout bounds each connection's set-up and the INFO exchange.
	ConnectTimeout time.Duration
}

// DefaultTiming returns the timers used towards any peer: a dead peer is
// noticed within six seconds, a lost path is tried again at once.
func DefaultTiming() Timing {
	return Timing{
		Heartbeat:            time.Second,
		HeartbeatMisses:      4,
		ReconnectFirst:       0,
		ReconnectMin:         100 * time.Millisecond,
		ReconnectMax:         5 * time.Second,
		Jitter:               0.2,
		MaxReconnectAttempts: -1,
		ConnectTimeout:       30 * time.Second,
	}
}

// KernelTiming returns the timers of the Linux kernel: heartbeat 5 s with a
// limit of 5, and 30 s plus 0 to 7 ms plus 1 s before each reconnect.
func KernelTiming() Timing {
	const delay = 31 * time.Second
	return Timing{
		Heartbeat:            5 * time.Second,
		HeartbeatMisses:      5,
		ReconnectFirst:       delay,
		ReconnectMin:         delay,
		ReconnectMax:         delay,
		Jitter:               float64(7*time.Millisecond) / float64(delay),
		MaxReconnectAttempts: -1,
		ConnectTimeout:       30 * time.Second,
	}
}

// Validate reports the first field that cannot work.
func (t Timing) Validate() error {
	switch {
	case t.Heartbeat <= 0:
		return fmt.Errorf("timing: heartbeat %v must be positive", t.Heartbeat)
	case t.HeartbeatMisses < 1:
		return fmt.Errorf("timing: heartbeat misses %d must be at least 1", t.HeartbeatMisses)
	case t.ReconnectFirst < 0 || t.ReconnectMin < 0 || t.ReconnectMax < 0:
		return errors.New("timing: reconnect delays must not be negative")
	case t.ReconnectMax < t.ReconnectMin:
		return fmt.Errorf("timing: reconnect max %v is below min %v", t.ReconnectMax, t.ReconnectMin)
	case t.Jitter < 0 || t.Jitter > 1:
		return fmt.Errorf("timing: jitter %v is not between 0 and 1", t.Jitter)
	case t.ConnectTimeout <= 0:
		return fmt.Errorf("timing: connect timeout %v must be positive", t.ConnectTimeout)
	}
	return nil
}

// mayReconnect reports whether another attempt is allowed after failed attempts
// in a row.
func (t Timing) mayReconnect(failed int) bool {
	return t.MaxReconnectAttempts < 0 || failed < t.MaxReconnectAttempts
}

// reconnectDelay is the wait before an attempt, given how many attempts have
// failed since the path was lost.
func (t Timing) reconnectDelay(failed int) time.Duration {
	return t.backoffDelay(failed, rand.Float64())
}

// backoffDelay is reconnectDelay with its random number, 0 <= rnd < 1, given.
func (t Timing) backoffDelay(failed int, rnd float64) time.Duration {
	base := t.ReconnectFirst
	if failed > 0 {
		base = min(t.ReconnectMin, t.ReconnectMax)
		for i := 1; i < failed && base < t.ReconnectMax; i++ {
			base = min(max(2*base, 1), t.ReconnectMax)
		}
	}
	return base + time.Duration(float64(base)*t.Jitter*rnd)
}
