package dev

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// TestBadFrames: a member of the link sends forbidden frames. All are counted,
// and the interface goes on.
func TestBadFrames(t *testing.T) {
	a, _, _, ib := pair(t)
	var evil verbs.DatagramQP
	var err error
	a.Do(func() { evil, err = a.fabric.OpenDatagrams(verbs.DatagramConfig{Local: portA, QKey: DefaultQKey}) })
	if err != nil {
		t.Fatal(err)
	}
	defer evil.Close()
	own := wire.NewAddress(0, evil.QPN(), wire.AddrGID(portA))
	ip := netip.MustParseAddr
	arp := wire.ARPFields{Op: wire.ARPRequest, SenderHW: own, SenderIP: ip("192.168.50.9"), TargetIP: ip("192.168.50.2")}
	spoofed := arp
	spoofed.SenderHW = wire.NewAddress(0, evil.QPN(), wire.AddrGID(ip("10.9.0.77")))
	conflict := arp
	conflict.SenderIP = arp.TargetIP
	ns := wire.NewND(wire.NDFields{Type: wire.NDNeighborSolicit, Src: ip("fd50::9"), Dst: ip("fd50::2"), Target: ip("fd50::2"), LinkLayer: own, HasLinkLayer: true})
	hops, wrong, zero := bytes.Clone(ns), bytes.Clone(ns), bytes.Clone(ns)
	hops[7] = 64
	wrong[42] ^= 1
	zero[65] = 0
	forged := wire.NewND(wire.NDFields{Type: wire.NDNeighborSolicit, Src: ip("fd50::9"), Dst: ip("fd50::2"), Target: ip("fd50::2"), LinkLayer: spoofed.SenderHW, HasLinkLayer: true})
	claim := wire.NewND(wire.NDFields{Type: wire.NDNeighborAdvert, Src: ip("fd50::2"), Dst: ip("fd50::2"), Target: ip("fd50::2"), LinkLayer: own, HasLinkLayer: true})
	frame := wire.AppendFrame
	send := func(qkey uint32, b []byte) {
		if _, err := evil.Send([]verbs.Datagram{{Payload: b, Peer: portB, QPN: ib.Address().QPN(), QKey: qkey}}); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name  string
		frame []byte
		count func(s Stats) uint64
	}{
		{"an empty datagram", nil, func(s Stats) uint64 { return s.RxDropped }},
		{"three octets", []byte{8, 0, 0}, func(s Stats) uint64 { return s.RxDropped }},
		{"an unknown type", frame(nil, 0x88cc, make([]byte, 60)), func(s Stats) uint64 { return s.RxUnknownType }},
		{"IPv4 that is none", frame(nil, wire.TypeIPv4, []byte{0x60, 19: 0}), func(s Stats) uint64 { return s.RxDropped }},
		{"IPv6 that is none", frame(nil, wire.TypeIPv6, []byte{0x60}), func(s Stats) uint64 { return s.RxDropped }},
		{"half an ARP packet", frame(nil, wire.TypeARP, wire.NewARP(arp)[:40]), func(s Stats) uint64 { return s.Neigh.Malformed }},
		{"ARP in the name of another port", frame(nil, wire.TypeARP, wire.NewARP(spoofed)), func(s Stats) uint64 { return s.Neigh.Spoofed }},
		{"ARP with the address of the interface", frame(nil, wire.TypeARP, wire.NewARP(conflict)), func(s Stats) uint64 { return s.Neigh.Conflicts }},
		{"half a solicitation", frame(nil, wire.TypeIPv6, ns[:50]), func(s Stats) uint64 { return s.RxDropped + s.Neigh.Malformed }},
		{"a solicitation with a wrong checksum", frame(nil, wire.TypeIPv6, wrong), func(s Stats) uint64 { return s.Neigh.Malformed }},
		{"a solicitation with an option of length 0", frame(nil, wire.TypeIPv6, zero), func(s Stats) uint64 { return s.Neigh.Malformed }},
		{"a solicitation in the name of another port", frame(nil, wire.TypeIPv6, forged), func(s Stats) uint64 { return s.Neigh.Spoofed }},
		{"an advertisement of an address of the interface", frame(nil, wire.TypeIPv6, claim), func(s Stats) uint64 { return s.Neigh.Conflicts }},
		{"a solicitation that was routed", frame(nil, wire.TypeIPv6, hops), func(s Stats) uint64 { return s.Neigh.Malformed }},
	} {
		before := tc.count(ib.Stats())
		send(DefaultQKey, tc.frame)
		eventually(t, tc.name+" is counted", func() bool { return tc.count(ib.Stats()) == before+1 })
	}
	before := ib.Stats().Fabric.QKey
	send(1, frame(nil, wire.TypeARP, wire.NewARP(arp)))
	eventually(t, "a wrong Q_Key is counted", func() bool { return ib.Stats().Fabric.QKey == before+1 })
	for _, n := range ib.Neighbors() {
		if n.IP == ip("192.168.50.9") || n.Address.SamePort(own) {
			t.Errorf("neighbour %+v was learned from it", n)
		}
	}
	a.ping("192.168.50.2")
	a.ping("fd50::2")
}

