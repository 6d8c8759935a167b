package rtrs

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// ofLife is a server of this project with a session of the given incarnation.
func ofLife(n byte, edit func(*scriptedServer)) func(*scriptedServer) {
	return func(s *scriptedServer) {
		if edit != nil {
			edit(s)
		}
		s.incarnation = n
	}
}

// slowToNotice: a path that nobody asks is not found dead within a test.
func slowToNotice(cfg *ClientConfig) {
	cfg.Timing.Heartbeat, cfg.Timing.HeartbeatMisses = 300*time.Millisecond, 1000
}

func connectedPaths(c *cltClient) (n int) {
	for _, p := range c.Paths() {
		if p.State == PathConnected {
			n++
		}
	}
	return n
}

// One path comes back to a server that has started anew before the other one is
// known to be dead: the consumer hears of it all the same.
func TestServerStartedAnew_TheSessionGoesDownFirst(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, ofLife(1, held.hold(true)), slowToNotice)
	c.awaitKind(SessionUp)
	for tag := range uint64(2) { // one on each path
		if err := c.write(0, tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if r := held.next(t); r.conn.srv == a {
			r.answer(0)
			c.finished(0, 0)
		}
	}
	net.Stall(cltB, b.addr.Addr())
	refuse(net, b)
	a.close()
	startScripted(t, net, srvA, ofLife(2, held.hold(true)))
	c.awaitKind(SessionDown)
	net.Cut(cltB, b.addr.Addr()) // in this network the end of a connection is stalled, too
	if d := c.next(); d.errno != Lost {
		t.Errorf("errno %d, want Lost", d.errno)
	}
	c.awaitKind(SessionUp)
	held.none(t) // neither a request of the old life nor a FENCE
	if err := c.write(0, 7, 0, 8, "new"); err != nil {
		t.Fatal(err)
	}
	held.next(t).answer(0)
	c.finished(7, 0)
}

func TestPathToAnotherServerStaysOut(t *testing.T) {
	c, a, _, net := cltTwoPaths(t, ofLife(1, nil), slowToNotice)
	c.awaitKind(SessionUp)
	a.close()
	other := startScripted(t, net, srvA, ofLife(2, nil))
	eventually(t, "three attempts", func() bool { return len(other.requests(0)) >= 3 })
	for tag := range uint64(8) {
		if err := c.write(0, tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
		c.finished(tag, 0)
	}
	if n := connectedPaths(c); n != 1 {
		t.Errorf("%d paths are connected, want the one to the first server", n)
	}
	for len(c.events) > 0 {
		if e := <-c.events; e.Kind == SessionDown {
			t.Error("the session went down")
		}
	}
}

// requests are those of connection cid that were accepted.
func (s *scriptedServer) requests(cid uint16) (all []rtrswire.ConnReqFields) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		if c.req.CID == cid {
			all = append(all, c.req)
		}
	}
	return all
}

// lateDevice is a device with connections that end when gate is closed.
type lateDevice struct {
	verbs.Device
	gate chan struct{}
}

type lateQP struct {
	verbs.QP
	dev *lateDevice
}

func (q lateQP) Disconnect() {
	<-q.dev.gate
	q.QP.Disconnect()
}

func (d *lateDevice) CreateQP(pd verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	qp, err := d.Device.CreateQP(pd, cfg)
	return lateQP{qp, d}, err
}

func (d *lateDevice) Connect(ctx context.Context, qp verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	return d.Device.Connect(ctx, qp.(lateQP).QP, p)
}

// The last path is lost, and another one connected before the lost one's
// connections have ended. The consumer was told that the session is down: a
// request must not be sent again as if nothing had happened.
func TestRequestsEndWithTheSessionTheyWereSentIn(t *testing.T) {
	for _, fences := range []bool{true, false} {
		t.Run(map[bool]string{true: "server with FENCE", false: "server without"}[fences], func(t *testing.T) {
			net := loopback.New()
			held := make(heldRequests, 64)
			a := startScripted(t, net, srvA, held.hold(fences))
			startScripted(t, net, srvB, held.hold(fences))
			late := &lateDevice{net.Device("late"), make(chan struct{})}
			c := cltOpen(t, []PathAddr{pathTo(late, cltA, srvA)}, nil)
			c.awaitKind(SessionUp)
			if err := c.write(0, 1, 0, 8, "old"); err != nil {
				t.Fatal(err)
			}
			held.next(t)
			refuse(net, a)
			net.Cut(cltA, a.addr.Addr())
			c.awaitKind(SessionDown)
			if _, err := c.AddPath(cltContext(t), pathTo(net.Device("two"), cltB, srvB)); err != nil {
				t.Fatal(err)
			}
			close(late.gate)
			c.finished(1, Lost)
			if fences {
				fence := held.next(t)
				fence.fenced(t)
				fence.answer(0)
			}
			c.awaitKind(SessionUp)
			held.none(t)
		})
	}
}

// A server of ours that comes back with another queue depth has made the session anew,
// and all paths take the new depth.
func TestServerStartedAnew_WithAnotherQueueDepth(t *testing.T) {
	for _, depth := range []int{2, 32} {
		t.Run(fmt.Sprint(depth), func(t *testing.T) {
			held := make(heldRequests, 64)
			c, a, b, net := cltTwoPaths(t, ofLife(1, held.hold(true)), nil)
			c.awaitKind(SessionUp)
			if err := c.write(0, 1, 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			held.next(t)
			a.close()
			b.close()
			c.finished(1, Lost)
			c.awaitKind(SessionDown)
			again := func(s *scriptedServer) { s.depth, s.regions = depth, depth }
			startScripted(t, net, srvA, ofLife(2, again))
			startScripted(t, net, srvB, ofLife(2, again))
			c.awaitKind(SessionUp)
			if c.QueueDepth() != depth {
				t.Errorf("queue depth %d, want %d", c.QueueDepth(), depth)
			}
			eventually(t, "both paths are connected", func() bool { return connectedPaths(c) == 2 })
			for tag := range uint64(2) {
				if err := c.write(0, 10+tag, 0, 8, "u"); err != nil {
					t.Fatal(err)
				}
				c.finished(10+tag, 0)
			}
		})
	}
}
