// Package resolve tells users of an address the slave and the bond that carry
// it, and reports changes, as RDMA-CM does by address resolution and the event
// ADDR_CHANGE. A transport that dials an address makes its connection on the
// slave that Resolve names, subscribes, and connects again after a report,
// instead of waiting for its own timeouts.
package resolve

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"
)

// Bond is a Resolver's view of a bond.
type Bond interface {
	Name() string
	// Active names the active slave and its link-layer address; name is "" if
	// there is none.
	Active() (name string, address []byte)
	// Prefixes are the bond's own addresses with the lengths of their networks.
	Prefixes() []netip.Prefix
}

// Route is how an address is reached, for the moment.
type Route struct {
	Bond    string
	Slave   string
	Address []byte     // link-layer address of the slave
	Source  netip.Addr // the bond's address in the network
}

// AddrChange says that addresses of a bond moved to another slave. New is ""
// if no slave is active any more, Old if none was.
type AddrChange struct {
	Bond, Old, New string
}

// Resolver answers for a set of bonds. All methods may be called at any time.
type Resolver struct {
	mu    sync.Mutex
	bonds []Bond
	subs  map[*addrSubscription]struct{}
}

type addrSubscription struct {
	addr netip.Addr
	fn   func(AddrChange)

	mu      sync.Mutex
	queue   []AddrChange
	running bool
	ended   bool
}

// Add lets r answer for b.
func (r *Resolver) Add(b Bond) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bonds = append(r.bonds, b)
}

// Remove takes back Add.
func (r *Resolver) Remove(b Bond) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bonds = slices.DeleteFunc(r.bonds, func(x Bond) bool { return x == b })
}

// Resolve returns the route to addr, an address of a bond or in the network
// of one; the longest prefix wins. ENETUNREACH says that no bond has such a
// network, ENETDOWN that the bond has no active slave now.
func (r *Resolver) Resolve(addr netip.Addr) (Route, error) {
	b, p := r.findBond(addr)
	if b == nil {
		return Route{}, fmt.Errorf("resolve %s: no bond has an address in its network: %w", addr, syscall.ENETUNREACH)
	}
	name, hw := b.Active()
	if name == "" {
		return Route{}, fmt.Errorf("resolve %s: %s has no active slave: %w", addr, b.Name(), syscall.ENETDOWN)
	}
	return Route{Bond: b.Name(), Slave: name, Address: hw, Source: p.Addr()}, nil
}

func (r *Resolver) findBond(addr netip.Addr) (best Bond, prefix netip.Prefix) {
	r.mu.Lock()
	bonds := slices.Clone(r.bonds)
	r.mu.Unlock()
	for _, b := range bonds {
		for _, p := range b.Prefixes() {
			if p.Masked().Contains(addr) && (best == nil || p.Bits() > prefix.Bits()) {
				best, prefix = b, p
			}
		}
	}
	return best, prefix
}

// Subscribe calls fn for each change of the slave that carries addr, one call
// at a time and in order, on a goroutine of its own, until cancel is called. fn may call the
// resolver and the bond. A call that has begun when cancel is called goes on.
func (r *Resolver) Subscribe(addr netip.Addr, fn func(AddrChange)) (cancel func()) {
	s := &addrSubscription{addr: addr, fn: fn}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.subs == nil {
		r.subs = map[*addrSubscription]struct{}{}
	}
	r.subs[s] = struct{}{}
	return func() {
		r.mu.Lock()
		delete(r.subs, s)
		r.mu.Unlock()
		s.mu.Lock()
		s.ended, s.queue = true, nil
		s.mu.Unlock()
	}
}

// Changed informs the subscribers of addresses that b carries. The owner of b
// calls it, after the switch is done, without locks that b's methods take.
func (r *Resolver) Changed(b Bond, old, new string) {
	prefixes := b.Prefixes()
	r.mu.Lock()
	defer r.mu.Unlock()
	for s := range r.subs {
		if slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Masked().Contains(s.addr) }) {
			s.pushChange(AddrChange{Bond: b.Name(), Old: old, New: new})
		}
	}
}

func (s *addrSubscription) pushChange(c AddrChange) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = append(s.queue, c)
	if !s.running && !s.ended {
		s.running = true
		go s.run()
	}
}

func (s *addrSubscription) run() {
	for {
		s.mu.Lock()
		if len(s.queue) == 0 || s.ended {
			s.running = false
			s.mu.Unlock()
			return
		}
		c := s.queue[0]
		s.queue = s.queue[1:]
		s.mu.Unlock()
		s.fn(c)
	}
}
