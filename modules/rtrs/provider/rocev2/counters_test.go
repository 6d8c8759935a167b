package rocev2

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var _ verbs.CounterSource = (*Device)(nil)

func TestCountersHaveEveryReasonOnce(t *testing.T) {
	d := openDevice(t, Config{})
	d.cm.stats.dropped[dropICRC].Store(7)
	d.cm.stats.resent.Store(3)
	seen := map[string]uint64{}
	for _, c := range d.Counters() {
		key := c.Name + "/" + c.Reason
		if _, twice := seen[key]; twice {
			t.Errorf("%s is there twice", key)
		}
		seen[key] = c.Value
	}
	if seen["dropped_packets/icrc"] != 7 || seen["resent_packets/"] != 3 {
		t.Errorf("%v", seen)
	}
	if n := len(seen); n != 8+Reasons-1 {
		t.Errorf("%d counters: %v", n, seen)
	}
}
