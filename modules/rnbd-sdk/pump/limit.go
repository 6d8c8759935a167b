package pump

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

const (
	// clockEvery is the number of looks for work between two looks at the clock.
	clockEvery = 4
	// Grace is the factor of an extended Limit.
	Grace = 4
)

// Limit bounds a wait that looks for work again and again. Where the waits before found
// work in time it may be extended once: the other thread has probably lost its CPU for
// a moment, and to sleep and be woken costs more.
type Limit struct {
	start  int64 // by latency.Now
	length time.Duration
	extend bool
	late   bool
	looks  int
}

// NewLimit begins a wait of length from now on, a time of latency.Now. If extend is
// set, it may last Grace times as long.
func NewLimit(now int64, length time.Duration, extend bool) Limit {
	return Limit{start: now, length: length, extend: extend}
}

// Spent counts a look that found nothing. It reports whether the time was over at the
// last look at the clock.
func (l *Limit) Spent() bool {
	if l.looks++; l.looks%clockEvery != 0 || time.Duration(latency.Now()-l.start) < l.length {
		return false
	}
	if !l.extend {
		return true
	}
	l.extend, l.late = false, true
	l.length *= Grace
	return false
}

// Late reports whether the wait has been extended.
func (l *Limit) Late() bool { return l.late }
