package softverbs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A key is a 24-bit index and an 8-bit variant. Regions are kept in dense
// slots. An index is the slot permuted, slot*mult + offset modulo 2^24 with an
// odd mult, so that a peer cannot guess keys by counting and a lookup costs two
// multiplications and two loads.

const (
	indexMask = 1<<24 - 1
	pageSlots = 1 << 10
	// restingSlots is the number of slots that must be free before the first of
	// them is used again, so that a key is not valid again soon.
	restingSlots = 64
	// closedKey is the valid key of a closed region. No region has it, because
	// index 0 is not used.
	closedKey = 1
)

var errTableFull = errors.New("all 2^24 keys of the device are in use: close regions or use another device")

// KeyTable finds the regions of a device by their keys. Init must be called
// before the first use. All methods may be called by any goroutine.
type KeyTable struct {
	mult, inverse, offset uint32
	pages                 atomic.Pointer[[]*keyPage] // replaced under mu when it grows

	mu   sync.Mutex
	used uint32        // slots that were ever used
	free []restingSlot // oldest first
}

type keyPage [pageSlots]atomic.Pointer[Region]

// restingSlot is the slot of a closed region, with its last variant.
type restingSlot struct{ slot, variant uint32 }

// Init chooses the permutation of the indices.
func (t *KeyTable) Init() {
	t.mult, t.offset = rand.Uint32()&indexMask|1, rand.Uint32()&indexMask
	t.inverse = 1
	for range 5 { // Newton's method: each round doubles the number of correct low bits
		t.inverse *= 2 - t.mult*t.inverse
	}
	t.pages.Store(new([]*keyPage))
}

func (t *KeyTable) slotIndex(slot uint32) uint32 { return (slot*t.mult + t.offset) & indexMask }

func (t *KeyTable) keySlot(key uint32) uint32 { return (key>>8 - t.offset) * t.inverse & indexMask }

// Lookup returns the region with the index of key, whatever its variant, or
// nil.
func (t *KeyTable) Lookup(key uint32) *Region {
	slot := t.keySlot(key)
	pages := *t.pages.Load()
	if int(slot/pageSlots) >= len(pages) {
		return nil
	}
	return pages[slot/pageSlots][slot%pageSlots].Load()
}

// insertRegion gives r a slot and its first key.
func (t *KeyTable) insertRegion(r *Region) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	slot, variant, err := t.takeSlot()
	if err != nil {
		return err
	}
	t.putRegion(r, slot, t.slotIndex(slot)<<8|variant)
	return nil
}

func (t *KeyTable) takeSlot() (slot, variant uint32, err error) {
	if t.used <= indexMask && t.slotIndex(t.used) == 0 {
		t.used++ // index 0 is not used
	}
	exhausted := t.used > indexMask
	switch {
	case len(t.free) > restingSlots || exhausted && len(t.free) > 0:
		f := t.free[0]
		t.free = t.free[1:]
		return f.slot, (f.variant + 1) & 0xff, nil
	case exhausted:
		return 0, 0, errTableFull
	}
	t.used++
	return t.used - 1, rand.Uint32() & 0xff, nil
}

// putRegion makes r reachable in slot under key. mu is held.
func (t *KeyTable) putRegion(r *Region, slot, key uint32) {
	pages := *t.pages.Load()
	if int(slot/pageSlots) >= len(pages) {
		pages = append([]*keyPage(nil), pages...)
		for int(slot/pageSlots) >= len(pages) {
			pages = append(pages, new(keyPage))
		}
		t.pages.Store(&pages)
	}
	r.slot, r.key = slot, key
	r.valid.Store(key)
	pages[slot/pageSlots][slot%pageSlots].Store(r)
}

// removeRegion takes r out of the table and reports whether it was there.
func (t *KeyTable) removeRegion(r *Region) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	pages := *t.pages.Load()
	if !pages[r.slot/pageSlots][r.slot%pageSlots].CompareAndSwap(r, nil) {
		return false
	}
	last := r.key
	if v := r.valid.Swap(closedKey); v != 0 {
		last = v
	}
	t.free = append(t.free, restingSlot{r.slot, last & 0xff})
	return true
}

// Region is registered memory. It implements verbs.MR.
type Region struct {
	Domain *Domain      // its connections may name it
	Access verbs.Access // of the peer

	buf  []byte
	base uint64 // address of buf[0]
	key  uint32 // at registration; also the local key
	slot uint32
	// valid is the peer's key of the region, 0 while it is invalidated,
	// closedKey once it is closed.
	valid atomic.Uint32
	// readers is above 0 while others read the memory: nothing is placed unverified then.
	readers *atomic.Int32 // nil: nothing ever has to be verified first
}

// Guard implements verbs.Guarded.
func (r *Region) Guard(readers *atomic.Int32) { r.readers = readers }

// Guarded reports whether payload must be verified before it is placed. Any goroutine.
func (r *Region) Guarded() bool { return r.readers != nil && r.readers.Load() > 0 }

// LKey implements verbs.MR.
func (r *Region) LKey() uint32 { return r.key }

// RKey implements verbs.MR.
func (r *Region) RKey() uint32 { return r.key }

// Addr implements verbs.MR.
func (r *Region) Addr() uint64 { return r.base }

// Len implements verbs.MR.
func (r *Region) Len() int { return len(r.buf) }

// Valid reports whether the peer reaches the region under key. Any goroutine.
func (r *Region) Valid(key uint32) bool { return r.valid.Load() == key }

// Span returns the n bytes at addr, or nil if they are not all in the region.
// Sums that wrap around are refused, too.
func (r *Region) Span(addr, n uint64) []byte {
	size := uint64(len(r.buf))
	if addr < r.base || addr-r.base > size || n > size-(addr-r.base) {
		return nil
	}
	off := addr - r.base
	return r.buf[off : off+n : off+n]
}

// Close implements verbs.MR. The region leaves the table first, so that nothing
// new finds it. Then every completion queue with connections of the domain lets
// go of the memory. A connection that is attached meanwhile finds that the key
// is gone.
func (r *Region) Close() error {
	d := r.Domain
	if !d.keys.removeRegion(r) {
		return fmt.Errorf("close memory region %#x: %w", r.key, verbs.ErrClosed)
	}
	for _, o := range d.listUsers() {
		o.Release(r)
	}
	return nil
}
