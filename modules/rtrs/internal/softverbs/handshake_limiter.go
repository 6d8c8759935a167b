package softverbs

import (
	"net/netip"
	"slices"
)

// HandshakeLimiter bounds the handshakes of peers that have not proved their address yet,
// in all and of each host. A new handshake is always let in: beyond a bound an
// old one of the host with the most gives way, so a host with many handshakes
// harms only itself. The zero value with its bounds set is ready for use. The
// caller provides the locking.
type HandshakeLimiter[H comparable] struct {
	Max, MaxPerHost int
	// Settled reports whether a handshake must not give way; nil: all may.
	Settled func(H) bool

	all []pendingHandshake[H] // oldest first
	of  map[netip.Prefix]int
}

type pendingHandshake[H comparable] struct {
	handshake H
	host      netip.Prefix
}

// HostOf returns the network that counts as one host: an IPv6 host may have a
// whole /64.
func HostOf(a netip.Addr) netip.Prefix {
	bits := 32
	if a = a.Unmap().WithZone(""); a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // fails for no address
	return p
}

// Add adds h of the address a. If a handshake gives way to it, Add removes
// that one and returns it with true.
func (c *HandshakeLimiter[H]) Add(h H, a netip.Addr) (gone H, ok bool) {
	host := HostOf(a)
	if n := c.of[host]; n >= c.MaxPerHost {
		gone, ok = c.oldestVictim(n, host)
	} else if len(c.all) >= c.Max {
		gone, ok = c.oldestOfMost()
	}
	if ok {
		c.Remove(gone)
	}
	if c.of == nil {
		c.of = map[netip.Prefix]int{}
	}
	c.all = append(c.all, pendingHandshake[H]{h, host})
	c.of[host]++
	return gone, ok
}

// Displace removes and returns the handshake that would give way to one of
// another host, unless that is h.
func (c *HandshakeLimiter[H]) Displace(h H) (gone H, ok bool) {
	if gone, ok = c.oldestOfMost(); !ok || gone == h {
		return gone, false
	}
	return gone, c.Remove(gone)
}

// oldestOfMost returns the oldest handshake of the hosts with the most.
func (c *HandshakeLimiter[H]) oldestOfMost() (H, bool) {
	most := 0
	for _, n := range c.of {
		most = max(most, n)
	}
	return c.oldestVictim(most, netip.Prefix{})
}

// oldestVictim returns the oldest handshake that may give way, of a host that has n:
// the given host, or any if it is not valid.
func (c *HandshakeLimiter[H]) oldestVictim(n int, host netip.Prefix) (h H, ok bool) {
	for _, m := range c.all {
		if c.of[m.host] == n && (m.host == host || !host.IsValid()) && (c.Settled == nil || !c.Settled(m.handshake)) {
			return m.handshake, true
		}
	}
	return h, false
}

// Remove takes h out and reports whether it was there.
func (c *HandshakeLimiter[H]) Remove(h H) bool {
	n := len(c.all)
	c.RemoveAll(func(o H) bool { return o == h })
	return len(c.all) < n
}

// RemoveAll removes the handshakes for which drop returns true.
func (c *HandshakeLimiter[H]) RemoveAll(drop func(H) bool) {
	c.all = slices.DeleteFunc(c.all, func(m pendingHandshake[H]) bool {
		if !drop(m.handshake) {
			return false
		}
		if c.of[m.host]--; c.of[m.host] == 0 {
			delete(c.of, m.host)
		}
		return true
	})
}

// All returns the handshakes, oldest first.
func (c *HandshakeLimiter[H]) All() []H {
	list := make([]H, len(c.all))
	for i, m := range c.all {
		list[i] = m.handshake
	}
	return list
}

// Len returns the number of handshakes.
func (c *HandshakeLimiter[H]) Len() int { return len(c.all) }
