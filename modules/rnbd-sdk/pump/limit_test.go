package pump

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

func TestLimit(t *testing.T) {
	for _, test := range []struct {
		name   string
		ago    time.Duration // when the wait began
		extend bool
		spent  int // looks until the time is over; 0: never
		late   bool
	}{
		{"in time", 0, true, 0, false},
		{"over", 2 * time.Hour, false, clockEvery, false},
		{"over and extended", 2 * time.Hour, true, 0, true},
		{"over, and the extension too", (Grace + 1) * time.Hour, true, 2 * clockEvery, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := NewLimit(latency.Now()-int64(test.ago), time.Hour, test.extend)
			spent := 0
			for n := 1; n <= 100 && spent == 0; n++ {
				if l.Spent() {
					spent = n
				}
			}
			if spent != test.spent || l.Late() != test.late {
				t.Errorf("spent after %d looks, late: %v; want %d, %v", spent, l.Late(), test.spent, test.late)
			}
		})
	}
}
