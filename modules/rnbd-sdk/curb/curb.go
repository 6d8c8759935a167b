// Package curb bounds the records that strangers can cause, so that they fill no disk
// and crowd out no other record.
//
// Of one address, and of all together, a few items pass in a window of time; the
// others are counted, and their number follows at its end.
package curb

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// Window begins with an item, and ends by itself.
	Window = 10 * time.Second
	// PerAddr items of one address pass in a window, PerWindow of all addresses. An
	// address of IPv6 stands for its /64.
	PerAddr, PerWindow = 10, 50
	// maxAddrs have a count of their own; the others share one.
	maxAddrs = 64
)

// Curb passes on some of the items that it is given. Its methods may be called by any
// goroutine.
type Curb[T any] struct {
	pass func(from netip.Addr, item T, leftOut uint64)

	mu     sync.Mutex
	counts map[netip.Addr]*count[T]
	passed int
	timer  *time.Timer // ends the window; nil: none is open
}

// count is of one address, or of those that have none of their own.
type count[T any] struct {
	passed  int
	leftOut uint64
	last    T // that was left out
}

// New returns a Curb that calls pass with each item that passes, leftOut being 0, and
// at the end of a window with the last one that was left out and their number. from is
// the zero Addr if they are of several addresses. pass may be called by any goroutine.
func New[T any](pass func(from netip.Addr, item T, leftOut uint64)) *Curb[T] {
	return &Curb[T]{pass: pass, counts: map[netip.Addr]*count[T]{}}
}

// Add passes on item, which from has caused, or counts it. The zero Addr is an address
// like another.
func (c *Curb[T]) Add(from netip.Addr, item T) {
	if c.allow(host(from), item) {
		c.pass(from, item, 0)
	}
}

// allow reports whether the item passes.
func (c *Curb[T]) allow(from netip.Addr, item T) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer == nil {
		c.timer = time.AfterFunc(Window, c.Flush)
	}
	n := c.counts[from]
	if n == nil {
		if len(c.counts) >= maxAddrs {
			from = netip.Addr{}
			n = c.counts[from]
		}
		if n == nil {
			n = &count[T]{}
			c.counts[from] = n
		}
	}
	if n.passed < PerAddr && c.passed < PerWindow {
		n.passed++
		c.passed++
		return true
	}
	n.leftOut++
	n.last = item
	return false
}

// Flush ends the window that is open, if one is.
func (c *Curb[T]) Flush() {
	c.mu.Lock()
	counts := c.counts
	c.counts, c.passed = map[netip.Addr]*count[T]{}, 0
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	c.mu.Unlock()
	for from, n := range counts {
		if n.leftOut > 0 {
			c.pass(from, n.last, n.leftOut)
		}
	}
}

// host returns the address that from counts as.
func host(from netip.Addr) netip.Addr {
	from = from.Unmap().WithZone("")
	if p, err := from.Prefix(64); err == nil && from.Is6() {
		return p.Addr()
	}
	return from
}

// Text returns s without characters that are not printable ASCII, and cut at 256
// bytes: a peer may have chosen parts of it.
func Text(s string) string {
	const most = 256
	out := make([]byte, 0, min(len(s), most))
	for _, r := range s {
		if len(out) == most {
			return string(append(out, "..."...))
		}
		if r < ' ' || r > '~' {
			r = '?'
		}
		out = append(out, byte(r))
	}
	return string(out)
}
