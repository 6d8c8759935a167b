package rocev2

import "github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"

// Handshakes of peers are bounded until the peer has proved that it receives at
// its address: a request costs one datagram, and the address in it may be
// forged. A handshake that gives way is not answered: a real peer repeats its
// request.
//
// manager.crowd holds those that wait for the consumer and those that were
// accepted, refused or left since.

const (
	defaultHandshakes = 512
	defaultPerAddress = 128
)

func newCrowd(cfg *Config) softverbs.Crowd[*conn] {
	return softverbs.Crowd[*conn]{Max: cfg.MaxHandshakes, MaxPerHost: cfg.MaxHandshakesPerAddress}
}

// admit adds the handshake c; another one may give way to it. m.mu is held.
func (m *manager) admit(c *conn) {
	m.crowd.RemoveAll(func(c *conn) bool { return c.heard.Load() })
	if gone, ok := m.crowd.Add(c, c.peer); ok {
		m.displace(gone)
	}
}

// displace ends a handshake that gave way. m.mu is held.
func (m *manager) displace(c *conn) {
	switch c.state {
	case connReqReceived:
		c.state = connTimeWait // the consumer's answer comes too late
	case connRepSent:
		c.lose(peerLost)
	}
	c.remove()
	m.displaced.Add(1)
}

// known removes a connection from the crowd, because its peer has shown that it
// receives. m.mu is held.
func (m *manager) known(c *conn) { m.crowd.Remove(c) }
