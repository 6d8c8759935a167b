package main

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

func TestPeerTimeoutIsAboveTheHeartbeats(t *testing.T) {
	for _, tt := range []struct {
		name   string
		timing rtrs.Timing
		want   time.Duration
	}{
		{"our timers", rtrs.DefaultTiming(), 7 * time.Second},
		{"the kernel's timers", rtrs.KernelTiming(), 40 * time.Second},
	} {
		if got := peerTimeout(tt.timing); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}
