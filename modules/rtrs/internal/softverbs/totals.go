package softverbs

import "sync"

// Totals adds up the counters of a device. Every completion queue has counters
// C of its own. Only its owner writes them, with atomic operations; S is their
// sum. Sums never fall: Totals keeps those of closed queues. The zero value is
// ready for use. All methods may be called by any goroutine.
type Totals[C interface {
	comparable
	AddTo(*S)
}, S any] struct {
	mu   sync.Mutex
	open map[C]bool
	past S
}

// Open adds c to the sum.
func (t *Totals[C, S]) Open(c C) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil {
		t.open = map[C]bool{}
	}
	t.open[c] = true
}

// Close notes that c does not count any more.
func (t *Totals[C, S]) Close(c C) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open[c] {
		delete(t.open, c)
		c.AddTo(&t.past)
	}
}

// Add calls f to add something that no completion queue counts.
func (t *Totals[C, S]) Add(f func(*S)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(&t.past)
}

// Sum returns the sum.
func (t *Totals[C, S]) Sum() S {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.past
	for c := range t.open {
		c.AddTo(&s)
	}
	return s
}

// Len returns the number of counters that were opened and not closed.
func (t *Totals[C, S]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.open)
}
