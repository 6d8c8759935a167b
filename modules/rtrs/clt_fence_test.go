package rtrs

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

const busy = int(syscall.EBUSY)

// Running operations of the lost path hold up neither its other lost requests
// nor the path. It comes back under another name.
func TestFence_EBUSY_LostRequestsAndPathGoOn(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, held.hold(true), nil)
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	lost := held.next(t)
	net.Cut(cltA, a.addr.Addr())
	fence := held.next(t)
	old := fence.fenced(t)
	fence.answer(busy)
	again := held.next(t)
	if again.conn.srv != b || again.buf != lost.buf || again.Type != lost.Type {
		t.Fatalf("a request of type %d for buffer %d comes instead of the lost one", again.Type, again.buf)
	}
	again.answer(0)
	c.finished(1, 0)
	c.awaitState(1, PathReconnecting)
	c.awaitState(1, PathConnected)
	if now := a.last(0).req.SessUUID; now == old {
		t.Error("the path came back under its old name")
	}
	repeated := held.next(t)
	if repeated.fenced(t) != old {
		t.Error("the FENCE that is repeated names another path")
	}
	repeated.answer(0)
	eventually(t, "the lost link is forgotten", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.lost) == 0 })
}

// After a total loss EBUSY would take every permit out of use that was in
// flight: the session is made anew, under another name.
func TestFence_EBUSY_AfterATotalLossTheSessionIsMadeAnew(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, held.hold(true), nil)
	c.awaitKind(SessionUp)
	old := c.UUID()
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	held.next(t)
	refuse(net, a)
	refuse(net, b)
	a.hangUp()
	b.hangUp()
	c.finished(1, Lost)
	c.awaitKind(SessionDown)
	allow(net, b)
	held.next(t).answer(busy)
	c.awaitKind(SessionUp)
	if now := c.UUID(); now == old || b.last(0).req.PathsUUID != now {
		t.Errorf("the session was %x and is %x, at the server %x", old, now, b.last(0).req.PathsUUID)
	}
	eventually(t, "all permits are back", func() bool { return c.slots.permits.inUse() == 1 }) // the spare
}

// One permit cannot serve the request that was lost and the FENCE.
func TestFence_QueueDepth1(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, func(s *scriptedServer) { held.hold(true)(s); s.depth = 1 }, nil)
	c.awaitKind(SessionUp)
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	held.next(t)
	refuse(net, a) // for good
	net.Cut(cltA, a.addr.Addr())
	c.finished(1, Lost)
	c.awaitKind(SessionDown)
	c.awaitKind(SessionUp)
	if err := c.write(0, 2, 0, 8, "v"); err != nil {
		t.Fatal(err)
	}
	r := held.next(t)
	if r.conn.srv != b || r.Type == rtrswire.MsgFence {
		t.Fatal("not the new request, on the path that is left")
	}
	r.answer(0)
	c.finished(2, 0)
}

// A path that is up fences one that gets no answer to its connection request.
func TestFence_DoesNotWaitForTheDialOfADeadPath(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, held.hold(true), func(cfg *ClientConfig) { cfg.Timing.ConnectTimeout = time.Hour })
	c.awaitKind(SessionUp)
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	lost := held.next(t)
	dead := c.links[0]
	refuse(net, b)
	net.Cut(cltB, b.addr.Addr())
	c.awaitState(2, PathReconnecting)
	net.Stall(cltA, a.addr.Addr())
	dead.failLink(ErrConnLost)
	c.finished(1, Lost)
	c.awaitKind(SessionDown)
	c.awaitState(1, PathConnecting)
	allow(net, b)
	fence := held.next(t)
	if fence.conn.srv != b || fence.fenced(t) != lost.conn.req.SessUUID {
		t.Error("the FENCE does not name the dead path on the other one")
	}
	fence.answer(0)
	c.awaitKind(SessionUp)
	net.Resume(cltA, a.addr.Addr())
	c.awaitState(1, PathConnected)
}

// poorDevice has no memory to register when it says so.
type poorDevice struct {
	verbs.Device
	poor atomic.Int32 // registrations that will fail
}

type poorDomain struct {
	verbs.PD
	dev *poorDevice
}

func (d *poorDevice) AllocPD() (verbs.PD, error) {
	pd, err := d.Device.AllocPD()
	return &poorDomain{pd, d}, err
}

func (d *poorDevice) CreateQP(pd verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	return d.Device.CreateQP(pd.(*poorDomain).PD, cfg)
}

