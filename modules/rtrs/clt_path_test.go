package rtrs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func addrOf(s string) netip.Addr { return netip.MustParseAddrPort(s).Addr() }

// cltTwoPaths opens a session with a path to each of two scripted servers.
func cltTwoPaths(t testing.TB, editServer func(*scriptedServer), editClient func(*ClientConfig)) (c *cltClient, a, b *scriptedServer, net *loopback.Network) {
	t.Helper()
	net = loopback.New()
	a = startScripted(t, net, srvA, editServer)
	b = startScripted(t, net, srvB, editServer)
	dev := net.Device("client")
	c = cltOpen(t, []PathAddr{pathTo(dev, cltA, srvA), pathTo(dev, cltB, srvB)}, editClient)
	return c, a, b, net
}

func TestR022_ChangedQueueDepthStopsReconnects(t *testing.T) {
	c, s, net := openScripted(t, nil)
	s.close()
	c.awaitState(1, PathReconnecting)
	startScripted(t, net, srvA, func(s *scriptedServer) { s.depth, s.regions = 4, 4 })
	if e := c.awaitState(1, PathConnectingErr); ErrnoOf(e.Err) != int(syscall.ECONNRESET) {
		// Attempts before the new server listens fail in the same way.
		t.Errorf("cause %v", e.Err)
	}
	c.awaitState(1, PathClosed)
	time.Sleep(50 * time.Millisecond)
	if p := c.Paths()[0]; p.State != PathClosed || p.Err == nil {
		t.Fatalf("path is %v, %v", p.State, p.Err)
	}
	if err := c.write(0, 1, 0, 8, "u"); err != ErrDisconnected {
		t.Errorf("write without path: %v", err)
	}
	if err := c.ReconnectPath(cltContext(t), 1); err != nil {
		t.Fatal(err)
	}
	if c.QueueDepth() != 4 {
		t.Errorf("queue depth %d, want 4", c.QueueDepth())
	}
	c.awaitKind(SessionUp)
	if err := c.write(0, 2, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	c.finished(2, 0)
}

func TestSecondPathWithAnotherQueueDepthIsRefused(t *testing.T) {
	c, _, net := openScripted(t, nil)
	startScripted(t, net, srvB, func(s *scriptedServer) { s.depth = 16 })
	if _, err := c.AddPath(cltContext(t), pathTo(net.Device("client"), cltB, srvB)); ErrnoOf(err) != int(syscall.ECONNRESET) {
		t.Errorf("AddPath: %v", err)
	}
	if n := len(c.Paths()); n != 1 {
		t.Errorf("%d paths", n)
	}
}

func TestR100_R101_AutomaticReconnects(t *testing.T) {
	tests := []struct {
		name     string
		max      int
		failures int // before the server is back
		attempts int
		end      PathState
	}{
		{"0 never tries", 0, 100, 0, PathClosed},
		{"3 tries three times", 3, 100, 3, PathClosed},
		{"3 is enough when the third succeeds", 3, 2, 3, PathConnected},
		{"-1 tries for ever", -1, 12, 13, PathConnected},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			net := loopback.New()
			refuse := 0
			startScripted(t, net, srvA, func(s *scriptedServer) {
				s.onConnect = func(_ rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
					if refuse > 0 {
						refuse--
						return nil, 104
					}
					return rsp, 0
				}
			})
			c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, func(cfg *ClientConfig) {
				cfg.Timing.MaxReconnectAttempts = tt.max
				cfg.Timing.ReconnectMax = 5 * time.Millisecond
			})
			refuse = tt.failures // nobody connects now
			tap := tapNet(net, func(e loopback.Event) bool {
				return isConnect(e) && rtrswire.ConnReq(e.Data).CID() == 0
			})
			net.Cut(cltA, addrOf(srvA))
			c.awaitState(1, PathReconnecting)
			c.awaitState(1, tt.end)
			time.Sleep(20 * time.Millisecond)
			if got := len(tap.all()); got != tt.attempts {
				t.Errorf("%d attempts, want %d", got, tt.attempts)
			}
			for i, r := range connReqs(tap) {
				if int(r.ReconCnt) != i+2 {
					t.Errorf("attempt %d has recon_cnt %d", i, r.ReconCnt)
				}
			}
		})
	}
}

