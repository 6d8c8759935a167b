package rtrs

import (
	"fmt"
	"maps"
	"testing"
	"time"
)

func TestR090_R092_R093_HeartbeatWithKernelTimers(t *testing.T) {
	timing := KernelTiming()
	start := firstBeat.Add(1000 * time.Second)
	var h heartbeatTimer
	h.startBeats(start, timing.Heartbeat)
	tick := func(second int, heard bool) hbAction {
		return h.onTick(start.Add(time.Duration(second)*time.Second), heard, timing.Heartbeat, timing.HeartbeatMisses)
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
	var h heartbeatTimer
	now := firstBeat
	h.startBeats(now, time.Second)
	sent := 0
	for i := range 100 {
		now = now.Add(time.Second)
		switch h.onTick(now, i%4 == 3, time.Second, 4) {
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

// Paths that come up at any time send at the same moments.
func TestHeartbeatsOfAllPathsAreSentTogether(t *testing.T) {
	sent := map[time.Duration]int{}
	for i := range 10 {
		var h heartbeatTimer
		up := firstBeat.Add(time.Duration(i) * 97 * time.Millisecond)
		h.startBeats(up, time.Second)
		for d := time.Duration(0); d < 5*time.Second; d += 100 * time.Millisecond {
			if now := firstBeat.Add(d); now.After(up) && h.onTick(now, true, time.Second, 4) == hbSend {
				sent[d]++
			}
		}
	}
	want := map[time.Duration]int{1 * time.Second: 1, 2 * time.Second: 10, 3 * time.Second: 10, 4 * time.Second: 10}
	if !maps.Equal(sent, want) {
		t.Errorf("sent at %v, want %v", sent, want)
	}
}

// An end that follows sends together with its answers to the peer's heartbeats,
// and is no later than others to notice that the peer is gone.
func TestR090_R093_HeartbeatThatFollowsThePeers(t *testing.T) {
	const (
		interval, limit = time.Second, 4
		alive           = 50 * time.Second // of the peer: it answers at once
	)
	for _, every := range []time.Duration{interval, interval * 9 / 10, interval * 5} {
		for _, phase := range []time.Duration{0, 300 * time.Millisecond, 700 * time.Millisecond} {
			var h heartbeatTimer
			up := firstBeat.Add(500 * time.Second)
			h.startBeats(up, interval)
			sent, alone, heard, dead := 0, 0, false, false
			tick := func(now time.Time) {
				switch h.onTick(now, heard, interval, limit) {
				case hbSend:
					sent++
				case hbDead:
					dead = true
				}
				heard = false
			}
			next, end := phase+interval, time.Duration(0) // the peer's next heartbeat
			for ; !dead; end += time.Millisecond {
				now := up.Add(end)
				if !now.Before(h.next) {
					before := sent
					tick(now)
					if end < alive {
						alone += sent - before
					}
				}
				if end < alive && end == next {
					heard, next = true, next+every
					h.followPeer(now, interval, tick)
				}
				heard = heard || h.missed > 0 && end < alive
			}
			name := fmt.Sprintf("peer's interval %v, phase %v", every, phase)
			if every <= interval && alone > 2 {
				t.Errorf("%s: %d of %d heartbeats did not follow", name, alone, sent)
			}
			if n := int(alive / interval); sent < n-10 || sent > n+10 {
				t.Errorf("%s: %d heartbeats, want about %d", name, sent, n)
			}
			if silent := end - alive; silent < (limit+1)*interval-interval/100 || silent > (limit+2)*interval+interval/4 {
				t.Errorf("%s: the peer was silent for %v", name, silent)
			}
		}
	}
}
