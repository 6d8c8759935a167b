package metrics

import (
	"crypto/tls"
	"net"
	"net/http"
	"slices"
	"sync"
)

// maxConns bounds the connections to a page.
const maxConns = 64

// crowd keeps the connections to a page below their bound. A new one is let in,
// and the one that has asked for nothing for the longest time is closed. While
// all of the others are being answered, the new one is closed.
type crowd struct {
	mu   sync.Mutex
	idle []net.Conn // longest idle first; those in a handshake are idle, too
	busy map[net.Conn]bool
}

// state is the ConnState of a server.
func (c *crowd) state(conn net.Conn, s http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.idle, conn); i >= 0 {
		c.idle = slices.Delete(c.idle, i, i+1)
	}
	delete(c.busy, conn)
	switch s {
	case http.StateNew, http.StateIdle:
		c.idle = append(c.idle, conn)
	case http.StateActive:
		c.busy[conn] = true
	}
	if len(c.idle) > 0 && len(c.idle)+len(c.busy) > maxConns {
		hangUp(c.idle[0])
		c.idle = slices.Delete(c.idle, 0, 1)
	}
}

// hangUp closes the socket of a connection. It does not wait, as the alert at
// the end of TLS would.
func hangUp(conn net.Conn) {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	conn.Close()
}
