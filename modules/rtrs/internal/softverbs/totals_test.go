package softverbs

import (
	"sync/atomic"
	"testing"
)

type tally struct{ n atomic.Uint64 }

func (c *tally) AddTo(sum *uint64) { *sum += c.n.Load() }

func TestTotals_DoNotFallWhenAQueueIsClosed(t *testing.T) {
	var totals Totals[*tally, uint64]
	var a, b tally
	totals.Open(&a)
	totals.Open(&b)
	a.n.Store(5)
	b.n.Store(7)
	totals.Add(func(s *uint64) { *s += 100 })
	for range 2 { // closed twice, counted once
		totals.Close(&a)
	}
	b.n.Add(1)
	if got := totals.Sum(); got != 113 || totals.Len() != 1 {
		t.Errorf("sum %d of %d open counters", got, totals.Len())
	}
}
