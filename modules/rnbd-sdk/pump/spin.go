package pump

import (
	"math/bits"
	"time"
)

const (
	minHits    = 4  // of the last 16 spins: a quarter
	probeEvery = 16 // idle moments without a spin, then one probe
)

// spinner decides how long a pump spins.
type spinner struct {
	budget  time.Duration
	history uint16 // one bit per spin, 1: it met work
	skipped int
	large   bool // the last event was large I/O
}

func newSpinner(budget time.Duration) spinner {
	return spinner{budget: budget, history: 0xffff}
}

// next returns the time to spin now. 0 means not at all.
//
// A probe spins twice as long: while all processes of a path sleep between
// hops, a round trip takes longer than the budget, and a probe of the usual
// length would never see that spinning is worth while again.
func (s *spinner) next() time.Duration {
	if s.budget <= 0 || s.large {
		return 0
	}
	if bits.OnesCount16(s.history) >= minHits {
		return s.budget
	}
	if s.skipped++; s.skipped < probeEvery {
		return 0
	}
	s.skipped = 0
	return 2 * s.budget
}

// steady reports whether all of the last spins met work in time. The next one may last
// longer then, see Limit.
func (s *spinner) steady() bool { return s.history == 1<<16-1 }

func (s *spinner) record(hit bool) {
	s.history <<= 1
	if hit {
		s.history |= 1
	}
}
