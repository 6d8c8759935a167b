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

// crowd are the connections of a listener that negotiate. Beyond maxHandshakes a
// new one waits until another one has ended, or has had its grace. Of those that
// had it, the oldest of the address with the most gives way and is closed.
type crowd struct {
	mu   sync.Mutex
	in   []guest       // oldest first
	room chan struct{} // holds a token when one has left since the last look
}

type guest struct {
	conn  net.Conn
	from  netip.Addr // of IPv6 the first address of the /64; zero: a unix socket
	since time.Time
}

func newCrowd() *crowd { return &crowd{room: make(chan struct{}, 1)} }

// enter returns when the connection is one of the crowd.
func (c *crowd) enter(conn net.Conn) {
	g := guest{conn: conn, from: addressOf(conn)}
	for wait := c.tryEnter(g); wait > 0; wait = c.tryEnter(g) {
		select {
		case <-c.room:
		case <-time.After(wait):
		}
	}
}

// tryEnter returns 0 if g is one of the crowd now, else the time until the next
// try that can succeed.
func (c *crowd) tryEnter(g guest) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	g.since = time.Now()
	if len(c.in) >= maxHandshakes {
		i := c.next()
		if left := handshakeGrace - g.since.Sub(c.in[i].since); left > 0 {
			return left
		}
		c.in[i].conn.Close()
		c.in = slices.Delete(c.in, i, i+1)
	}
	c.in = append(c.in, g)
	return 0
}

// next returns the index of the guest that gives way first.
func (c *crowd) next() int {
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

// leave ends the part of a connection in the crowd. It reports whether the
// connection was one of it: it is not if it had to give way.
func (c *crowd) leave(conn net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(c.in, func(g guest) bool { return g.conn == conn })
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

// size returns the number of the crowd.
func (c *crowd) size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.in)
}

// disperse closes the connections of the crowd and returns their number.
func (c *crowd) disperse() int {
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
