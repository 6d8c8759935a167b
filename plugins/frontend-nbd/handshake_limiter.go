package main

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	maxHandshakes = 64 // negotiations of a listener at a time
	// handshakeGrace is the least time that a negotiation has before it gives way.
	handshakeGrace = 200 * time.Millisecond
)

// handshakeLimiter bounds the connections of a listener that negotiate. Beyond
// maxHandshakes a new connection waits until a handshake ends or its grace is over.
// Then the oldest handshake of the address with the most handshakes is closed.
type handshakeLimiter struct {
	mu   sync.Mutex
	in   []pendingHandshake // pending handshakes, oldest first
	room chan struct{}      // holds a token if a handshake has ended since the last tryAcquire
}

type pendingHandshake struct {
	conn  net.Conn
	from  netip.Addr // client address; for IPv6 the first address of the /64; zero for a unix socket
	since time.Time
}

func newHandshakeLimiter() *handshakeLimiter { return &handshakeLimiter{room: make(chan struct{}, 1)} }

// acquire waits until conn is listed as a pending handshake.
func (c *handshakeLimiter) acquire(conn net.Conn) {
	g := pendingHandshake{conn: conn, from: addressOf(conn)}
	for wait := c.tryAcquire(g); wait > 0; wait = c.tryAcquire(g) {
		select {
		case <-c.room:
		case <-time.After(wait):
		}
	}
}

// tryAcquire lists g and returns 0, or returns the time until the next try that
// can succeed.
func (c *handshakeLimiter) tryAcquire(g pendingHandshake) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	g.since = time.Now()
	if len(c.in) >= maxHandshakes {
		i := c.victim()
		if left := handshakeGrace - g.since.Sub(c.in[i].since); left > 0 {
			return left
		}
		c.in[i].conn.Close()
		c.in = slices.Delete(c.in, i, i+1)
	}
	c.in = append(c.in, g)
	return 0
}

// victim returns the index of the handshake that is closed first.
func (c *handshakeLimiter) victim() int {
	count := map[netip.Addr]int{}
	for _, g := range c.in {
		count[g.from]++
	}
	best := 0
	for i, g := range c.in {
		if count[g.from] > count[c.in[best].from] {
			best = i
		}
	}
	return best
}

// release removes conn from the pending handshakes. It reports whether conn was
// listed: a handshake that was closed for a newer one is not.
func (c *handshakeLimiter) release(conn net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(c.in, func(g pendingHandshake) bool { return g.conn == conn })
	if i < 0 {
		return false
	}
	c.in = slices.Delete(c.in, i, i+1)
	select {
	case c.room <- struct{}{}:
	default:
	}
	return true
}

// pendingCount returns the number of pending handshakes.
func (c *handshakeLimiter) pendingCount() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.in)
}

// closeAll closes all pending handshakes and returns their number.
func (c *handshakeLimiter) closeAll() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range c.in {
		g.conn.Close()
	}
	return len(c.in)
}

func addressOf(conn net.Conn) netip.Addr {
	tcp, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	a := tcp.AddrPort().Addr().Unmap().WithZone("")
	if p, err := a.Prefix(64); err == nil && a.Is6() {
		return p.Addr()
	}
	return a
}