func (p *poorDomain) RegMR(buf []byte, access verbs.Access) (verbs.MR, error) {
	if p.dev.poor.Add(-1) >= 0 {
		return nil, syscall.ENOMEM
	}
	return p.PD.RegMR(buf, access)
}

// That there is no memory for a FENCE is not the fault of the path that was to
// carry it.
func TestFence_WithoutMemorySparesItsCarrier(t *testing.T) {
	held := make(heldRequests, 64)
	net := loopback.New()
	a := startScripted(t, net, srvA, held.hold(true))
	startScripted(t, net, srvB, held.hold(true))
	dev := &poorDevice{Device: net.Device("client")}
	c := cltOpen(t, []PathAddr{pathTo(dev, cltA, srvA), pathTo(dev, cltB, srvB)}, nil)
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	held.next(t)
	refuse(net, a)
	dev.poor.Store(1)
	net.Cut(cltA, a.addr.Addr())
	held.next(t).answer(0) // the FENCE
	held.next(t).answer(0)
	c.finished(1, 0)
	if p := c.Paths()[1]; p.State != PathConnected || p.Stats.Reconnects != 0 {
		t.Errorf("the other path is %v after %d reconnects", p.State, p.Stats.Reconnects)
	}
}

// giveUp sends an admin request and gives it up when the server has it.
func (c *cltClient) giveUp(t *testing.T, held heldRequests) *scriptedRequest {
	t.Helper()
	ctx, cancel := context.WithCancel(cltContext(t))
	result := make(chan error)
	go func() { result <- c.AdminWrite(ctx, []byte("close device 1")) }()
	r := held.next(t)
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Fatalf("given up: %v", err)
	}
	return r
}

// The caller of an admin request that it gave up may have done something since
// that makes a repetition mean something else.
func TestAdminRequestThatWasGivenUpIsNotRepeated(t *testing.T) {
	for _, tt := range []struct {
		name   string
		fences bool
	}{
		{"a server with FENCE", true},
		{"a server without", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			held := make(heldRequests, 64)
			c, a, _, net := cltTwoPaths(t, held.hold(tt.fences), nil)
			inUse := c.slots.permits.inUse()
			lost := c.giveUp(t, held)
			if err := c.write(0, 1, 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			held.next(t).answer(0)
			c.finished(1, 0)
			refuse(net, a)
			net.Cut(cltA, a.addr.Addr())
			if tt.fences {
				fence := held.next(t)
				fence.fenced(t)
				fence.answer(busy) // it still runs
			}
			c.awaitState(1, PathReconnecting)
			held.none(t)
			var others []*scriptedRequest
			for c.write(0, 2, 0, 8, "u") == nil { // all the permits that there are
				r := held.next(t)
				for ; r.Type == rtrswire.MsgFence; r = held.next(t) { // a second has passed
					r.answer(busy)
				}
				if r.buf == lost.buf {
					t.Error("its buffer is used while it may run")
				}
				others = append(others, r)
			}
			for _, r := range others {
				r.answer(0)
				c.finished(2, 0)
			}
			if tt.fences {
				fence := held.next(t)
				fence.fenced(t)
				fence.answer(0)
			} else {
				allow(net, a)
				c.awaitState(1, PathConnected)
			}
			eventually(t, "its permit is back", func() bool { return c.slots.permits.inUse() == inUse })
			held.none(t)
		})
	}
}

// The memory of an operation that hangs is nobody else's, whichever path comes
// back first and however long it takes; and the others are served.
func TestAHungOperationKeepsItsMemory(t *testing.T) {
	for _, tt := range []struct {
		name string
		back func(c *cltClient, net *loopback.Network)
	}{
		{"the other path comes back first", func(c *cltClient, net *loopback.Network) {
			go func() { _ = c.ReconnectPath(c.t.Context(), 2) }()
		}},
		{"its own path comes back", func(*cltClient, *loopback.Network) {}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			net := loopback.New()
			hung := make(chan *Op, 1)
			srv := startServer(t, net, func(op *Op) {
				if string(op.User()) == "hang" {
					hung <- op
					return
				}
				op.Respond(0)
			}, retireAfter(100*time.Millisecond))
			dev := net.Device("client")
			dst := serverAddr.String()
			c := cltOpen(t, []PathAddr{pathTo(dev, clientAddr, dst), pathTo(dev, otherAddr, dst)}, nil)
			c.awaitKind(SessionUp)
			if err := c.DisconnectPath(cltContext(t), 2); err != nil {
				t.Fatal(err)
			}
			copy(c.region.Bytes(), "disk 1")
			if err := c.write(0, 1, 0, 6, "hang"); err != nil {
				t.Fatal(err)
			}
			op := <-hung
			net.Cut(clientAddr, serverAddr.Addr())
			c.finished(1, Lost)
			c.awaitKind(SessionDown)
			tt.back(c, net)
			c.awaitKind(SessionUp)
			copy(c.region.Bytes(), "DISK 2")
			for tag := range uint64(32) {
				for c.write(int(tag%2), tag, 0, 6, "go on") == ErrNoPermit {
					<-c.permit
				}
			}
			for range 32 {
				if d := c.next(); d.errno != 0 {
					t.Errorf("tag %d: errno %d", d.tag, d.errno)
				}
			}
			if string(op.Data()) != "disk 1" {
				t.Errorf("the operation that hangs brings %q to its disk", op.Data())
			}
			_ = srv.cfg.Pollers[op.Poller()].Call(t.Context(), func() { op.Respond(0) })
			eventually(t, "its memory to be freed", func() bool { _, _, alive := srv.handler.counts(); return alive == 1 })
		})
	}
}

