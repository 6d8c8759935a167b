package neigh

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

var (
	start = time.Unix(1700000000, 0)
	link  = wire.Link{PKey: 0xffff, Scope: wire.ScopeLinkLocal}
	bcast = wire.MulticastAddress(link.Broadcast())
)

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

// node is an interface on a simulated link.
type node struct {
	*Table
	got []Frame // packets other than ARP and neighbour discovery
}

func newNode(cfg Config, n byte) *node {
	local := wire.NewAddress(0, 0x100+uint32(n), wire.AddrGID(netip.AddrFrom4([4]byte{10, 0, 0, n})))
	t := New(cfg, link, local)
	t.SetIPs([]netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, 1, n}), 24),
		netip.PrefixFrom(local.GID().LinkLocal(), 64),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 15: n}), 64),
	})
	return &node{Table: t}
}

func (n *node) ip4() netip.Addr { return n.ips[0].Addr() }
func (n *node) ip6() netip.Addr { return n.ips[2].Addr() }

// carry delivers frames of from, and the answers to them, until the link is
// silent. It returns all frames on the link.
func carry(now time.Time, from *node, frames []Frame, nodes ...*node) (all []Frame) {
	for _, f := range frames {
		all = append(all, f)
		for _, n := range nodes {
			if n == from || !f.Dst.IsMulticast() && f.Dst != n.Local() {
				continue
			}
			var out []Frame
			switch {
			case f.Type == wire.TypeARP:
				out = n.HandleARP(now, from.Local(), f.Packet, nil)
			case f.Type == wire.TypeIPv6 && wire.NDType(f.Packet) != 0:
				out = n.HandleND(now, from.Local(), f.Packet, nil)
			default:
				n.got = append(n.got, f)
			}
			all = append(all, carry(now, n, out, nodes...)...)
		}
	}
	return all
}

func TestW03_W04_RequestIsBroadcastAndReplyUnicast(t *testing.T) {
	a, b, c := newNode(Config{}, 1), newNode(Config{}, 2), newNode(Config{}, 3)
	_, ok, out := a.Resolve(start, b.ip4(), wire.TypeIPv4, []byte("one"), nil)
	if ok || len(out) != 1 {
		t.Fatalf("Resolve of an unknown address: %t, %d frames", ok, len(out))
	}
	frames := carry(start, a, out, a, b, c)
	if len(frames) != 3 {
		t.Fatalf("%d frames, want request, reply and packet: %+v", len(frames), frames)
	}
	request, reply := wire.ARP(frames[0].Packet).Fields(), wire.ARP(frames[1].Packet).Fields()
	if frames[0].Dst != bcast || frames[0].Dst.QPN() != 0xffffff || request.Op != wire.ARPRequest || request.TargetHW != (wire.Address{}) {
		t.Errorf("request %+v to %s", request, frames[0].Dst)
	}
	if frames[1].Dst != a.Local() || reply.Op != wire.ARPReply || reply.SenderHW != b.Local() || reply.TargetHW != a.Local() {
		t.Errorf("reply %+v to %s", reply, frames[1].Dst)
	}
	if frames[2].Dst != b.Local() || string(frames[2].Packet) != "one" || len(b.got) != 1 {
		t.Errorf("the packet that waited was sent to %s", frames[2].Dst)
	}
	if addr, ok, out := a.Resolve(start, b.ip4(), wire.TypeIPv4, nil, nil); !ok || addr != b.Local() || len(out) != 0 {
		t.Errorf("Resolve of a known address: %s, %t, %d frames", addr, ok, len(out))
	}
	// Asker and answerer know each other; a third node learns nothing.
	if addr, ok, _ := b.Resolve(start, a.ip4(), wire.TypeIPv4, nil, nil); !ok || addr != a.Local() {
		t.Errorf("the answering side resolves to %s, %t", addr, ok)
	}
	if len(c.Entries()) != 0 {
		t.Errorf("a third node has %v", c.Entries())
	}
}

