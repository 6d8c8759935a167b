package rtrs

import (
	"errors"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

func beats(interval time.Duration) func(*ClientConfig) {
	return func(cfg *ClientConfig) { cfg.Timing.Heartbeat, cfg.Timing.HeartbeatMisses = interval, 5 }
}

// One connection of a path is lost in the network while the others live: the
// path is given up, and its requests go elsewhere.
func TestSilentConnectionEndsItsPath(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	dev := net.Device("client")
	c := cltOpen(t, []PathAddr{pathTo(dev, clientAddr, serverAddr.String()), pathTo(dev, otherAddr, serverAddr.String())}, beats(200*time.Millisecond))
	qp := c.links[0].conns[2].qp
	if !net.StallConn(qp.LocalAddr(), qp.RemoteAddr(), true) {
		t.Fatal("no such connection")
	}
	for tag := range uint64(4) {
		if err := c.write(1, tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 {
		if d := c.next(); d.errno != 0 {
			t.Errorf("tag %d: errno %d", d.tag, d.errno)
		}
	}
	if e := c.awaitState(1, PathReconnecting); !errors.Is(e.Err, ErrHeartbeat) {
		t.Errorf("cause %v", e.Err)
	}
}

// A connection that waits for a slow disk, or for nothing, is none.
func TestSlowDiskIsNoSilentConnection(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net)
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), clientAddr, serverAddr.String())}, beats(200*time.Millisecond))
	if err := c.write(1, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	op := park.take()
	time.Sleep(1800 * time.Millisecond) // 9 intervals; 7 of silence are the limit
	park.respond(op, 0)
	c.finished(1, 0)
	if p := c.Paths()[0]; p.State != PathConnected || p.Stats.Reconnects != 0 {
		t.Errorf("the path is %v after %d reconnects", p.State, p.Stats.Reconnects)
	}
}

// A server that does not announce it gets heartbeats on connection 0 alone.
func TestKernelServerGetsNoHeartbeatsOnIOConnections(t *testing.T) {
	held := make(heldRequests, 8)
	c, s, net := openScripted(t, func(s *scriptedServer) { held.hold(false)(s) })
	if err := c.SetTiming(func() Timing {
		t := quickTiming()
		t.Heartbeat, t.HeartbeatMisses = 5*time.Millisecond, 10000
		return t
	}()); err != nil {
		t.Fatal(err)
	}
	tap := tapNet(net, func(e loopback.Event) bool { return clientWork(e) && len(e.Data) == 0 })
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	r := held.next(t)
	time.Sleep(50 * time.Millisecond)
	r.answer(0)
	c.finished(1, 0)
	io := s.last(1).qp.RemoteAddr()
	for _, e := range tap.all() {
		if e.From == io {
			t.Errorf("%+v", e)
		}
	}
}
