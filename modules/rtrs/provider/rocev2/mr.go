package rocev2

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A key is a 24-bit index and an 8-bit variant. Indices on the wire are the
// dense slots of the table, permuted, so that keys cannot be guessed by
// counting: index = slot*mult + offset mod 2^24 with an odd mult.

const (
	indexMask = 1<<24 - 1
	pageSize  = 1 << 10
	// restingKeys is how many slots rest before one of them is used again.
	restingKeys = 64
)

type keyPage [pageSize]atomic.Pointer[region]

// keyTable finds regions by key, from any goroutine, without a lock.
type keyTable struct {
	mult, inverse, offset uint32
	pages                 atomic.Pointer[[]*keyPage] // copied on growth

	mu   sync.Mutex
	used uint32       // slots taken so far
	free []restingKey // oldest first
}

type restingKey struct{ slot, variant uint32 }

// region is one registered piece of memory.
type region struct {
	buf    []byte
	base   uint64 // address of buf[0]
	pd     *pd
	key    uint32 // at registration; also the local key
	slot   uint32
	access verbs.Access
	// valid is the key under which the peer reaches the region, 0 while it is
	// invalidated.
	valid atomic.Uint32
}

func (t *keyTable) init() {
	t.mult, t.offset = rand.Uint32()&indexMask|1, rand.Uint32()&indexMask
	t.inverse = 1
	for range 5 { // each round doubles the number of right low bits
		t.inverse *= 2 - t.mult*t.inverse
	}
	t.pages.Store(new([]*keyPage))
}

func (t *keyTable) index(slot uint32) uint32 { return (slot*t.mult + t.offset) & indexMask }

// lookup returns the region with the index of key, whatever its variant.
func (t *keyTable) lookup(key uint32) *region {
	slot := (key>>8 - t.offset) * t.inverse & indexMask
	pages := *t.pages.Load()
	if int(slot/pageSize) >= len(pages) {
		return nil
	}
	return pages[slot/pageSize][slot%pageSize].Load()
}

func (t *keyTable) insert(r *region) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	variant := rand.Uint32() & 0xff
	switch {
	case len(t.free) > restingKeys || t.used > indexMask && len(t.free) > 0:
		r.slot, variant = t.free[0].slot, (t.free[0].variant+1)&0xff
		t.free = t.free[1:]
	case t.used > indexMask:
		return errors.New("all 2^24 keys are in use")
	default:
		if t.index(t.used) == 0 {
			t.used++ // a key is never 0
		}
		r.slot = t.used
		t.used++
	}
	pages := *t.pages.Load()
	if int(r.slot/pageSize) >= len(pages) {
		pages = append(append(make([]*keyPage, 0, len(pages)+1), pages...), new(keyPage))
		t.pages.Store(&pages)
	}
	r.key = t.index(r.slot)<<8 | variant
	r.valid.Store(r.key)
	pages[r.slot/pageSize][r.slot%pageSize].Store(r)
	return nil
}

// remove reports whether r was there.
func (t *keyTable) remove(r *region) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	pages := *t.pages.Load()
	if !pages[r.slot/pageSize][r.slot%pageSize].CompareAndSwap(r, nil) {
		return false
	}
	last := r.key
	if v := r.valid.Swap(0); v != 0 {
		last = v
	}
	t.free = append(t.free, restingKey{r.slot, last & 0xff})
	return true
}

// span returns n bytes at addr, or nil when they are not all inside.
func (r *region) span(addr, n uint64) []byte {
	size := uint64(len(r.buf))
	if addr < r.base || addr-r.base > size || n > size-(addr-r.base) {
		return nil
	}
	off := addr - r.base
	return r.buf[off : off+n : off+n]
}

// pd implements verbs.PD.
type pd struct{ dev *Device }