func TestND_Resolves(t *testing.T) {
	for _, dst := range []func(n *node) netip.Addr{(*node).ip6, func(n *node) netip.Addr { return n.ips[1].Addr() }} {
		a, b := newNode(Config{}, 1), newNode(Config{}, 2)
		_, _, out := a.Resolve(start, dst(b), wire.TypeIPv6, []byte{0x60}, nil)
		frames := carry(start, a, out, a, b)
		if len(frames) != 3 || frames[1].Dst != a.Local() || len(b.got) != 1 {
			t.Fatalf("frames %+v", frames)
		}
		ns, na := wire.ND(frames[0].Packet).Fields(), wire.ND(frames[1].Packet).Fields()
		group, _ := link.Multicast(wire.SolicitedNode(dst(b)))
		if frames[0].Dst != wire.MulticastAddress(group) || ns.LinkLayer != a.Local() || ns.Src.IsLinkLocalUnicast() != dst(b).IsLinkLocalUnicast() {
			t.Errorf("solicitation %+v to %s", ns, frames[0].Dst)
		}
		if na.Flags != wire.NDSolicited|wire.NDOverride || na.LinkLayer != b.Local() || na.Dst != ns.Src {
			t.Errorf("advertisement %+v", na)
		}
	}
}

func TestND_DuplicateAddressDetectionIsAnswered(t *testing.T) {
	a, b := newNode(Config{}, 1), newNode(Config{}, 2)
	probe := wire.NewND(wire.NDFields{Type: wire.NDNeighborSolicit, Src: netip.IPv6Unspecified(), Dst: wire.SolicitedNode(b.ip6()), Target: b.ip6()})
	out := b.HandleND(start, a.Local(), probe, nil)
	if len(out) != 1 || !out[0].Dst.IsMulticast() || len(b.Entries()) != 0 {
		t.Fatalf("answer %+v", out)
	}
	if f := wire.ND(out[0].Packet).Fields(); f.Dst != netip.IPv6LinkLocalAllNodes() || f.Flags != wire.NDOverride || f.Target != b.ip6() {
		t.Errorf("answer %+v", f)
	}
	a.HandleND(start, b.Local(), out[0].Packet, nil)
	if len(a.Entries()) != 0 {
		t.Error("an advertisement nobody asked for made an entry")
	}
}

func TestPacketsWait(t *testing.T) {
	a, b := newNode(Config{}, 1), newNode(Config{}, 2)
	var out []Frame
	for i := range 5 {
		_, _, out = a.Resolve(start, b.ip4(), wire.TypeIPv4, fmt.Append(nil, i), out)
	}
	if len(out) != 1 {
		t.Fatalf("%d requests, want 1", len(out))
	}
	carry(start, a, out, a, b)
	var got []byte
	for _, f := range b.got {
		got = append(got, f.Packet...)
	}
	if string(got) != "234" || a.Stats().QueueDrops != 2 {
		t.Errorf("packets %q arrived, %d were dropped; want the last 3, in order", got, a.Stats().QueueDrops)
	}
}

func TestNobodyAnswers(t *testing.T) {
	a := newNode(Config{}, 1)
	_, _, out := a.Resolve(start, ip("192.168.1.9"), wire.TypeIPv4, []byte("x"), nil)
	now, ticks := start, 0
	for ; len(a.Entries()) > 0 && ticks < 10; ticks++ {
		next := a.Next()
		if !next.After(now) {
			t.Fatalf("Next is %s at %s", next.Sub(start), now.Sub(start))
		}
		if early := a.Tick(next.Add(-time.Millisecond), nil); len(early) != 0 {
			t.Fatal("a request was repeated early")
		}
		now = next
		out = a.Tick(now, out)
	}
	if len(out) != 3 || now.Sub(start) != 3*time.Second {
		t.Errorf("%d requests in %s, want 3 in 3s", len(out), now.Sub(start))
	}
	if s := a.Stats(); s.Failed != 1 || s.QueueDrops != 1 {
		t.Errorf("stats %+v", s)
	}
	if !a.Next().IsZero() {
		t.Error("an empty table wants a tick")
	}
}

