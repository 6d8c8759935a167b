package dev

import (
	"net/netip"
	"sync"
	"time"
)

const (
	routeLife  = time.Second // a change of routing rules is not notified
	routeCount = 4096
)

// routeCache caches next hops.
type routeCache struct {
	lookup func(dst netip.Addr) (netip.Addr, error)

	mu   sync.Mutex
	hops map[netip.Addr]cachedHop
}

type cachedHop struct {
	to    netip.Addr
	err   error
	until time.Time
}

// get returns the next hop to dst.
func (c *routeCache) get(now time.Time, dst netip.Addr) (netip.Addr, error) {
	c.mu.Lock()
	h, ok := c.hops[dst]
	c.mu.Unlock()
	if ok && now.Before(h.until) {
		return h.to, h.err
	}
	h.until = now.Add(routeLife)
	h.to, h.err = c.lookup(dst)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hops == nil || len(c.hops) >= routeCount {
		c.hops = map[netip.Addr]cachedHop{}
	}
	c.hops[dst] = h
	return h.to, h.err
}

// flush empties the cache. It is called when routes may have changed.
func (c *routeCache) flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.hops)
}