// While another path is connected a request that hangs costs no other anything:
// the requests lost with it are sent again, its path comes back, and in the end
// it is answered itself.
func TestAHungOperationCostsOthersNothing(t *testing.T) {
	net := loopback.New()
	hung := make(chan *Op, 2)
	var pollers []*Poller
	srv := startServer(t, net, func(op *Op) {
		switch string(op.User()) {
		case "hang":
			hung <- op
		case "slow":
			time.AfterFunc(20*time.Millisecond, func() { pollers[op.Poller()].Do(func() { op.Respond(0) }) })
		default:
			op.Respond(0)
		}
	}, retireAfter(100*time.Millisecond), func(cfg *ServerConfig) { pollers = cfg.Pollers })
	dev := net.Device("client")
	dst := serverAddr.String()
	c := cltOpen(t, []PathAddr{pathTo(dev, clientAddr, dst), pathTo(dev, otherAddr, dst)}, func(cfg *ClientConfig) { cfg.Policy = MinLatency })
	c.links[0].hb.latency.Store(1)
	c.links[1].hb.latency.Store(1 << 60)
	if err := c.write(0, 1, 0, 8, "hang"); err != nil {
		t.Fatal(err)
	}
	op := <-hung
	for tag := range uint64(3) {
		if err := c.write(1, 10+tag, 0, 8, "slow"); err != nil {
			t.Fatal(err)
		}
	}
	net.Cut(clientAddr, serverAddr.Addr())
	c.awaitState(1, PathReconnecting)
	for range 3 {
		if d := c.next(); d.tag < 10 || d.errno != 0 {
			t.Errorf("tag %d: errno %d", d.tag, d.errno)
		}
	}
	c.awaitState(1, PathConnected)
	for tag := range uint64(20) {
		if err := c.write(int(tag%2), 20+tag, 0, 8, "go on"); err != nil {
			t.Fatal(err)
		}
		c.finished(20+tag, 0)
	}
	respond := func(op *Op) {
		_ = srv.cfg.Pollers[op.Poller()].Call(t.Context(), func() { op.Respond(0) })
	}
	respond(op)
	respond(<-hung) // its repetition
	c.finished(1, 0)
	eventually(t, "nothing is left of the lost link", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.lost) == 0 })
	if ups, downs, _ := srv.handler.counts(); ups != 1 || downs != 0 {
		t.Errorf("the session was up %d times and down %d times", ups, downs)
	}
}

// A request that was given up counts as settled when the server has answered it,
// or has fenced the path on which it was sent.
func TestAdminWriteOnce_TellsWhenItIsSettled(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("its path is lost %t", lost), func(t *testing.T) {
			held := make(heldRequests, 64)
			c, a, _, net := cltTwoPaths(t, held.hold(true), nil)
			settled := make(chan struct{})
			ctx, cancel := context.WithCancel(cltContext(t))
			result := make(chan error)
			go func() { result <- c.AdminWriteOnce(ctx, []byte("close device 1"), func() { close(settled) }) }()
			r := held.next(t)
			cancel()
			if err := <-result; !errors.Is(err, context.Canceled) {
				t.Fatalf("given up: %v", err)
			}
			if lost {
				refuse(net, a)
				net.Cut(cltA, a.addr.Addr())
				r = held.next(t) // the FENCE
				r.fenced(t)
				r.answer(busy)
				r = held.next(t)
			}
			select {
			case <-settled:
				t.Error("settled while the server may execute it")
			case <-time.After(20 * time.Millisecond):
			}
			r.answer(0)
			select {
			case <-settled:
			case <-cltContext(t).Done():
				t.Error("not settled")
			}
		})
	}
}