func TestOldAddressIsProbed(t *testing.T) {
	a, b := newNode(Config{Idle: time.Hour}, 1), newNode(Config{Idle: time.Hour}, 2)
	_, _, out := a.Resolve(start, b.ip4(), wire.TypeIPv4, nil, nil)
	carry(start, a, out, a, b)
	now := start.Add(31 * time.Second)
	addr, ok, out := a.Resolve(now, b.ip4(), wire.TypeIPv4, nil, nil)
	if !ok || addr != b.Local() || len(out) != 1 || out[0].Dst != b.Local() || a.Entries()[0].State != Probe {
		t.Fatalf("after 31 s: %s, %t, %+v, %s", addr, ok, out, a.Entries()[0].State)
	}
	carry(now, a, out, a, b)
	if s := a.Entries()[0].State; s != Reachable {
		t.Fatalf("state %s after the answer", s)
	}
	now = now.Add(31 * time.Second)
	a.Resolve(now, b.ip4(), wire.TypeIPv4, nil, nil)
	for range 3 {
		now = now.Add(time.Second)
		a.Tick(now, nil)
	}
	if len(a.Entries()) != 0 {
		t.Errorf("entry %+v is there without an answer", a.Entries()[0])
	}
}

func TestUnusedEntriesGo(t *testing.T) {
	a, b := newNode(Config{}, 1), newNode(Config{}, 2)
	_, _, out := a.Resolve(start, b.ip4(), wire.TypeIPv4, nil, nil)
	carry(start, a, out, a, b)
	if next := a.Next(); next != start.Add(time.Minute) {
		t.Errorf("next tick after %s", next.Sub(start))
	}
	if a.Tick(start.Add(time.Minute), nil); len(a.Entries()) != 0 {
		t.Error("the entry is there after a minute")
	}
}

func TestW14_AnnouncementChangesEntries(t *testing.T) {
	a, b, c := newNode(Config{}, 1), newNode(Config{}, 2), newNode(Config{}, 3)
	for _, dst := range []netip.Addr{b.ip4(), b.ip6()} {
		_, _, out := a.Resolve(start, dst, wire.TypeIPv4, nil, nil)
		carry(start, a, out, a, b, c)
	}
	again := newNode(Config{}, 2) // the same addresses behind another queue pair
	again.local = wire.NewAddress(0, 0x999, b.Local().GID())
	frames := again.Announce(nil)
	if len(frames) != 3 {
		t.Fatalf("%d announcements, want one for each address", len(frames))
	}
	arp := wire.ARP(frames[0].Packet).Fields()
	if frames[0].Dst != bcast || arp.SenderIP != arp.TargetIP || arp.SenderIP != b.ip4() || arp.SenderHW != again.Local() {
		t.Errorf("gratuitous ARP %+v to %s", arp, frames[0].Dst)
	}
	carry(start, again, frames, a, c)
	for _, dst := range []netip.Addr{b.ip4(), b.ip6()} {
		if addr, ok, _ := a.Resolve(start, dst, wire.TypeIPv4, nil, nil); !ok || addr != again.Local() {
			t.Errorf("%s resolves to %s, %t", dst, addr, ok)
		}
	}
	if len(c.Entries()) != 0 {
		t.Error("an announcement made an entry where there was none")
	}
}

