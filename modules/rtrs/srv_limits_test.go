package rtrs

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func limited(edit func(*Limits)) serverOption { return func(c *ServerConfig) { edit(&c.Limits) } }

// from makes a path with connections of a new session, from an address.
func from(t testing.TB, net *loopback.Network, addr netip.Addr, conns int) *rawPath {
	p := newRawPath(t, net, conns)
	p.src = addr
	return p
}

// A limit refuses the excess, and nothing else: with one address at its limit
// others are served, and a resource that is given back can be taken again.
func TestLimits(t *testing.T) {
	const session = 8 * 8192 // bytes
	for _, tt := range []struct {
		name    string
		limit   func(*Limits)
		conns   int        // of each of the two paths that fit
		third   netip.Addr // address that is refused one more
		fits    netip.Addr // address that is not refused one more; zero: none
		refused func(Usage) uint64
	}{
		{"sessions of one address", func(l *Limits) { l.SessionsPerAddr = 2 }, 1, clientAddr, otherAddr, func(u Usage) uint64 { return u.RefusedSessions }},
		{"sessions in all", func(l *Limits) { l.Sessions = 2 }, 1, otherAddr, netip.Addr{}, func(u Usage) uint64 { return u.RefusedSessions }},
		{"connections of one address", func(l *Limits) { l.ConnectionsPerAddr = 4 }, 2, clientAddr, otherAddr, func(u Usage) uint64 { return u.RefusedConnections }},
		{"connections in all", func(l *Limits) { l.Connections = 4 }, 2, otherAddr, netip.Addr{}, func(u Usage) uint64 { return u.RefusedConnections }},
		{"memory of one address", func(l *Limits) { l.ChunkMemoryPerAddr = 2*session + 1 }, 1, clientAddr, otherAddr, func(u Usage) uint64 { return u.RefusedChunkMemory }},
		{"memory in all", func(l *Limits) { l.ChunkMemory = 2*session + 1 }, 1, otherAddr, netip.Addr{}, func(u Usage) uint64 { return u.RefusedChunkMemory }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			net := loopback.New()
			s := startServer(t, net, serve, limited(tt.limit))
			a := from(t, net, clientAddr, tt.conns).connect().info("a")
			b := from(t, net, clientAddr, tt.conns).connect().info("b")
			over := from(t, net, tt.third, 1)
			if got := over.refused(0, over.private(0)); got != -int(syscall.ENOMEM) {
				t.Errorf("refused with %d", got)
			}
			if n := tt.refused(s.Usage()); n != 1 {
				t.Errorf("%d refusals are counted", n)
			}
			if tt.fits.IsValid() {
				from(t, net, tt.fits, 1).connect().info("other").stillWorks()
			}
			a.stillWorks()
			b.hangUp()
			var dialled error
			eventually(t, "room for the third", func() bool {
				if _, dialled = over.dial(0, over.private(0)); dialled != nil {
					var rej *verbs.RejectError
					if !errors.As(dialled, &rej) {
						t.Fatal(dialled)
					}
				}
				return dialled == nil
			})
		})
	}
}

// Resources are counted, and nothing is left after the clients.
func TestUsage(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net, retireAfter(20*time.Millisecond))
	a := from(t, net, clientAddr, 3).connect().info("a")
	from(t, net, otherAddr, 2).connect(0)
	want := Usage{Sessions: 2, Connections: 4, ChunkMemory: 2 * 8 * 8192, Unfinished: 1, Addresses: 2}
	if got := park.s.Usage(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	a.write(1, 1, nil, []byte("stuck"))
	op := park.take(a)
	a.hangUp()
	eventually(t, "the session to go", func() bool { return len(park.s.Sessions()) == 0 })
	want = Usage{Sessions: 1, Connections: 1, ChunkMemory: 2 * 8 * 8192, Unfinished: 1, Addresses: 2}
	eventually(t, "its memory to be all that is left", func() bool { return park.s.Usage() == want })
	park.respond(op, 0)
	want.ChunkMemory, want.Addresses = 8*8192, 1
	eventually(t, "its memory to be freed", func() bool { return park.s.Usage() == want })
}