func TestIP21_ChecksumsAreFinished(t *testing.T) {
	a, b, ia, ib := pair(t)
	ca, cb := a.udp("udp", "192.168.50.1:0", nil), b.udp("udp", "192.168.50.2:7000", nil)
	exchange(t, ca, "192.168.50.2:7000", cb, []byte("the receiver's kernel checks it"))
	if n := ia.Stats().TxChecksums; n == 0 {
		t.Error("the kernel left no checksum to the interface")
	}
	// With a changed byte it is refused: the receiver does check.
	errorsOf := func() string { return b.Run("sh", "-c", "grep ^Udp: /proc/net/snmp | tail -n 1 | cut -d' ' -f8") }
	before := errorsOf()
	packet := []byte{0x45, 0, 0, 32, 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 168, 50, 1, 192, 168, 50, 2, 0x1b, 0x58, 0x1b, 0x58, 0, 12, 0x12, 0x34, 'b', 'a', 'd', '!'}
	sum := internetChecksum(packet[:20])
	packet[10], packet[11] = byte(sum>>8), byte(sum)
	var qp verbs.DatagramQP
	var err error
	a.Do(func() { qp, err = a.fabric.OpenDatagrams(verbs.DatagramConfig{Local: portA, QKey: DefaultQKey}) })
	if err != nil {
		t.Fatal(err)
	}
	defer qp.Close()
	if _, err := qp.Send([]verbs.Datagram{{Payload: wire.AppendFrame(nil, wire.TypeIPv4, packet), Peer: portB, QPN: ib.Address().QPN(), QKey: DefaultQKey}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the kernel counts a wrong checksum", func() bool {
		cb.SetReadDeadline(time.Now().Add(50 * time.Millisecond)) // the kernel checks when somebody reads
		if n, err := cb.Read(make([]byte, 100)); err == nil {
			t.Fatalf("%d bytes with a wrong checksum were received", n)
		}
		return errorsOf() != before
	})
}

func TestFinishChecksum(t *testing.T) {
	i := &Interface{}
	h := make(tun.Header, tun.HeaderLen)
	h[0] = 1
	for _, tc := range []struct{ start, offset, size int }{{20, 16, 37}, {20, 16, 36}, {40, 2, 20}, {65535, 65535, 100}} {
		h[6], h[7], h[8], h[9] = byte(tc.start), byte(tc.start>>8), byte(tc.offset), byte(tc.offset>>8)
		if i.finishChecksum(h, make([]byte, tc.size)) {
			t.Errorf("a checksum at %d+%d in %d bytes was finished", tc.start, tc.offset, tc.size)
		}
	}
}

// A checksum that comes out as 0 is sent as 0 in TCP, and as FFFF in UDP, where 0
// means that there is none.
func TestFinishChecksum_Zero(t *testing.T) {
	i := &Interface{}
	for offset, want := range map[byte]byte{6: 0xff, 16: 0} {
		h := make(tun.Header, tun.HeaderLen)
		h[0], h[8] = 1, offset
		p := make([]byte, 20)
		p[0], p[1] = 0xff, 0xff // the sum over all is FFFF, its complement 0
		if !i.finishChecksum(h, p) || p[offset] != want || p[offset+1] != want {
			t.Errorf("the checksum at %d is %x, want twice %#x", offset, p[offset:offset+2], want)
		}
	}
}

func TestOpen_Errors(t *testing.T) {
	a, _ := hosts(t, 4200)
	for name, cfg := range map[string]Config{
		"P_Key 0x8000":          {PKey: 0x8000},
		"a name of 16 bytes":    {Name: "abcdefghijklmnop"},
		"a scope of 5 bits":     {Scope: 16},
		"a peer of IPv6":        {Peers: []netip.Addr{netip.MustParseAddr("fd00::1")}},
		"a name that is taken":  {Name: "eth0"},
		"a name with a slash":   {Name: "a/b"},
		"an MTU below the link": {LinkMTU: 255},
	} {
		i, err := a.tryOpen(cfg)
		if err == nil {
			t.Errorf("%s: no error", name)
			i.Close()
		} else if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EBUSY) {
			t.Errorf("%s: %v has no errno that a script knows", name, err)
		}
	}
	i, err := a.tryOpen(Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
	if err := i.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the second Close returned %v", err)
	}
}

// TestW14_RestartIsAnnounced: a new interface with the same IP address and another
// queue pair is reached without delay.
func TestW14_RestartIsAnnounced(t *testing.T) {
	a, b, ia, ib := pair(t)
	a.ping("192.168.50.2")
	if err := ib.Close(); err != nil {
		t.Fatal(err)
	}
	again := b.open(Config{}, "192.168.50.2/24")
	eventually(t, "the neighbour has the new address", func() bool {
		for _, n := range ia.Neighbors() {
			if n.IP == netip.MustParseAddr("192.168.50.2") && n.State != neigh.Incomplete {
				return n.Address == again.Address()
			}
		}
		return false
	})
	a.ping("192.168.50.2")
}