func TestBadMessages(t *testing.T) {
	a, b, evil := newNode(Config{}, 1), newNode(Config{}, 2), newNode(Config{}, 3)
	request := wire.ARPFields{Op: wire.ARPRequest, SenderHW: b.Local(), SenderIP: b.ip4(), TargetIP: a.ip4()}
	arp := func(change func(f *wire.ARPFields)) []byte {
		f := request
		change(&f)
		return wire.NewARP(f)
	}
	ns := wire.NDFields{Type: wire.NDNeighborSolicit, Src: b.ip6(), Dst: a.ip6(), Target: a.ip6(), LinkLayer: b.Local(), HasLinkLayer: true}
	for name, tc := range map[string]struct {
		src    wire.Address
		packet []byte
		nd     bool
		want   Stats
	}{
		"the address of another queue pair":  {evil.Local(), arp(func(*wire.ARPFields) {}), false, Stats{Spoofed: 1}},
		"the address of a group":             {bcast, arp(func(f *wire.ARPFields) { f.SenderHW = bcast }), false, Stats{Spoofed: 1}},
		"an IP address of ours":              {b.Local(), arp(func(f *wire.ARPFields) { f.SenderIP = a.ip4() }), false, Stats{Conflicts: 1}},
		"a group as the sender":              {b.Local(), arp(func(f *wire.ARPFields) { f.SenderIP = ip("224.0.0.1") }), false, Stats{Malformed: 1}},
		"an unknown operation":               {b.Local(), arp(func(f *wire.ARPFields) { f.Op = 8 }), false, Stats{Malformed: 1}},
		"half a packet":                      {b.Local(), arp(func(*wire.ARPFields) {})[:30], false, Stats{Malformed: 1}},
		"a solicitation of another one":      {evil.Local(), wire.NewND(ns), true, Stats{Spoofed: 1}},
		"half a solicitation":                {b.Local(), wire.NewND(ns)[:50], true, Stats{Malformed: 1}},
		"an advertisement for an IP of ours": {b.Local(), wire.NewND(wire.NDFields{Type: wire.NDNeighborAdvert, Src: b.ip6(), Dst: a.ip6(), Target: a.ip6(), LinkLayer: b.Local(), HasLinkLayer: true}), true, Stats{Conflicts: 1}},
	} {
		n := newNode(Config{}, 1)
		handle := n.HandleARP
		if tc.nd {
			handle = n.HandleND
		}
		if out := handle(start, tc.src, tc.packet, nil); len(out) != 0 || len(n.Entries()) != 0 || n.Stats() != tc.want {
			t.Errorf("%s: %d frames, entries %v, stats %+v", name, len(out), n.Entries(), n.Stats())
		}
	}
}

// TestStorm: requests from more addresses than the table has room for leave it
// no larger than that, and the neighbour in use stays.
func TestStorm(t *testing.T) {
	a, b := newNode(Config{Entries: 16}, 1), newNode(Config{}, 2)
	_, _, out := a.Resolve(start, b.ip4(), wire.TypeIPv4, nil, nil)
	carry(start, a, out, a, b)
	for i := range 1000 {
		now := start.Add(time.Duration(i) * time.Millisecond)
		src := wire.NewAddress(0, 0x2000+uint32(i), b.Local().GID())
		f := wire.ARPFields{Op: wire.ARPRequest, SenderHW: src, SenderIP: netip.AddrFrom4([4]byte{192, 168, 9, byte(i)}), TargetIP: a.ip4()}
		if out := a.HandleARP(now, src, wire.NewARP(f), nil); len(out) != 1 {
			t.Fatalf("%d frames for a request", len(out))
		}
		if _, ok, _ := a.Resolve(now, b.ip4(), wire.TypeIPv4, nil, nil); !ok {
			t.Fatal("the neighbour in use was removed")
		}
	}
	if n := len(a.Entries()); n != 16 {
		t.Errorf("%d entries, want 16", n)
	}
}

func FuzzHandle(f *testing.F) {
	b := newNode(Config{}, 2)
	f.Add([]byte(wire.NewARP(wire.ARPFields{Op: wire.ARPRequest, SenderHW: b.Local(), SenderIP: b.ip4(), TargetIP: ip("192.168.1.1")})), false)
	f.Add([]byte(wire.NewND(wire.NDFields{Type: wire.NDNeighborSolicit, Src: b.ip6(), Dst: ip("fd00::1"), Target: ip("fd00::1"), LinkLayer: b.Local(), HasLinkLayer: true})), true)
	f.Fuzz(func(t *testing.T, packet []byte, nd bool) {
		a := newNode(Config{}, 1)
		a.Resolve(start, b.ip4(), wire.TypeIPv4, []byte("waits"), nil)
		handle := a.HandleARP
		if nd {
			handle = a.HandleND
		}
		before := bytes.Clone(packet)
		out := handle(start, b.Local(), packet, nil)
		if !bytes.Equal(packet, before) {
			t.Error("the packet was changed")
		}
		if len(out) > 2 || len(a.Entries()) > 2 {
			t.Errorf("%d frames and %d entries from one packet", len(out), len(a.Entries()))
		}
		for _, e := range a.Entries() {
			if e.State != Incomplete && !e.Address.SamePort(b.Local()) {
				t.Errorf("%s is at %s, which did not say so", e.IP, e.Address)
			}
		}
	})
}
