package metrics

import (
	"net"
	"net/http"
	"testing"
)

// crowdConn notes that it is closed.
type crowdConn struct {
	net.Conn
	closed bool
}

func (c *crowdConn) Close() error {
	c.closed = true
	return nil
}

// Of a full page the connection that has been idle longest gives way. Those that
// are being answered stay.
func TestTheLongestIdleConnectionGivesWay(t *testing.T) {
	c := &crowd{busy: map[net.Conn]bool{}}
	all := make([]*crowdConn, maxConns)
	for i := range all {
		all[i] = &crowdConn{}
		c.state(all[i], http.StateNew)
	}
	c.state(all[0], http.StateActive)
	c.state(all[1], http.StateActive)
	c.state(all[1], http.StateIdle)
	open := func(n int) *crowdConn {
		t.Helper()
		next := &crowdConn{}
		c.state(next, http.StateNew)
		closed := 0
		for _, conn := range append(all, next) {
			if conn.closed {
				closed++
			}
		}
		if closed != n {
			t.Errorf("%d connections are closed, want %d", closed, n)
		}
		return next
	}
	if open(1); !all[2].closed {
		t.Error("the one that was idle longest stays")
	}
	c.state(all[2], http.StateClosed)
	c.state(all[3], http.StateClosed) // by its client
	open(1)
	if open(2); !all[4].closed || all[0].closed || all[1].closed {
		t.Error("one that was answered since gives way")
	}
	for len(c.idle) > 0 {
		c.state(c.idle[0], http.StateActive)
	}
	if next := open(3); !next.closed {
		t.Error("a new one stays while all others are answered")
	}
}
