package main

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

func (r *rig) noTunnels() {
	r.t.Helper()
	eventually(r.t, "tunnels end", func() bool { return r.f.tunnels.Load() == 0 })
}

// DISC and a half-closed connection: outstanding requests are answered first, then
// the end of TLS is announced.
func TestTunnel_OutstandingRequestsAreAnsweredBeforeTheEnd(t *testing.T) {
	for _, disc := range []bool{true, false} {
		t.Run(fmt.Sprintf("disc=%v", disc), func(t *testing.T) {
			a := newAuthority(t)
			r, addr := tlsRig(t, rigConfig{}, a.server(true, false))
			r.hosts[0].hold.Store(true)
			c := secured(t, addr, a.client(), false)
			c.conn.Write(command(nbdwire.CmdRead, 0, 1, 0, 1024))
			if disc {
				c.conn.Write(command(nbdwire.CmdDisc, 0, 0, 0, 0))
			} else {
				c.conn.(*tls.Conn).CloseWrite()
			}
			time.Sleep(10 * time.Millisecond)
			r.hosts[0].hold.Store(false)
			c.conn.SetReadDeadline(time.Now().Add(enough))
			if b, err := io.ReadAll(c.conn); err != nil || len(b) != nbdwire.SimpleSize+1024 {
				t.Errorf("%d bytes, error %v", len(b), err)
			}
			c.conn.Close()
			r.noTunnels()
		})
	}
}

// Whatever ends a connection, nothing of it is left.
func TestTunnel_Ends(t *testing.T) {
	a := newAuthority(t)
	for name, end := range map[string]func(c *client){
		"close": func(c *client) { c.conn.Close() },
		"cut":   func(c *client) { c.conn.(*tls.Conn).NetConn().Close() },
		"reset": func(c *client) { tcp := c.conn.(*tls.Conn).NetConn().(*net.TCPConn); tcp.SetLinger(0); tcp.Close() },
		"forged record": func(c *client) {
			c.conn.(*tls.Conn).NetConn().Write(append([]byte{23, 3, 3, 0, 40}, make([]byte, 40)...))
		},
		"plain bytes":    func(c *client) { c.conn.(*tls.Conn).NetConn().Write(command(nbdwire.CmdRead, 0, 1, 0, 512)) },
		"garbage in TLS": func(c *client) { c.conn.Write(bytes.Repeat([]byte("garbage!"), 1000)) },
		"half a command": func(c *client) {
			c.conn.Write(command(nbdwire.CmdWrite, 0, 1, 0, 4096)[:20])
			c.conn.Close()
		},
		"half a payload": func(c *client) {
			c.conn.Write(append(command(nbdwire.CmdWrite, 0, 1, 0, 1<<20), make([]byte, 300000)...))
			c.conn.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, addr := tlsRig(t, rigConfig{slots: 8}, a.server(true, false))
			c := secured(t, addr, a.client(), true)
			end(c)
			eventually(t, "no opener", func() bool { return r.f.Openers(0) == 0 })
			r.noTunnels()
			if !r.free(0) {
				t.Error("slots are lost")
			}
		})
	}
}

// A client that reads nothing is ended by the removal of the device, at the latest
// after the time for its last replies.
func TestTunnel_RemovalEndsAClientThatDoesNotRead(t *testing.T) {
	a := newAuthority(t)
	r, addr := tlsRig(t, rigConfig{slots: 32}, a.server(true, false))
	slow := secured(t, addr, a.client(), true)
	go func() {
		for i := range 200 {
			if _, err := slow.conn.Write(command(nbdwire.CmdRead, 0, uint64(i), 0, 1<<20)); err != nil {
				return
			}
		}
	}()
	blocked := func() (is bool) {
		r.onQueue(0, func(q *queue) { is = len(q.conns) == 1 && q.conns[0].sendBlocked() })
		return is
	}
	eventually(t, "buffers are full", blocked)
	if err := r.f.RemoveDevice(t.Context(), 0, true); err != nil {
		t.Fatal(err)
	}
	r.noTunnels()
	r.addDisk(0, "disk0")
}

func TestTunnel_SlowReaderDoesNotStallOthers(t *testing.T) {
	a := newAuthority(t)
	_, addr := tlsRig(t, rigConfig{slots: 32}, a.server(true, false))
	slow := secured(t, addr, a.client(), true)
	go func() {
		for i := range 200 {
			if _, err := slow.conn.Write(command(nbdwire.CmdRead, 0, uint64(i), 0, 1<<20)); err != nil {
				return
			}
		}
	}()
	c := running(secured(t, addr, a.client(), false))
	for i := range 50 {
		want := pattern(200000, uint64(i))
		got := make([]byte, len(want))
		if c.write(4096, want) != 0 || c.read(4096, got) != 0 || !bytes.Equal(got, want) {
			t.Fatal("the other connection fails")
		}
	}
}

