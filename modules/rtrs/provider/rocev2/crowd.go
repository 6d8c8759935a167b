package rocev2

import (
	"net/netip"
	"slices"
)

// Handshakes that others began are bounded until the peer has shown that it
// receives what is sent to its address: a request costs one datagram, and the
// address in it may be forged. When there are too many, the oldest of the
// address with the most gives way to the new one, without a word: a peer that
// is there asks again.
//
// manager.crowd holds them, oldest first: those that wait for the consumer, were
// accepted, refused or left since.

const (
	defaultHandshakes = 512
	defaultPerAddress = 128
)

// host stands for the addresses of one host: with IPv6 it has a whole /64.
func host(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	p, _ := a.Prefix(64) // fails for no address of IPv6
	return p.Addr()
}

// admit makes room for a request of peer. m.mu is held.
func (m *manager) admit(peer netip.Addr) {
	m.crowd = slices.DeleteFunc(m.crowd, func(c *conn) bool { return c.heard.Load() })
	if n := m.crowdOf(host(peer)); n >= m.dev.cfg.MaxHandshakesPerAddress {
		m.displace(host(peer))
	}
	if len(m.crowd) >= m.dev.cfg.MaxHandshakes {
		m.displace(m.mostCrowded())
	}
}

// crowdOf counts the handshakes of a host.
func (m *manager) crowdOf(h netip.Addr) (n int) {
	for _, c := range m.crowd {
		if host(c.peer) == h {
			n++
		}
	}
	return n
}

// mostCrowded returns the host with the most handshakes; of equal ones the one
// whose oldest is older.
func (m *manager) mostCrowded() (most netip.Addr) {
	counts := map[netip.Addr]int{}
	for _, c := range m.crowd {
		counts[host(c.peer)]++
	}
	for _, c := range m.crowd {
		if h := host(c.peer); counts[h] > counts[most] {
			most = h
		}
	}
	return most
}

// displace forgets the oldest handshake of a host.
func (m *manager) displace(h netip.Addr) {
	i := slices.IndexFunc(m.crowd, func(c *conn) bool { return host(c.peer) == h })
	c := m.crowd[i]
	switch c.state {
	case connReqReceived:
		c.state = connTimeWait // the consumer's answer comes too late
	case connRepSent:
		c.lose(peerLost)
	}
	c.forget()
	m.displaced.Add(1)
}

// known takes a connection out of the crowd: its peer has shown that it receives.
func (m *manager) known(c *conn) {
	if i := slices.Index(m.crowd, c); i >= 0 {
		m.crowd = slices.Delete(m.crowd, i, i+1)
	}
}
