package iwarp

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// An STag is a 24-bit index and an 8-bit key. Indices look random on the wire
// but come from dense slots: index = slot*mult + offset mod 2^24 with an odd
// mult, so that a lookup is two multiplications and two loads.

const (
	slotBits  = 24
	slotMask  = 1<<slotBits - 1
	pageSlots = 1 << 10
)

type stagPage [pageSlots]atomic.Pointer[region]

// stagTable finds regions by STag, from any goroutine, without a lock.
type stagTable struct {
	mult, inverse, offset uint32
	pages                 atomic.Pointer[[]*stagPage] // copied on growth

	mu   sync.Mutex
	next uint32
	free []freeSlot // oldest first, so that an index rests before it is used again
}

type freeSlot struct {
	slot uint32
	key  uint32 // last key byte used
}

// region is one registered piece of memory.
type region struct {
	buf    []byte
	base   uint64 // address of buf[0], also the first TO
	pd     *pd
	lkey   uint32
	access verbs.Access
	slot   uint32
	// valid is the whole STag under which the peer reaches the region, 0 while
	// it is invalidated, closedKey for ever once it is closed.
	valid atomic.Uint32
}

// closedKey is no STag of a region, since no region has index 0.
const closedKey = 1

func (t *stagTable) init() {
	t.mult = rand.Uint32()&slotMask | 1
	t.offset = rand.Uint32() & slotMask
	t.inverse = 1
	for range 5 { // Newton: doubles the number of right low bits, 5 rounds for 32
		t.inverse *= 2 - t.mult*t.inverse
	}
	t.pages.Store(new([]*stagPage))
}

func (t *stagTable) index(slot uint32) uint32   { return (slot*t.mult + t.offset) & slotMask }
func (t *stagTable) slotOf(index uint32) uint32 { return (index - t.offset) * t.inverse & slotMask }

// lookup returns the region with the index of stag, whatever its key, or nil.
func (t *stagTable) lookup(stag uint32) *region {
	slot := t.slotOf(stag >> 8)
	pages := *t.pages.Load()
	if int(slot/pageSlots) >= len(pages) {
		return nil
	}
	return pages[slot/pageSlots][slot%pageSlots].Load()
}

var errTableFull = errors.New("all 2^24 STags are in use")

// maxFresh is how many slots rest in the free list before one is used again.
const maxFresh = 64

func (t *stagTable) insert(r *region) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	slot, key, err := t.takeSlot()
	if err != nil {
		return err
	}
	pages := *t.pages.Load()
	if int(slot/pageSlots) >= len(pages) {
		grown := append(append(make([]*stagPage, 0, len(pages)+1), pages...), new(stagPage))
		t.pages.Store(&grown)
		pages = grown
	}
	r.slot = slot
	r.lkey = t.index(slot)<<8 | key
	r.valid.Store(r.lkey)
	pages[slot/pageSlots][slot%pageSlots].Store(r)
	return nil
}

func (t *stagTable) takeSlot() (slot, key uint32, err error) {
	exhausted := t.next > slotMask
	if len(t.free) > maxFresh || exhausted && len(t.free) > 0 {
		f := t.free[0]
		t.free = t.free[1:]
		return f.slot, (f.key + 1) & 0xff, nil
	}
	if !exhausted && t.index(t.next) == 0 {
		t.next++ // STag index 0 stays unused
	}
	if t.next > slotMask {
		return 0, 0, errTableFull
	}
	slot = t.next
	t.next++
	return slot, rand.Uint32() & 0xff, nil
}

// remove takes r out of the table and reports whether it was there.
func (t *stagTable) remove(r *region) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	pages := *t.pages.Load()
	if !pages[r.slot/pageSlots][r.slot%pageSlots].CompareAndSwap(r, nil) {
		return false
	}
	last := r.lkey
	if v := r.valid.Swap(closedKey); v != 0 {
		last = v
	}
	t.free = append(t.free, freeSlot{r.slot, last & 0xff})
	return true
}