// Of the paths that are not connected the oldest gives way, of the same address
// if that has too many.
func TestTheOldestUnfinishedPathGivesWay(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve, limited(func(l *Limits) { l.UnfinishedPerAddr, l.Unfinished = 2, 3 }))
	good := from(t, net, clientAddr, 1).connect().info("good") // no longer counted
	first := from(t, net, otherAddr, 2).connect(0)
	one, two := from(t, net, clientAddr, 2).connect(0), from(t, net, clientAddr, 2).connect(0)

	down := func(p *rawPath) func() bool { return func() bool { p.pump(); return p.downs > 0 } }
	three := from(t, net, clientAddr, 2).connect(0) // too many of the address
	eventually(t, "the oldest of its address to give way", down(one))
	from(t, net, otherAddr.Next(), 2).connect(0) // too many in all
	eventually(t, "the oldest of the address with the most to give way", down(two))
	for i, p := range []*rawPath{first, three} {
		p.connect(1).info(string(rune('a' + i))).stillWorks()
	}
	good.stillWorks()
	if u := s.Usage(); u.GaveWay != 2 || u.Unfinished != 1 {
		t.Errorf("%+v", u)
	}
}

// Of addresses with equally many, the one with the oldest path gives way.
func TestTheOldestUnfinishedPathGivesWay_OfEqualAddresses(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve, limited(func(l *Limits) { l.Unfinished = 6 }), func(c *ServerConfig) { c.InfoTimeout = time.Hour })
	var paths []*rawPath
	addr := otherAddr
	for range 12 {
		p := from(t, net, addr, 2).connect(0)
		paths, addr = append(paths, p), addr.Next()
		if n := len(paths); n > 6 {
			old := paths[n-7]
			eventually(t, "the oldest to give way", func() bool { old.pump(); return old.downs > 0 })
		}
	}
}

// One host may have all addresses of a /64.
func TestUnfinishedPathsOfOneNetworkOfIPv6(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve, limited(func(l *Limits) { l.UnfinishedPerAddr = 2 }))
	if _, err := s.Listen(s.dev, netip.MustParseAddrPort("[fd00::1]:77")); err != nil {
		t.Fatal(err)
	}
	for i, src := range []string{"fd00::a", "fd00::b", "fd00::c:0:0:d", "fd00:0:0:1::a"} {
		p := from(t, net, netip.MustParseAddr(src), 1)
		qp, err := p.dev.CreateQP(p.pd, verbs.QPConfig{CQ: p.cq, SendQueue: 1, RecvQueue: 1, MaxSGE: 1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(qp.Destroy)
		if _, err := p.dev.Connect(t.Context(), qp, verbs.ConnectParams{Src: p.src, Dst: netip.MustParseAddrPort("[fd00::1]:77"), Private: p.private(0)}); err != nil {
			t.Fatal(err)
		}
		if u := s.Usage(); u.GaveWay != uint64(min(max(i-1, 0), 1)) {
			t.Errorf("after %s: %+v", src, u)
		}
	}
}

// A limit that paths without INFO have used up holds for the first attempt only.
func TestUnfinishedPathsGiveTheirConnectionsBack(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve, limited(func(l *Limits) { l.Connections = 4 }))
	for range 2 {
		from(t, net, otherAddr, 3).connect(0, 1)
	}
	p := from(t, net, clientAddr, 1)
	if got := p.refused(0, p.private(0)); got != -int(syscall.ENOMEM) {
		t.Errorf("refused with %d", got)
	}
	eventually(t, "room", func() bool { _, err := p.dial(0, p.private(0)); return err == nil })
}

func TestPathsThatDoNotGetConnectedAreDropped(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve, func(c *ServerConfig) { c.InfoTimeout = time.Second }) // both connections fit in
	p := from(t, net, clientAddr, 2).connect()
	p.waitDown()
	eventually(t, "nothing is left of it", func() bool { return s.Usage() == Usage{TimedOut: 1} })
}

// One address that opens session after session and names none takes its share
// of the default limits, and keeps no other client out.
func TestDefaultLimits_AgainstAFlood(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	for range 400 {
		p := from(t, net, clientAddr, 1)
		if _, err := p.dial(0, p.private(0)); err != nil {
			t.Fatal(err)
		}
	}
	most := DefaultLimits().UnfinishedPerAddr
	if u := s.Usage(); u.Unfinished != most || u.GaveWay != uint64(400-most) {
		t.Errorf("%+v", u)
	}
	from(t, net, otherAddr, 2).connect().info("other").stillWorks()
	eventually(t, "the memory of what gave way to be freed", func() bool {
		u := s.Usage()
		return u.Sessions == most+1 && u.ChunkMemory == int64(most+1)*8*8192
	})
	if rtrswire.MaxCIDNum > DefaultLimits().ConnectionsPerAddr {
		t.Error("a path that the protocol allows has more connections than its address may have")
	}
}
