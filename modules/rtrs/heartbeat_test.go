package rtrs

import (
	"testing"
	"time"
)

func TestR090_R092_R093_HeartbeatWithKernelTimers(t *testing.T) {
	timing := KernelTiming()
	start := time.Unix(1000, 0)
	var h heartbeat
	h.start(start, timing.Heartbeat)
	tick := func(second int, heard bool) hbAction {
		return h.tick(start.Add(time.Duration(second)*time.Second), heard, timing.Heartbeat, timing.HeartbeatMisses)
	}
	expect := func(second int, heard bool, want hbAction) {
		t.Helper()
		if got := tick(second, heard); got != want {
			t.Fatalf("second %d: action %d, want %d", second, got, want)
		}
	}
	expect(4, false, hbNothing)
	expect(5, false, hbSend) // the first after one interval
	expect(6, true, hbNothing)
	expect(10, false, hbSend) // an arrival was the answer
	for s := 11; s < 40; s++ {
		expect(s, false, hbNothing)
	}
	expect(40, false, hbDead) // 30 s after the unanswered one
}

func TestR092_AnyArrivalKeepsThePathAlive(t *testing.T) {
	var h heartbeat
	now := time.Unix(0, 0)
	h.start(now, time.Second)
	sent := 0
	for i := range 100 {
		now = now.Add(time.Second)
		switch h.tick(now, i%4 == 3, time.Second, 4) {
		case hbSend:
			sent++
		case hbDead:
			t.Fatalf("dead after %d s in spite of arrivals", i)
		}
	}
	if sent != 26 { // the first, and one after each of 25 arrivals
		t.Errorf("%d heartbeats sent, want 26", sent)
	}
}
