package rtrs

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// moving is a Resolver for one address, which moves between two sources.
type moving struct {
	mu      sync.Mutex
	src     netip.Addr // invalid: there is no route
	changed chan struct{}
	inUse   int
}

var movingAddr = netip.MustParseAddr("10.99.0.2")

func (m *moving) Route(ctx context.Context, src, dst netip.Addr) (Route, error) {
	if dst != movingAddr {
		return Route{Src: src, Dst: dst}, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.src.IsValid() {
		return Route{}, syscall.ENETUNREACH
	}
	m.inUse++
	return Route{Src: m.src, Dst: addrOf(srvA), Changed: m.changed, Release: func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.inUse--
	}}, nil
}

func (m *moving) users() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.inUse
}

func (m *moving) move(src netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.src = src
	close(m.changed)
	m.changed = make(chan struct{})
}

// A path to an address of a Resolver connects by its route, and again when that
// changes. What was in flight is done once.
func TestPathFollowsItsRoute(t *testing.T) {
	net := loopback.New()
	d, srv := serveDisk(t, net)
	m := &moving{src: cltA, changed: make(chan struct{})}
	addr := netip.AddrPortFrom(movingAddr, netip.MustParseAddrPort(srvA).Port()).String()
	c := &cltWriter{cltClient: cltOpen(t, []PathAddr{pathTo(net.Device("client"), netip.Addr{}, addr)},
		func(cfg *ClientConfig) { cfg.Resolver = m })}
	c.start(1)
	c.finished(1, 0)
	if src := c.Paths()[0].Src; src != cltA {
		t.Errorf("the path comes from %v, want %v", src, cltA)
	}
	m.move(cltB)
	eventually(t, "the path comes from the other address", func() bool {
		p := c.Paths()[0]
		return p.State == PathConnected && p.Src == cltB
	})
	c.start(2)
	c.finished(2, 0)
	if v := d.version(0); v != 2 {
		t.Errorf("version %d, want 2", v)
	}
	eventually(t, "the server has one path", func() bool { return len(srv.Sessions()) == 1 && len(srv.Sessions()[0].Paths()) == 1 })
	if n := m.users(); n != 1 {
		t.Errorf("%d routes are in use, want 1", n)
	}
	if err := c.RemovePath(cltContext(t), 1); err != nil {
		t.Fatal(err)
	}
	if n := m.users(); n != 0 {
		t.Errorf("%d routes are in use without a path, want none", n)
	}
}

// An attempt to connect by a route that changes ends at once, and the next one takes the new route.
func TestAttemptEndsWithItsRoute(t *testing.T) {
	changed := make(chan struct{})
	r := Route{Changed: changed}
	ctx, done := r.guardContext(t.Context())
	defer done()
	close(changed)
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, ErrAddrChange) {
		t.Errorf("cause %v, want ErrAddrChange", err)
	}
}

func TestPathWithoutARouteSaysWhy(t *testing.T) {
	_, cfg := cltConfig(t, 1)
	cfg.Resolver = &moving{changed: make(chan struct{})}
	s, err := Open(cltContext(t), "s", []PathAddr{pathTo(loopback.New().Device("client"), netip.Addr{}, "10.99.0.2:1")}, cfg)
	if err == nil {
		s.Close(cltContext(t))
	}
	if !errors.Is(err, syscall.EHOSTUNREACH) {
		t.Errorf("%v, want EHOSTUNREACH", err)
	}
}

// A server that has not noticed the loss of a path learns of it when the client
// connects the path again. It does not wait for its own heartbeats, here of an hour.
func TestServerEndsAPathThatItsClientMakesAgain(t *testing.T) {
	net := loopback.New()
	_, srv := serveDisk(t, net, func(cfg *ServerConfig) { cfg.Timing.Heartbeat = time.Hour })
	m := &moving{src: cltA, changed: make(chan struct{})}
	addr := netip.AddrPortFrom(movingAddr, netip.MustParseAddrPort(srvA).Port()).String()
	c := &cltWriter{cltClient: cltOpen(t, []PathAddr{pathTo(net.Device("client"), netip.Addr{}, addr)},
		func(cfg *ClientConfig) { cfg.Resolver = m })}
	c.start(1)
	c.finished(1, 0)
	net.Stall(cltA, addrOf(srvA)) // no news of its end reaches the server
	m.move(cltB)
	eventually(t, "the path comes from the other address", func() bool {
		p := c.Paths()[0]
		return p.State == PathConnected && p.Src == cltB
	})
	c.start(2)
	c.finished(2, 0)
	eventually(t, "the server has one path", func() bool { return len(srv.Sessions()) == 1 && len(srv.Sessions()[0].Paths()) == 1 })
}
