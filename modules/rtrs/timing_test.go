package rtrs

import (
	"testing"
	"time"
)

func TestR100_ReconnectBackoff(t *testing.T) {
	tests := []struct {
		name   string
		timing Timing
		failed int
		rnd    float64
		want   time.Duration
	}{
		{"the first attempt follows at once", DefaultTiming(), 0, 0.99, 0},
		{"the second waits the minimum", DefaultTiming(), 1, 0, 100 * time.Millisecond},
		{"the third waits twice as long", DefaultTiming(), 2, 0, 200 * time.Millisecond},
		{"the seventh is just below the maximum", DefaultTiming(), 6, 0, 3200 * time.Millisecond},
		{"the eighth is at the maximum", DefaultTiming(), 7, 0, 5 * time.Second},
		{"a large count neither overflows nor loops", DefaultTiming(), 1 << 30, 0, 5 * time.Second},
		{"jitter adds up to a fifth", DefaultTiming(), 7, 0.5, 5500 * time.Millisecond},
		{"the kernel waits 31 s first", KernelTiming(), 0, 0, 31 * time.Second},
		{"the kernel waits 31 s always", KernelTiming(), 9, 0, 31 * time.Second},
		{"the kernel adds at most 7 ms", KernelTiming(), 0, 1, 31*time.Second + 7*time.Millisecond},
		{"a zero minimum stays small but grows", Timing{ReconnectMax: 4}, 3, 0, 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.timing.backoffDelay(tt.failed, tt.rnd)
			if d := got - tt.want; d < -time.Microsecond || d > time.Microsecond {
				t.Errorf("backoff(%d, %v) = %v, want %v", tt.failed, tt.rnd, got, tt.want)
			}
		})
	}
}

func TestR101_MaxReconnectAttempts(t *testing.T) {
	tests := []struct {
		name        string
		max, failed int
		want        bool
	}{
		{"negative is for ever", -1, 1 << 40, true},
		{"zero never tries", 0, 0, false},
		{"three allows the third", 3, 2, true},
		{"three refuses the fourth", 3, 3, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := (Timing{MaxReconnectAttempts: tt.max}).mayReconnect(tt.failed); got != tt.want {
				t.Errorf("mayReconnect(%d) with max %d = %v, want %v", tt.failed, tt.max, got, tt.want)
			}
		})
	}
}

func TestTiming_Validate(t *testing.T) {
	for _, good := range []Timing{DefaultTiming(), KernelTiming()} {
		if err := good.Validate(); err != nil {
			t.Errorf("%+v: %v", good, err)
		}
	}
	tests := []struct {
		name string
		edit func(*Timing)
	}{
		{"no heartbeat", func(t *Timing) { t.Heartbeat = 0 }},
		{"no misses", func(t *Timing) { t.HeartbeatMisses = 0 }},
		{"negative delay", func(t *Timing) { t.ReconnectFirst = -1 }},
		{"max below min", func(t *Timing) { t.ReconnectMax = t.ReconnectMin - 1 }},
		{"jitter above one", func(t *Timing) { t.Jitter = 1.5 }},
		{"no connect timeout", func(t *Timing) { t.ConnectTimeout = 0 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			timing := DefaultTiming()
			tt.edit(&timing)
			if timing.Validate() == nil {
				t.Errorf("%+v is accepted", timing)
			}
		})
	}
}
