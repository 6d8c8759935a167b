package plugin

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// maxIndex bounds the indices of devices and arenas in ring entries.
const maxIndex = 1 << 16

// table finds things by the index in a ring entry. Readers take no lock: a
// change makes a new slice.
type table[T any] struct {
	mu  sync.Mutex // writers
	cur atomic.Pointer[[]*T]
}

// get returns nil for an index that is not in use.
func (t *table[T]) get(i uint32) *T {
	s := t.cur.Load()
	if s == nil || uint64(i) >= uint64(len(*s)) {
		return nil
	}
	return (*s)[i]
}

// add fails when the index is taken or out of range.
func (t *table[T]) add(i uint32, v *T) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i >= maxIndex {
		return fmt.Errorf("index %d is above %d: %w", i, maxIndex-1, blk.EINVAL)
	}
	if t.get(i) != nil {
		return fmt.Errorf("index %d is in use: %w", i, blk.EEXIST)
	}
	t.store(i, v)
	return nil
}

// swap replaces the entry if it is still old; v may be nil.
func (t *table[T]) swap(i uint32, old, v *T) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if old == nil || t.get(i) != old {
		return false
	}
	t.store(i, v)
	return true
}

func (t *table[T]) store(i uint32, v *T) {
	var old []*T
	if s := t.cur.Load(); s != nil {
		old = *s
	}
	next := make([]*T, max(len(old), int(i)+1))
	copy(next, old)
	next[i] = v
	t.cur.Store(&next)
}

// each calls f for every entry of the table.
func (t *table[T]) each(f func(uint32, *T)) {
	s := t.cur.Load()
	if s == nil {
		return
	}
	for i, v := range *s {
		if v != nil {
			f(uint32(i), v)
		}
	}
}

// take empties the table and returns its entries.
func (t *table[T]) take() map[uint32]*T {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[uint32]*T{}
	if s := t.cur.Swap(nil); s != nil {
		for i, v := range *s {
			if v != nil {
				out[uint32(i)] = v
			}
		}
	}
	return out
}