// While the server is expected back attempts follow at once, whatever the timing is,
// and do not count.
func TestExpectReturn(t *testing.T) {
	net := loopback.New()
	var refuse atomic.Int32
	startScripted(t, net, srvA, func(s *scriptedServer) {
		s.onConnect = func(_ rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
			if refuse.Add(-1) >= 0 {
				return nil, 104
			}
			return rsp, 0
		}
	})
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, func(cfg *ClientConfig) {
		cfg.Timing.ReconnectFirst, cfg.Timing.ReconnectMin, cfg.Timing.ReconnectMax = time.Hour, time.Hour, time.Hour
		cfg.Timing.MaxReconnectAttempts = 2
	})
	c.ExpectReturn(time.Minute)
	refuse.Store(5)
	net.Cut(cltA, addrOf(srvA))
	c.awaitState(1, PathReconnecting)
	c.awaitState(1, PathConnected)
	c.ExpectReturn(0)
	if c.isExpected() {
		t.Error("the server is expected")
	}
}

// A path that is added for later is there from the beginning, is connected as
// soon as that works, and can be removed before.
func TestAddPathLater(t *testing.T) {
	c, s, net := openScripted(t, nil)
	c.awaitKind(SessionUp)
	dev := net.Device("client")
	later := func() int {
		id, err := c.AddPathLater(pathTo(dev, cltB, srvB))
		if err != nil {
			t.Fatal(err)
		}
		c.awaitState(id, PathConnectingErr)
		c.awaitState(id, PathConnecting) // again
		if p := c.Paths(); len(p) != 2 || p[1].ID != id || p[1].State == PathConnected || p[1].Err == nil {
			t.Errorf("paths %+v", p)
		}
		return id
	}
	if err := c.RemovePath(cltContext(t), later()); err != nil {
		t.Fatal(err)
	}
	if n := len(c.Paths()); n != 1 {
		t.Errorf("%d paths after the removal", n)
	}
	id := later()
	startScripted(t, net, srvB, nil)
	c.awaitState(id, PathConnected)
	s.close() // its requests go there
	c.awaitState(1, PathReconnecting)
	if err := c.write(0, 7, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	c.finished(7, 0)
}

// A session ends with paths that have never worked, and gets no other then.
func TestAddPathLater_SessionEnds(t *testing.T) {
	c, _, net := openScripted(t, nil)
	to := pathTo(net.Device("client"), cltB, srvB)
	if _, err := c.AddPathLater(to); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(cltContext(t)); err != nil {
		t.Error(err)
	}
	if _, err := c.AddPathLater(to); !errors.Is(err, ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
	if _, err := c.AddPathLater(PathAddr{Dst: to.Dst}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("without a device: %v", err)
	}
}

// It may make the session on a server that has lost it.
func TestAddPathLater_AfterTheOthersWereLost(t *testing.T) {
	c, s, net := openScripted(t, nil)
	if _, err := c.AddPathLater(pathTo(net.Device("client"), cltB, srvB)); err != nil {
		t.Fatal(err)
	}
	s.close()
	c.awaitKind(SessionDown)
	made := false
	startScripted(t, net, srvB, func(s *scriptedServer) {
		s.onConnect = func(req rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
			made = made || req.FirstConn
			if !made {
				return nil, int(syscall.ENXIO)
			}
			return rsp, 0
		}
	})
	c.awaitState(2, PathConnected)
	c.awaitKind(SessionUp)
}

// While another path is connected it does not make the session anew: its address
// may lead to another server by now.
func TestAddPathLater_NoSessionElsewhere(t *testing.T) {
	c, _, net := openScripted(t, nil)
	asked := make(chan bool, 100)
	startScripted(t, net, srvB, func(s *scriptedServer) {
		s.onConnect = func(req rtrswire.ConnReqFields, _ []byte) ([]byte, int) {
			select {
			case asked <- req.FirstConn:
			default:
			}
			return nil, int(syscall.ENXIO)
		}
	})
	if _, err := c.AddPathLater(pathTo(net.Device("client"), cltB, srvB)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if <-asked {
			t.Fatal("it would have made the session")
		}
	}
}

// One that somebody has added by hand meanwhile is not kept.
func TestAddPathLater_GoesForATwin(t *testing.T) {
	c, _, net := openScripted(t, nil)
	startScripted(t, net, srvB, func(s *scriptedServer) {
		s.onConnect = func(rtrswire.ConnReqFields, []byte) ([]byte, int) { return nil, int(syscall.EEXIST) }
	})
	id, err := c.AddPathLater(pathTo(net.Device("client"), cltB, srvB))
	if err != nil {
		t.Fatal(err)
	}
	c.awaitState(id, PathDead)
	eventually(t, "it is not listed", func() bool { return len(c.Paths()) == 1 })
}

// A path with the addresses of another one is refused, also while that one is lost:
// a server would accept it then, and refuse the lost one from then on.
func TestTwinPathsAreRefused(t *testing.T) {
	for _, tt := range []struct {
		name  string
		first netip.Addr // its source
		added netip.Addr
	}{
		{"sources are given", cltA, cltA},
		{"the lost one's source is chosen", netip.Addr{}, cltA},
		{"the added one's source is chosen", cltA, netip.Addr{}},
		{"both are chosen", netip.Addr{}, netip.Addr{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			net := loopback.New()
			_, srv := serveDisk(t, net)
			dev := sourceDevice{net.Device("client"), cltA}
			c := cltOpen(t, []PathAddr{pathTo(dev, tt.first, srvA), pathTo(dev, cltB, srvB)}, nil)
			add := pathTo(dev, tt.added, srvA)
			refused := func(when string) {
				t.Helper()
				if _, err := c.AddPath(cltContext(t), add); !errors.Is(err, syscall.EEXIST) {
					t.Errorf("%s: %v, want EEXIST", when, err)
				}
			}
			refused("connected")
			if err := c.DisconnectPath(cltContext(t), 1); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the server has one path", func() bool { return len(srv.Sessions()[0].Paths()) == 1 })
			refused("lost")
			id, err := c.AddPathLater(add)
			switch {
			case err == nil: // it knows its source when it is connected
				c.awaitState(id, PathDead)
			case !errors.Is(err, syscall.EEXIST):
				t.Errorf("later: %v, want EEXIST", err)
			}
			eventually(t, "two paths are listed", func() bool { return len(c.Paths()) == 2 })
			eventually(t, "the first is back", func() bool { return c.ReconnectPath(cltContext(t), 1) == nil })
			if err := c.RemovePath(cltContext(t), 1); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it can be added when the first is removed", func() bool {
				_, err := c.AddPath(cltContext(t), add)
				return err == nil
			})
		})
	}
}

