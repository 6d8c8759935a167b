package iwarp

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A peer is unknown until its MPA request has come, and may never send one. So
// the number of handshakes without a request is bounded. A handshake with a
// request does not give way, even if the request was not read yet.

// errGaveWay is the cause if a handshake was closed in favour of another one.
var errGaveWay = errors.New("too many connections without a request")

// pendingHandshake is a connection from accept until the consumer takes it.
type pendingHandshake struct {
	conn     *net.TCPConn
	deadline time.Time
	out      chan struct{} // closed when it gives way
	once     sync.Once
}

func newHandshake(conn *net.TCPConn, limit time.Duration) *pendingHandshake {
	h := &pendingHandshake{conn: conn, deadline: time.Now().Add(limit), out: make(chan struct{})}
	conn.SetDeadline(h.deadline)
	return h
}

// giveWay ends the wait for the request, and for a turn of the handshake of TLS. If
// the request was just read, the handshake goes on.
func (h *pendingHandshake) giveWay() {
	h.conn.SetReadDeadline(time.Unix(1, 0))
	h.once.Do(func() { close(h.out) })
}

// handshakeLimiter holds the handshakes of a listener without a request.
type handshakeLimiter struct {
	mu sync.Mutex
	softverbs.HandshakeLimiter[*pendingHandshake]
	closed bool
}

func newHandshakeLimiter(max, perHost int) *handshakeLimiter {
	c := &handshakeLimiter{}
	c.Max, c.MaxPerHost = max, perHost
	c.Settled = func(h *pendingHandshake) bool { return bytesWaiting(h.conn) }
	return c
}

// addHandshake adds h. If another handshake gives way to it, that one is closed. A
// closed limiter closes h.
func (c *handshakeLimiter) addHandshake(h *pendingHandshake) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		h.giveWay()
	} else if gone, ok := c.Add(h, addrPort(h.conn.RemoteAddr()).Addr()); ok {
		gone.giveWay()
	}
}

// closeVictim closes a handshake other than h, unless all have sent something.
func (c *handshakeLimiter) closeVictim(h *pendingHandshake) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if gone, ok := c.Displace(h); ok {
		gone.giveWay()
	}
}

// removeHandshake removes h and reports whether it was there: it may have given way.
func (c *handshakeLimiter) removeHandshake(h *pendingHandshake) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.Remove(h)
}

// close closes all connections, and those that enter later.
func (c *handshakeLimiter) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, h := range c.All() {
		h.giveWay()
		h.conn.Close()
	}
}

// countHandshake counts a handshake that ended because of err.
func (d *Device) countHandshake(err error) {
	d.stats.Add(func(s *Stats) {
		switch h := &s.Handshakes; {
		case errors.Is(err, verbs.ErrClosed), errors.Is(err, net.ErrClosed): // closed by this side
		case err == errGaveWay:
			h.GaveWay++
		case errors.Is(err, os.ErrDeadlineExceeded):
			h.Late++
		default:
			h.Refused++
		}
	})
}
