package rtrs

import (
	"testing"
	"testing/synctest"
	"time"
)

// In a bubble of virtual time alarms and heartbeats come when they are due.
// Virtual time begins in the past.
func TestAlarmsAndBeatsInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := NewPoller(0)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		var rang time.Time
		al := pollerAlarm{f: func(now time.Time) { rang = now }}
		due := time.Now().Add(time.Second)
		p.alarms.setAlarm(&al, due)
		for range 12 {
			p.Arm()
			p.Poll()
			if early := time.Now().Before(due); early != rang.IsZero() {
				t.Errorf("at %v: rang at %v", time.Now(), rang)
			}
			time.Sleep(100 * time.Millisecond)
		}

		var h heartbeatTimer
		h.startBeats(time.Now(), time.Second)
		if wait := time.Until(h.next); wait < time.Second || wait > 2*time.Second {
			t.Errorf("the first heartbeat is due in %v", wait)
		}
		h.sentAt.Store(h.monotonicNow())
		time.Sleep(30 * time.Millisecond)
		if took := time.Duration(h.monotonicNow() - h.sentAt.Load()); took < 29*time.Millisecond || took > 31*time.Millisecond {
			t.Errorf("30 ms took %v", took)
		}
	})
}