// Several such clients can hold every slot. They are closed as those without TLS
// are, and their tunnels end.
func TestTunnel_ClientsThatHoldEverySlotAreClosed(t *testing.T) {
	a := newAuthority(t)
	r, addr := tlsRig(t, rigConfig{slots: 8}, a.server(true, false))
	const n = 12
	for range n {
		c := secured(t, addr, a.client(), true)
		go func() {
			for i := range 64 {
				if _, err := c.conn.Write(command(nbdwire.CmdRead, 0, uint64(i), 0, 1<<20)); err != nil {
					return
				}
			}
		}()
	}
	// Buffers take the first replies. When they are full, the rest holds slots.
	good := running(secured(t, addr, a.client(), true))
	eventually(t, "somebody is closed", func() bool {
		if code := good.read(0, make([]byte, 100000)); code != 0 {
			t.Fatal(code)
		}
		return r.f.Openers(0) <= n
	})
	eventually(t, "tunnels of closed connections end", func() bool { return int(r.f.tunnels.Load()) == r.f.Openers(0) })
}

func TestTunnel_NumberIsBounded(t *testing.T) {
	a := newAuthority(t)
	r, addr := tlsRig(t, rigConfig{}, a.server(true, false))
	r.f.tunnels.Store(maxTunnels - 1)
	last := running(secured(t, addr, a.client(), true))
	conn := greeted(t, "tcp", addr)
	s, err := upgrade(conn, a.client())
	must(t, "upgrade", err)
	c := &client{t: t, conn: s, pending: map[uint64]*call{}}
	c.choose("disk0", false)
	if n, err := s.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("beyond the bound: %d bytes, %v", n, err)
	}
	if code := last.read(0, make([]byte, 512)); code != 0 || r.f.Openers(0) != 1 || r.f.tunnels.Load() != maxTunnels {
		t.Errorf("error %d, %d openers, %d tunnels", code, r.f.Openers(0), r.f.tunnels.Load())
	}
	last.conn.Close()
	eventually(t, "a place is free", func() bool { return r.f.tunnels.Load() == maxTunnels-1 })
}

// fakeConn is a connection from an address.
type fakeConn struct {
	net.Conn
	from   net.Addr
	closed chan struct{}
}

func (c *fakeConn) RemoteAddr() net.Addr { return c.from }
func (c *fakeConn) Close() error         { close(c.closed); return nil }

func guestFrom(ip string) *fakeConn {
	c := &fakeConn{from: &net.UnixAddr{}, closed: make(chan struct{})}
	if ip != "" {
		c.from = &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}
	}
	return c
}

// The oldest of the address with the most gives way, and a network of IPv6 is one
// address.
func TestCrowd(t *testing.T) {
	for _, v := range []struct{ many, few string }{{"10.0.0.1", "10.0.0.2"}, {"fd00::1", "fd00:0:0:1::1"}, {"10.0.0.1", ""}, {"", "10.0.0.1"}} {
		c := newHandshakeLimiter()
		first, few := guestFrom(v.many), guestFrom(v.few)
		c.acquire(few)
		c.acquire(first)
		for range maxHandshakes - 2 {
			c.acquire(guestFrom(v.many))
		}
		began := time.Now()
		c.acquire(guestFrom(v.few))
		if took := time.Since(began); took < handshakeGrace/2 {
			t.Errorf("the oldest had %v", took)
		}
		<-first.closed
		if c.release(first) || !c.release(few) || len(c.in) != maxHandshakes-1 {
			t.Errorf("%d are there", len(c.in))
		}
	}
	c := newHandshakeLimiter()
	for range maxHandshakes {
		c.acquire(guestFrom("fd00::1"))
	}
	if c.in[c.victim()].from != c.in[0].from || len(c.in) != maxHandshakes {
		t.Error("nobody gives way")
	}
}

// A connection that ends makes room at once.
func TestCrowd_Room(t *testing.T) {
	c := newHandshakeLimiter()
	var all []*fakeConn
	for range maxHandshakes {
		g := guestFrom("10.0.0.1")
		all = append(all, g)
		c.acquire(g)
	}
	entered := make(chan struct{})
	last := guestFrom("10.0.0.2")
	go func() {
		c.acquire(last)
		close(entered)
	}()
	c.release(all[5])
	<-entered
	if !c.release(last) {
		t.Error("it is not there")
	}
}
