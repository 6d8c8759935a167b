package softverbs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Domain implements verbs.PD.
type Domain struct {
	keys *KeyTable

	mu     sync.Mutex
	owners map[Owner]int // number of attached connections of the domain
}

// Owner is a completion queue as Region.Close sees it.
type Owner interface {
	// Release makes the queue independent of the memory of r. The key of r is
	// removed already. When it returns, no call of the owner uses the memory:
	// work that names r has ended, goes on from a copy, or ends before the
	// next look at the memory. It waits for the owner only while that is in
	// Poll, Flush or Arm. Any goroutine.
	Release(r *Region)
}

// NewDomain returns a protection domain of the device with the given keys.
func NewDomain(keys *KeyTable) *Domain {
	return &Domain{keys: keys, owners: map[Owner]int{}}
}

// Of reports whether the domain belongs to the device with the given keys.
func (d *Domain) Of(keys *KeyTable) bool { return d.keys == keys }

// RegMR implements verbs.PD.
func (d *Domain) RegMR(buf []byte, access verbs.Access) (verbs.MR, error) {
	if len(buf) == 0 {
		return nil, errors.New("register memory: empty buffer")
	}
	r := &Region{Domain: d, Access: access, buf: buf, base: AddrOf(buf)}
	if err := d.keys.insertRegion(r); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	return r, nil
}

// Plant registers buf under a key and at an address that the caller chooses.
// It is for tests that decode captured or generated messages.
func (d *Domain) Plant(buf []byte, addr uint64, key uint32, access verbs.Access) *Region {
	r := &Region{Domain: d, Access: access, buf: buf, base: addr}
	t := d.keys
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.used == 0 { // an empty table needs one page only
		t.offset, t.used = key>>8, 1
	}
	t.putRegion(r, t.keySlot(key), key)
	return r
}

// Close implements verbs.PD.
func (d *Domain) Close() error { return nil }

// AddUser notes that a connection of the domain was attached to o. Any goroutine.
func (d *Domain) AddUser(o Owner) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.owners[o]++
}

// RemoveUser records that a connection of the domain was detached from o. o
// uses no memory on its behalf any more. Any goroutine.
func (d *Domain) RemoveUser(o Owner) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.owners[o]--; d.owners[o] <= 0 {
		delete(d.owners, o)
	}
}

// listUsers returns the completion queues with connections of the domain.
func (d *Domain) listUsers() []Owner {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.owners))
}

// Used reports whether a connection of the domain is attached. Any goroutine.
func (d *Domain) Used() bool { return len(d.listUsers()) > 0 }

// Holds reports whether buf lies in the region with the local key lkey. An
// empty buf needs no region. Any goroutine.
func (d *Domain) Holds(lkey uint32, buf []byte) bool {
	if len(buf) == 0 {
		return true
	}
	r := d.keys.Lookup(lkey)
	return r != nil && r.key == lkey && r.Domain == d && r.Span(AddrOf(buf), uint64(len(buf))) != nil
}

// HoldsAll reports whether Holds is true for all elements. Any goroutine.
func (d *Domain) HoldsAll(sges []verbs.SGE) bool {
	for i := range sges {
		if !d.Holds(sges[i].LKey, sges[i].Buf) {
			return false
		}
	}
	return true
}

// Reach returns the region that the peer may reach under key with the right
// given. The result is KeyOK, KeyUnknown, KeyForeign or KeyDenied; the region
// is nil unless it is KeyOK. Any goroutine.
func (d *Domain) Reach(key uint32, right verbs.Access) (*Region, KeyResult) {
	r := d.keys.Lookup(key)
	switch {
	case r == nil || r.valid.Load() != key:
		return nil, KeyUnknown
	case r.Domain != d:
		return nil, KeyForeign
	case r.Access&right == 0:
		return nil, KeyDenied
	}
	return r, KeyOK
}

// Remote returns the n bytes at addr that the peer may reach under key with the
// right given, or nil. Any goroutine.
func (d *Domain) Remote(key uint32, addr, n uint64, right verbs.Access) []byte {
	if r, _ := d.Reach(key, right); r != nil {
		return r.Span(addr, n)
	}
	return nil
}

// Rotate executes OpLocalInv or OpRegMR. The result is that of Invalidate or
// Validate. Any goroutine.
func (d *Domain) Rotate(op verbs.Opcode, key uint32) KeyResult {
	if op == verbs.OpLocalInv {
		return d.Invalidate(key)
	}
	return d.Validate(key)
}

// Invalidate makes the region of key unreachable for the peer. The result is
// KeyOK also if the region was invalidated before, else KeyUnknown or
// KeyForeign. Any goroutine.
func (d *Domain) Invalidate(key uint32) KeyResult {
	r := d.keys.Lookup(key)
	switch {
	case r == nil:
		return KeyUnknown
	case r.Domain != d:
		return KeyForeign
	case !r.valid.CompareAndSwap(key, 0) && r.valid.Load() != 0:
		return KeyUnknown
	}
	return KeyOK
}

// Validate makes an invalidated region reachable for the peer under key. The
// result is KeyOK, KeyUnknown, KeyForeign or KeyInUse. Any goroutine.
func (d *Domain) Validate(key uint32) KeyResult {
	r := d.keys.Lookup(key)
	switch {
	case r == nil:
		return KeyUnknown
	case r.Domain != d:
		return KeyForeign
	case !r.valid.CompareAndSwap(0, key):
		return KeyInUse
	}
	return KeyOK
}

// KeyResult is the result of looking up a key.
type KeyResult uint8

const (
	KeyOK      KeyResult = iota
	KeyUnknown           // no region has this key now
	KeyForeign           // the region belongs to another protection domain
	KeyInUse             // the region has a valid key
	KeyDenied            // the region does not give the right
)

func (k KeyResult) String() string {
	return [...]string{"ok", "no such key", "region of another protection domain", "region has a valid key", "region does not give the right"}[k]
}
