package rocev2

import "github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"

// Handshakes of peers are bounded until the peer has proved that it receives at
// its address: a request costs one datagram, and the address in it may be
// forged. A handshake that gives way is not answered: a real peer repeats its
// request.
//
// connManager.handshakes holds those that wait for the consumer and those that were
// accepted, refused or left since.

const (
	defaultHandshakes = 512
	defaultPerAddress = 128
)

func newHandshakeLimiter(cfg *Config) softverbs.HandshakeLimiter[*cmConn] {
	return softverbs.HandshakeLimiter[*cmConn]{Max: cfg.MaxHandshakes, MaxPerHost: cfg.MaxHandshakesPerAddress}
}

// admitHandshake adds the handshake c; another one may give way to it. m.mu is held.
func (m *connManager) admitHandshake(c *cmConn) {
	m.handshakes.RemoveAll(func(c *cmConn) bool { return c.heard.Load() })
	if gone, ok := m.handshakes.Add(c, c.peer); ok {
		m.endDisplaced(gone)
	}
}

// endDisplaced ends a handshake that gave way. m.mu is held.
func (m *connManager) endDisplaced(c *cmConn) {
	switch c.state {
	case connReqReceived:
		c.state = connTimeWait // the consumer's answer comes too late
	case connRepSent:
		c.endByPeer(peerLost)
	}
	c.removeTraces()
	m.displaced.Add(1)
}

// removeHandshake removes a connection from the pending handshakes, because its peer has shown that it
// receives. m.mu is held.
func (m *connManager) removeHandshake(c *cmConn) { m.handshakes.Remove(c) }
