package iwarp

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var _ verbs.CounterSource = (*Device)(nil)

func TestCountersAreTheStats(t *testing.T) {
	d := &Device{}
	c := d.newCounters()
	c.sent.Store(1)
	c.received.Store(2)
	c.placed.Store(3)
	c.direct.Store(4)
	c.crcErrors.Store(5)
	want := map[verbs.Counter]bool{
		{Name: "sent", Bytes: true, Value: 1}: true, {Name: "received", Bytes: true, Value: 2}: true,
		{Name: "placed_by_copy", Bytes: true, Value: 3}: true, {Name: "placed_by_socket", Bytes: true, Value: 4}: true,
		{Name: "closed", Reason: "crc", Value: 5}: true,
	}
	got := d.Counters()
	for _, c := range got {
		if !want[c] {
			t.Errorf("unexpected %+v", c)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d counters, want %d", len(got), len(want))
	}
}
