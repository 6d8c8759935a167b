package client

import (
	"testing"
	"time"
)

func TestParseLoss(t *testing.T) {
	for in, want := range map[string]Loss{"": {}, "fail": {}, "queue:30s": {Queue: 30 * time.Second}, "queue:1m": {Queue: time.Minute}} {
		if got, err := ParseLoss(in); err != nil || got != want {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"queue", "queue:", "queue:-1s", "queue:0s", "wait"} {
		if _, err := ParseLoss(in); err == nil {
			t.Errorf("%q was accepted", in)
		}
	}
}
