// Package monitor watches the links of a bond's slaves. The MII monitor is a
// loop that looks at the carriers in each interval of miimon, when a device
// reports a change, and when a delay ends. The ARP monitor is the same loop in
// each arp_interval, with the frames that it sends and reads.
package monitor

import (
	"context"
	"time"
)

// Target is driven by a loop.
type Target interface {
	// Poll does everything that is due and returns the time at which something
	// will be due again; ok is false if nothing will by itself.
	Poll() (next time.Time, ok bool)
}

// Loop calls t.Poll when it is due and for each value from wake, until ctx ends.
func Loop(ctx context.Context, t Target, wake <-chan struct{}) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		next, ok := t.Poll()
		timer.Stop()
		if ok {
			timer.Reset(max(0, time.Until(next)))
		}
		select {
		case <-ctx.Done():
			return
		case <-wake:
		case <-timer.C:
		}
	}
}
