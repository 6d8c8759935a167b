package iwarp

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A peer is unknown until its MPA request has come, and may never send one. So
// the connections of that kind are few, in all and of each address, and a new
// one is always let in: an old one gives way, of the address that has the most.
// An honest peer sends its request at once and is not there for long. What it
// has sent may wait for a processor: such a connection does not give way.

// errGaveWay is the cause when a handshake was closed in favour of another one.
var errGaveWay = errors.New("too many connections without a request")

// handshake is a connection from accept until the consumer takes it.
type handshake struct {
	conn   *net.TCPConn
	source netip.Prefix
}

// giveWay ends the wait for the request. One that was just read goes on.
func (h *handshake) giveWay() { h.conn.SetReadDeadline(time.Unix(1, 0)) }

// sourceOf is the network that counts as one address: an IPv6 host may have a
// whole /64.
func sourceOf(a netip.Addr) netip.Prefix {
	bits := 32
	if a = a.Unmap().WithZone(""); a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits)
	return p
}

// crowd is the handshakes of a listener whose request has not come.
type crowd struct {
	max, perSource int
	silent         func(*handshake) bool // nothing of the peer waits to be read

	mu     sync.Mutex
	all    []*handshake // oldest first
	of     map[netip.Prefix]int
	closed bool
}

func newCrowd(max, perSource int) *crowd {
	silent := func(h *handshake) bool { return !early(h.conn) }
	return &crowd{max: max, perSource: perSource, silent: silent, of: map[netip.Prefix]int{}}
}

// enter adds h and returns the handshake that gives way to it, which is in the
// crowd no more; nil: there is room, or all others are about to be read. A
// closed crowd returns h.
func (c *crowd) enter(h *handshake) (gone *handshake) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return h
	}
	if n := c.of[h.source]; n >= c.perSource {
		gone = c.oldest(n, h.source)
	} else if len(c.all) >= c.max {
		gone = c.oldestOfMost()
	}
	if gone != nil {
		c.remove(gone)
	}
	c.all = append(c.all, h)
	c.of[h.source]++
	return gone
}

// relieve removes and returns a handshake other than h, nil where all are about
// to be read.
func (c *crowd) relieve(h *handshake) (gone *handshake) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if gone = c.oldestOfMost(); gone == h {
		return nil
	}
	c.remove(gone)
	return gone
}

// oldestOfMost finds the oldest silent handshake of the sources with the most.
func (c *crowd) oldestOfMost() *handshake {
	most := 0
	for _, n := range c.of {
		most = max(most, n)
	}
	return c.oldest(most, netip.Prefix{})
}

// oldest finds the oldest silent handshake of a source with n of them: of the
// named one, or of any where none is named.
func (c *crowd) oldest(n int, source netip.Prefix) *handshake {
	for _, h := range c.all {
		if c.of[h.source] == n && (h.source == source || !source.IsValid()) && c.silent(h) {
			return h
		}
	}
	return nil
}

// leave takes h out and reports whether it was there: it may have given way.
func (c *crowd) leave(h *handshake) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.remove(h)
}

func (c *crowd) remove(h *handshake) bool {
	i := slices.Index(c.all, h)
	if i < 0 {
		return false
	}
	c.all = slices.Delete(c.all, i, i+1)
	if c.of[h.source]--; c.of[h.source] == 0 {
		delete(c.of, h.source)
	}
	return true
}

// close closes all connections, also of those that enter later.
func (c *crowd) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, h := range c.all {
		h.conn.Close()
	}
}

// countHandshake counts a connection that came to nothing because of err.
func (d *Device) countHandshake(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch s := &d.past.Handshakes; {
	case errors.Is(err, verbs.ErrClosed), errors.Is(err, net.ErrClosed): // by our side
	case err == errGaveWay:
		s.GaveWay++
	case errors.Is(err, os.ErrDeadlineExceeded):
		s.Late++
	default:
		s.Refused++
	}
}