func (p *pd) RegMR(buf []byte, access verbs.Access) (verbs.MR, error) {
	if len(buf) == 0 {
		return nil, errors.New("register memory: empty buffer")
	}
	r := &region{buf: buf, base: addrOf(buf), pd: p, access: access}
	if err := p.dev.keys.insert(r); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	return &mr{r}, nil
}

func (p *pd) Close() error { return nil }

// holds tells whether buf lies in the region of the local key.
func (p *pd) holds(lkey uint32, buf []byte) bool {
	if len(buf) == 0 {
		return true
	}
	r := p.dev.keys.lookup(lkey)
	return r != nil && r.key == lkey && r.pd == p && r.span(addrOf(buf), uint64(len(buf))) != nil
}

// remote returns n bytes at addr that the peer may reach under key with the
// given right, or nil.
func (p *pd) remote(key uint32, addr, n uint64, right verbs.Access) []byte {
	r := p.dev.keys.lookup(key)
	if r == nil || r.valid.Load() != key || r.pd != p || r.access&right == 0 {
		return nil
	}
	return r.span(addr, n)
}

// invalidate makes the region of key unreachable; one that is already is fine.
// Any goroutine.
func (p *pd) invalidate(key uint32) bool {
	r := p.dev.keys.lookup(key)
	return r != nil && r.pd == p && (r.valid.CompareAndSwap(key, 0) || r.valid.Load() == 0)
}

// validate makes an invalidated region reachable under key. Any goroutine.
func (p *pd) validate(key uint32) bool {
	r := p.dev.keys.lookup(key)
	return r != nil && r.pd == p && r.valid.CompareAndSwap(0, key)
}

// mr implements verbs.MR.
type mr struct{ r *region }

func (m *mr) LKey() uint32 { return m.r.key }
func (m *mr) RKey() uint32 { return m.r.key }
func (m *mr) Addr() uint64 { return m.r.base }
func (m *mr) Len() int     { return len(m.r.buf) }

// Close implements verbs.MR. Once the key is gone, nothing new reaches the
// memory: every placement, READ response and first transmission looks the key
// up in the same turn of the owner. What may be sent again is copied.
func (m *mr) Close() error {
	d := m.r.pd.dev
	if !d.keys.remove(m.r) {
		return fmt.Errorf("close memory region %#x: %w", m.r.key, verbs.ErrClosed)
	}
	for _, c := range d.queues() {
		c.letGo(m.r)
	}
	return nil
}

// letGo makes the queue independent of the memory of r, whose key is gone. It
// waits for the turn of the owner to end. Any goroutine.
func (c *cq) letGo(r *region) {
	c.turn.Lock()
	defer c.turn.Unlock()
	for _, o := range c.outs {
		o.letGo(r)
	}
	for left, i := c.attached, 0; left > 0; i++ {
		if q := c.table[i]; q != nil {
			left--
			q.letGo(r)
		}
	}
}

// letGo moves the payload of requests that may have to be sent again out of the
// memory of r. The owner may post meanwhile, so requests that were not started
// are not looked at: start finds that their key is gone.
func (q *qp) letGo(r *region) {
	if q.end.state != endNone {
		return // nothing is sent any more
	}
	for at := q.req.una.at; at < q.req.begun; at++ {
		e := &q.sq[at&q.sqMask]
		if e.op == verbs.OpRead {
			continue // the key is looked up before each placement
		}
		for i := range e.nsge {
			s := &q.sges[int(at&q.sqMask)*q.maxSGE+int(i)]
			if s.LKey == r.key {
				*s = verbs.SGE{Buf: bytes.Clone(s.Buf)}
			}
		}
	}
}

// holdsAll reports whether the elements of entry at are still registered.
func (q *qp) holdsAll(at uint64) bool {
	slot := int(at & q.sqMask)
	for i := range int(q.sq[slot].nsge) {
		if s := &q.sges[slot*q.maxSGE+i]; !q.pd.holds(s.LKey, s.Buf) {
			return false
		}
	}
	return true
}