// sourceDevice dials from src where no source is given, as a system that chooses it.
type sourceDevice struct {
	verbs.Device
	src netip.Addr
}

func (d sourceDevice) Connect(ctx context.Context, qp verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	if !p.Src.IsValid() {
		p.Src = d.src
	}
	return d.Device.Connect(ctx, qp, p)
}

func TestReconnectDelaysAreKept(t *testing.T) {
	c, _, net := openScripted(t, nil)
	timing := quickTiming()
	timing.ReconnectFirst, timing.Jitter = 80*time.Millisecond, 0
	if err := c.SetTiming(timing); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	net.Cut(cltA, addrOf(srvA))
	c.awaitState(1, PathReconnecting)
	c.awaitState(1, PathConnected)
	if d := time.Since(begin); d < 80*time.Millisecond {
		t.Errorf("reconnected after %v", d)
	}
}

func TestR103_NoPathLeft(t *testing.T) {
	hold := true
	c, s, net := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) {
			if !hold {
				r.respond(0)
			}
		}
	})
	c.awaitKind(SessionUp)
	for tag := range uint64(3) {
		if err := c.write(int(tag%2), tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
	}
	admin := make(chan error)
	go func() { admin <- c.AdminWrite(cltContext(t), []byte("u")) }()
	eventually(t, "four requests are under way", func() bool { return c.Paths()[0].Stats.Inflight == 4 })
	net.RefuseDial(netip.MustParseAddrPort(srvA), syscall.ECONNREFUSED)
	net.Cut(cltA, addrOf(srvA))
	for range 3 {
		if d := c.next(); d.errno != Lost {
			t.Errorf("errno %d, want Lost", d.errno)
		}
	}
	if err := <-admin; !errors.Is(err, syscall.ECONNABORTED) {
		t.Errorf("admin request: %v", err)
	}
	c.awaitKind(SessionDown)
	if err := c.write(0, 9, 0, 8, "u"); err != ErrDisconnected {
		t.Errorf("write: %v", err)
	}
	if err := c.AdminWrite(cltContext(t), nil); !errors.Is(err, syscall.ECONNABORTED) {
		t.Errorf("admin write: %v", err)
	}
	if c.Connected() || c.slots.permits.inUse() != 0 {
		t.Errorf("connected %v, %d permits in use", c.Connected(), c.slots.permits.inUse())
	}
	s.do(func() { hold = false })
	net.RefuseDial(netip.MustParseAddrPort(srvA), nil)
	c.awaitKind(SessionUp)
	if err := c.write(0, 10, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	c.finished(10, 0)
}

func TestR106_Policies(t *testing.T) {
	setup := func(t *testing.T, p Policy) (*cltClient, []chan *scriptedRequest) {
		arrived := []chan *scriptedRequest{make(chan *scriptedRequest, 16), make(chan *scriptedRequest, 16)}
		i := 0
		c, _, _, _ := cltTwoPaths(t, func(s *scriptedServer) {
			ch := arrived[i]
			i++
			s.onRequest = func(r *scriptedRequest) { ch <- r }
		}, func(cfg *ClientConfig) { cfg.Policy = p })
		return c, arrived
	}
	answer := func(c *cltClient, r *scriptedRequest) {
		r.conn.srv.do(func() { r.respond(0) })
		c.next()
	}
	t.Run("min-inflight takes the first path on a tie and the less loaded otherwise", func(t *testing.T) {
		c, arrived := setup(t, MinInflight)
		var got []*scriptedRequest
		for i, want := range []int{0, 1, 0, 1} {
			if err := c.write(i%2, uint64(i), 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			got = append(got, <-arrived[want])
		}
		answer(c, got[1])
		answer(c, got[3]) // path 2 is idle, path 1 has two
		for i := range 2 {
			if err := c.write(0, uint64(i), 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			<-arrived[1]
		}
	})
	t.Run("round-robin alternates for each queue", func(t *testing.T) {
		c, arrived := setup(t, RoundRobin)
		for i, want := range []int{0, 0, 1, 1, 0, 0} {
			if err := c.write(i%2, uint64(i), 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			answer(c, <-arrived[want])
		}
	})
	t.Run("min-latency takes the faster path", func(t *testing.T) {
		c, arrived := setup(t, MinLatency)
		for i, want := range []int{1, 0} {
			c.links[want].hb.latency.Store(1000)
			c.links[1-want].hb.latency.Store(2000)
			if err := c.write(0, uint64(i), 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			answer(c, <-arrived[want])
		}
	})
	t.Run("it can be changed", func(t *testing.T) {
		c, arrived := setup(t, MinInflight)
		if err := c.SetPolicy(RoundRobin); err != nil || c.Policy() != RoundRobin {
			t.Fatal(err)
		}
		for _, want := range []int{0, 1} {
			if err := c.write(0, 1, 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			answer(c, <-arrived[want])
		}
		if err := c.SetPolicy(3); err == nil {
			t.Error("policy 3 is accepted")
		}
	})
	if (ClientConfig{}).Policy != MinInflight {
		t.Error("the default is not min-inflight")
	}
}

func TestParsePolicy(t *testing.T) {
	for text, want := range map[string]Policy{
		"0": RoundRobin, "1": MinInflight, "2": MinLatency, "rr": RoundRobin, "MI": MinInflight, "ml\n": MinLatency,
		"Round-Robin": RoundRobin, "min-inflight (MI: 1)": MinInflight, "min-latency": MinLatency,
	} {
		if got, err := ParsePolicy(text); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "3", "r", "min", "rrr"} {
		if p, err := ParsePolicy(text); err == nil {
			t.Errorf("%q is accepted as %v", text, p)
		}
	}
}

func TestR109_LastPathRemovedAndAddedAgain(t *testing.T) {
	c, _, net := openScripted(t, nil)
	c.awaitKind(SessionUp)
	if err := c.RemovePath(cltContext(t), 1); err != nil {
		t.Fatal(err)
	}
	c.awaitKind(SessionDown)
	if err := c.write(0, 1, 0, 8, "u"); err != ErrDisconnected || len(c.Paths()) != 0 {
		t.Errorf("write without path: %v", err)
	}
	tap := tapNet(net, isConnect)
	id, err := c.AddPath(cltContext(t), pathTo(net.Device("client"), cltA, srvA))
	if err != nil || id != 2 {
		t.Fatalf("path %d, %v", id, err)
	}
	if r := connReqs(tap)[0]; !r.FirstConn || r.PathsUUID != c.UUID() {
		t.Errorf("request %+v", r)
	}
	c.awaitKind(SessionUp)
	if err := c.write(0, 2, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	c.finished(2, 0)
}

// A server that comes back with larger chunks is not held to its earlier size.
func TestMaxIOSizeIsThatOfTheServerNow(t *testing.T) {
	c, s, net := openScripted(t, func(s *scriptedServer) { s.chunk = 8192 })
	small := c.MaxIOSize()
	s.close()
	c.awaitKind(SessionDown)
	startScripted(t, net, srvA, func(s *scriptedServer) { s.chunk = 16384 })
	c.awaitKind(SessionUp)
	if got := c.MaxIOSize(); got != small+8192 {
		t.Errorf("max I/O %d after %d, want the larger one", got, small)
	}
}

func TestR110_ReconnectTakesWhatTheServerSays(t *testing.T) {
	c, s, net := openScripted(t, func(s *scriptedServer) { s.chunk = 16384 })
	if c.MaxIOSize() != 12288 {
		t.Fatalf("max I/O %d", c.MaxIOSize())
	}
	s.close()
	c.awaitKind(SessionDown)
	startScripted(t, net, srvA, func(s *scriptedServer) { s.newRkey, s.regions = true, 8 })
	c.awaitKind(SessionUp)
	if c.MaxIOSize() != 4096 {
		t.Errorf("max I/O %d, want the smaller one", c.MaxIOSize())
	}
	if err := c.write(0, 1, 0, 12288, "u"); err != ErrTooLarge {
		t.Errorf("a request of the old size: %v", err)
	}
	for tag := range uint64(20) {
		if err := c.write(0, tag, 0, 4096, "u"); err != nil {
			t.Fatal(err)
		}
		c.finished(tag, 0)
	}
}

func TestDisconnectAndReconnectPath(t *testing.T) {
	c, _, b, net := cltTwoPaths(t, nil, nil)
	ctx := cltContext(t)
	if err := c.DisconnectPath(ctx, 1); err != nil {
		t.Fatal(err)
	}
	if p := c.Paths()[0]; p.State != PathClosed || p.Err != nil {
		t.Errorf("path 1 is %v, %v", p.State, p.Err)
	}
	for tag := range uint64(4) {
		if err := c.write(0, tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
		c.finished(tag, 0)
	}
	if n := c.Paths()[1].Stats.WriteCount; n != 4 {
		t.Errorf("%d writes on path 2", n)
	}
	if err := c.ReconnectPath(ctx, 1); err != nil || c.Paths()[0].State != PathConnected {
		t.Errorf("reconnect from closed: %v", err)
	}
	if err := c.ReconnectPath(ctx, 2); err != nil || c.Paths()[1].State != PathConnected {
		t.Errorf("reconnect from connected: %v", err)
	}
	if n := c.Paths()[1].Stats.Reconnects; n != 1 {
		t.Errorf("path 2 was reconnected %d times", n)
	}
	net.RefuseDial(b.addr, syscall.ECONNREFUSED)
	if err := c.ReconnectPath(ctx, 2); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("reconnect with nobody there: %v", err)
	}
	if err := c.RemovePath(ctx, 2); err != nil || len(c.Paths()) != 1 {
		t.Errorf("remove: %v", err)
	}
	for name, err := range map[string]error{
		"remove":     c.RemovePath(ctx, 2),
		"disconnect": c.DisconnectPath(ctx, 2),
		"reconnect":  c.ReconnectPath(ctx, 2),
	} {
		if !errors.Is(err, syscall.ENOENT) {
			t.Errorf("%s a path that is not there: %v", name, err)
		}
	}
}

func TestDisconnectInterruptsAnAttempt(t *testing.T) {
	c, _, net := openScripted(t, nil)
	timing := quickTiming()
	timing.ConnectTimeout = time.Hour
	if err := c.SetTiming(timing); err != nil {
		t.Fatal(err)
	}
	net.Stall(cltA, addrOf(srvA))
	go func() { _ = c.ReconnectPath(cltContext(t), 1) }()
	c.awaitState(1, PathConnecting)
	if err := c.DisconnectPath(cltContext(t), 1); err != nil {
		t.Fatal(err)
	}
}

func TestManualReconnectCutsTheDelayShort(t *testing.T) {
	c, _, net := openScripted(t, nil)
	timing := quickTiming()
	timing.ReconnectFirst = time.Hour
	if err := c.SetTiming(timing); err != nil {
		t.Fatal(err)
	}
	net.Cut(cltA, addrOf(srvA))
	c.awaitState(1, PathReconnecting)
	if err := c.ReconnectPath(cltContext(t), 1); err != nil {
		t.Fatal(err)
	}
	net.Cut(cltA, addrOf(srvA))
	c.awaitState(1, PathReconnecting)
	if err := c.DisconnectPath(cltContext(t), 1); err != nil {
		t.Fatal(err)
	}
}

func TestCloseEndsWhatIsUnderWay(t *testing.T) {
	c, _, _, _ := cltTwoPaths(t, func(s *scriptedServer) {
		s.fences = true
		s.onRequest = func(*scriptedRequest) {}
	}, nil)
	for tag := range uint64(6) {
		if err := c.write(int(tag%2), tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(cltContext(t)); err != nil {
		t.Fatal(err)
	}
	if n := len(c.done); n != 6 {
		t.Errorf("%d of 6 requests were answered when Close returned", n)
	}
	for range len(c.done) {
		if d := <-c.done; d.errno != Lost {
			t.Errorf("errno %d", d.errno)
		}
	}
	close(c.events)
	for e := range c.events {
		if e.State == PathReconnecting {
			t.Errorf("path %d was lost: %v", e.Path, e.Err)
		}
	}
	if _, err := c.AddPath(cltContext(t), c.links0()); !errors.Is(err, ErrClosed) {
		t.Errorf("AddPath after Close: %v", err)
	}
	if _, err := c.Register(make([]byte, 8)); !errors.Is(err, syscall.ESHUTDOWN) {
		t.Errorf("Register after Close: %v", err)
	}
}

// A FENCE that can not be sent since the session was closed is no fault of its
// carrier.
func TestFenceOfAClosedSessionSparesItsCarrier(t *testing.T) {
	c, _, _, _ := cltTwoPaths(t, func(s *scriptedServer) { s.fences = true }, nil)
	c.mu.Lock()
	c.closed = true
	l, carrier := c.links[0], c.links[1]
	l.fencing = make(chan struct{})
	c.mu.Unlock()
	if c.fencePath(l, carrier); carrier.isLost() {
		t.Errorf("the carrier is lost: %v", carrier.cause)
	}
}

// heldLog blocks the log line of a connected path until the test receives
// from it.
type heldLog chan struct{}

func (h heldLog) Enabled(context.Context, slog.Level) bool { return true }
func (h heldLog) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h heldLog) WithGroup(string) slog.Handler            { return h }

func (h heldLog) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "rtrs: path connected" {
		<-h
	}
	return nil
}

// A receiver of the news that a path is connected can use it.
func TestConnectedPathTakesRequests(t *testing.T) {
	net := loopback.New()
	startScripted(t, net, srvA, nil)
	log := make(heldLog, 1)
	log <- struct{}{} // for Open
	defer close(log)
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, func(cfg *ClientConfig) { cfg.Logger = slog.New(log) })
	if err := c.ReconnectPath(cltContext(t), 1); err != nil {
		t.Fatal(err)
	}
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	c.finished(1, 0)
}

func TestEventsAreInOrder(t *testing.T) {
	c, _, net := openScripted(t, nil)
	for range 3 {
		net.Cut(cltA, addrOf(srvA))
		c.awaitState(1, PathReconnecting)
		c.awaitState(1, PathConnected)
	}
	if err := c.Close(cltContext(t)); err != nil {
		t.Fatal(err)
	}
	close(c.events)
	for e := range c.events {
		if e.Session != c.Session || e.Kind == 0 {
			t.Errorf("event %+v", e)
		}
	}
}

func TestCloseGivesUpWithItsContext(t *testing.T) {
	c, _, _ := openScripted(t, nil)
	held, hold := make(chan struct{}), make(chan struct{})
	c.pollers[0].Do(func() { close(held); <-hold })
	<-held
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := c.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("close with a stuck owner: %v", err)
	}
	close(hold)
}

// A session ends all its paths even if the wait of Close is given up.
func TestCloseThatIsGivenUpEndsEveryPath(t *testing.T) {
	c, _, _, _ := cltTwoPaths(t, nil, nil)
	c.Session.mu.Lock()
	paths := slices.Clone(c.paths)
	c.Session.mu.Unlock()
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Close(over); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("close: %v", err)
	}
	for _, p := range paths {
		select {
		case <-p.ended:
		case <-time.After(10 * time.Second):
			t.Fatalf("path %d lives on", p.id)
		}
	}
}

func (c *cltClient) links0() PathAddr {
	return PathAddr{Device: loopback.New().Device("late"), Dst: netip.MustParseAddrPort(srvA)}
}

func TestPathAddrString(t *testing.T) {
	dev := loopback.New().Device("d")
	for want, a := range map[string]PathAddr{
		"10.1.0.1@10.0.0.1:1234%loopback": pathTo(dev, cltA, srvA),
		"10.0.0.1:1234%loopback":          pathTo(dev, netip.Addr{}, srvA),
	} {
		if got := fmt.Sprint(a); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// Linux's server makes two sessions of one name, and crashes, when the first
// connections of two paths come at the same time and it has lost the session.
func TestPathsMakeTheSessionAnewOneAfterTheOther(t *testing.T) {
	var now, most atomic.Int32
	hook := func(s *scriptedServer) {
		s.onConnect = func(req rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
			if req.CID == 0 {
				most.Store(max(most.Load(), now.Add(1)))
				defer now.Add(-1)
				time.Sleep(50 * time.Millisecond)
			}
			return rsp, 0
		}
	}
	c, a, b, net := cltTwoPaths(t, hook, nil)
	refuse(net, a)
	refuse(net, b)
	a.hangUp()
	b.hangUp()
	c.awaitKind(SessionDown)
	allow(net, a)
	allow(net, b)
	eventually(t, "both paths are back", func() bool {
		return c.Paths()[0].State == PathConnected && c.Paths()[1].State == PathConnected
	})
	if most.Load() != 1 {
		t.Errorf("%d paths asked for the session at a time", most.Load())
	}
}

// A path without an answer of its server keeps the others back for a while
// only.
func TestPathWithoutAnswerDoesNotKeepOthersBack(t *testing.T) {
	var hang atomic.Bool
	hangs, end := make(chan struct{}, 1), make(chan struct{})
	defer close(end)
	first := true
	c, a, b, net := cltTwoPaths(t, func(s *scriptedServer) {
		if !first {
			return
		}
		first = false
		s.onConnect = func(_ rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
			if hang.Load() {
				select {
				case hangs <- struct{}{}:
				default: // the path tries again
				}
				<-end
			}
			return rsp, 0
		}
	}, nil)
	hang.Store(true)
	refuse(net, b)
	b.hangUp()
	begin := time.Now()
	a.hangUp()
	c.awaitKind(SessionDown)
	<-hangs
	allow(net, b)
	c.awaitKind(SessionUp)
	if took := time.Since(begin); took < sessionTurn/2 || took > sessionTurn+6*time.Second {
		t.Errorf("the other path was back after %v, want about %v", took, sessionTurn)
	}
}