// span returns n bytes at to, or nil when they are not all inside. It cannot
// be fooled by sums that wrap.
func (r *region) span(to uint64, n int) []byte {
	size := uint64(len(r.buf))
	if to < r.base || to-r.base > size || uint64(n) > size-(to-r.base) {
		return nil
	}
	off := to - r.base
	return r.buf[off : off+uint64(n) : off+uint64(n)]
}

// holds tells whether buf lies in the region.
func (r *region) holds(buf []byte) bool {
	return len(buf) == 0 || r.span(addrOf(buf), len(buf)) != nil
}

// pd implements verbs.PD.
type pd struct {
	dev *Device

	mu    sync.Mutex
	users map[*cq]int // attached connections of the domain by their queue
}

// join notes that a connection of the domain is attached to c.
func (p *pd) join(c *cq) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users == nil {
		p.users = map[*cq]int{}
	}
	p.users[c]++
}

// leave notes that one is attached no more.
func (p *pd) leave(c *cq) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users[c]--; p.users[c] <= 0 {
		delete(p.users, c)
	}
}

// queues are those with connections of the domain.
func (p *pd) queues() []*cq {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.users))
}

func (p *pd) RegMR(buf []byte, access verbs.Access) (verbs.MR, error) {
	if len(buf) == 0 {
		return nil, errors.New("register memory: empty buffer")
	}
	r := &region{buf: buf, base: addrOf(buf), pd: p, access: access}
	if err := p.dev.stags.insert(r); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	return &mr{r}, nil
}

func (p *pd) Close() error { return nil }

// local finds the region of a local element and checks that buf is in it.
func (p *pd) local(lkey uint32, buf []byte) bool {
	if len(buf) == 0 {
		return true
	}
	r := p.dev.stags.lookup(lkey)
	return r != nil && r.lkey == lkey && r.pd == p && r.holds(buf)
}

// invalidate makes the region of stag unreachable. A region that is invalid
// already is fine. Any goroutine.
func (p *pd) invalidate(stag uint32) keyResult {
	r := p.dev.stags.lookup(stag)
	if r == nil {
		return keyUnknown
	}
	if r.pd != p {
		return keyForeign
	}
	if !r.valid.CompareAndSwap(stag, 0) && r.valid.Load() != 0 {
		return keyUnknown
	}
	return keyOK
}

// validate makes an invalidated region reachable under stag. Any goroutine.
func (p *pd) validate(stag uint32) keyResult {
	r := p.dev.stags.lookup(stag)
	if r == nil {
		return keyUnknown
	}
	if r.pd != p {
		return keyForeign
	}
	if !r.valid.CompareAndSwap(0, stag) {
		return keyInUse
	}
	return keyOK
}

type keyResult uint8

const (
	keyOK      keyResult = iota
	keyUnknown           // no such region, or another key is valid
	keyForeign           // region of another protection domain
	keyInUse             // the region has a valid key
)

func (k keyResult) String() string {
	return [...]string{"ok", "no such key", "region of another protection domain", "region has a valid key"}[k]
}

// mr implements verbs.MR.
type mr struct{ r *region }

func (m *mr) LKey() uint32 { return m.r.lkey }
func (m *mr) RKey() uint32 { return m.r.lkey }
func (m *mr) Addr() uint64 { return m.r.base }
func (m *mr) Len() int     { return len(m.r.buf) }

// Close implements verbs.MR. The region is out of the table first, so nothing
// new finds it; a connection that is attached meanwhile looks for itself. Then
// every owner that may be at work learns that it is gone before it touches
// memory again.
func (m *mr) Close() error {
	p := m.r.pd
	if !p.dev.stags.remove(m.r) {
		return nil // closed before
	}
	queues := p.queues()
	for _, c := range queues {
		c.revoke(m.r)
	}
	for _, c := range queues {
		c.passTurn()
	}
	return nil
}
