package dev

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/ether"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// TestEthernet lets an interface that is Ethernet to the kernel speak to one
// like it, and to one of the type InfiniBand.
func TestEthernet(t *testing.T) {
	for _, tc := range []struct {
		name     string
		ethernet bool // of the second host
		mode     Mode
	}{
		{"both are Ethernet", true, Datagram},
		{"the peer is of the type InfiniBand", false, Datagram},
		{"the peer is of the type InfiniBand, in connected mode", false, Connected},
		{"both are Ethernet, in connected mode", true, Connected},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := hosts(t, 4200)
			ia := a.open(Config{Ethernet: true, Mode: tc.mode}, "192.168.50.1/24", "fd50::1/64")
			ib := b.open(Config{Ethernet: tc.ethernet, Mode: tc.mode}, "192.168.50.2/24", "fd50::2/64")
			if out := a.Run("cat", "/sys/class/net/ib0/type", "/sys/class/net/ib0/address"); out != "1\n"+ether.Hash(ia.Address(), 0).String()+"\n" {
				t.Errorf("type and address %q", out)
			}
			for _, ip := range []string{"192.168.50", "fd50:"} {
				sep := map[bool]string{true: ".", false: ":"}[strings.Contains(ip, ".")]
				a.ping(ip + sep + "2")
				b.ping(ip + sep + "1")
				want := "lladdr " + ether.Hash(ib.Address(), 0).String()
				if out := a.Run("ip", "neigh", "show", ip+sep+"2"); !strings.Contains(out, want) {
					t.Errorf("neighbour %q, want %s", out, want)
				}
			}
			if p := ia.EthernetPeers(); len(p) != 1 || p[0].Address != ib.Address() {
				t.Errorf("peers %+v, want one with %s, flags included", p, ib.Address())
			}
			for _, from := range [][2]*host{{a, b}, {b, a}} {
				addr := map[bool]string{true: "192.168.50.2:7001", false: "[fd50::1]:7001"}[from[0] == a]
				if err := transfer(t, from[0], from[1], addr, 4<<20); err != nil {
					t.Error(err)
				}
			}
			s := ia.Stats()
			if s.TxDropped > 20 || s.RxDropped > 20 {
				t.Errorf("dropped packets: %+v", s)
			}
			if tc.mode == Connected && s.Conns.TxMessages == 0 {
				t.Errorf("no packet took a connection: %+v", s)
			}
			if tc.mode == Datagram && s.TxSegmented == 0 {
				t.Error("no packet was segmented")
			}
		})
	}
}

// TestEthernet_UnknownPeer: the kernel has the Ethernet address of a neighbour that
// the interface has never heard of, as when a bond gets a new interface. The first
// packet makes the interface ask, so that the next one can go.
func TestEthernet_UnknownPeer(t *testing.T) {
	a, b := hosts(t, 4200)
	ia := a.open(Config{Ethernet: true}, "192.168.50.1/24", "fd50::1/64")
	ib := b.open(Config{}, "192.168.50.2/24", "fd50::2/64")
	mac := ether.Hash(ib.Address(), 0)
	for _, p := range [][]byte{
		{0: 0x45, 3: 20, 12: 192, 168, 50, 1, 192, 168, 50, 2},
		append([]byte{0: 0x60, 6: 59, 7: 64, 8: 0xfd, 0x50, 23: 1, 24: 0xfd, 0x50, 39: 2}, 0),
	} {
		kind, now, out := uint16(wire.TypeIPv4), time.Now(), sendBatch{i: ia}
		if p[0] == 0x60 {
			kind = wire.TypeIPv6
		}
		b := append(make([]byte, tun.HeaderLen+ether.HeaderLen), p...)
		ether.Header(b[tun.HeaderLen:]).Put(mac, ia.ether.Own(), kind)
		ia.mu.Lock()
		ia.ether.Flush()
		for range 3 { // it asks once
			ia.fromEthernet(now, b, &out)
		}
		_, known := ia.ether.Address(mac)
		ia.mu.Unlock()
		// The request of IPv6 waits until its group is joined.
		if known || kind == wire.TypeIPv4 && (len(out.msgs) != 1 || out.msgs[0].QPN != verbs.MulticastQPN) {
			t.Fatalf("neighbour known: %t; frames %+v, want one request", known, out.msgs)
		}
		out.flush()
		ia.wakeTimers()
		eventually(t, "the neighbour is known", func() bool {
			ia.mu.Lock()
			defer ia.mu.Unlock()
			_, ok := ia.ether.Address(mac)
			return ok
		})
		ia.mu.Lock()
		ia.asked = time.Time{}
		ia.mu.Unlock()
	}
}

// TestEthernet_GratuitousARP: what the kernel announces reaches the peers, and
// so does a new Ethernet address of the device.
func TestEthernet_GratuitousARP(t *testing.T) {
	a, b := hosts(t, 4200)
	ia := a.open(Config{Ethernet: true}, "192.168.50.1/24")
	ib := b.open(Config{}, "192.168.50.2/24")
	a.ping("192.168.50.2")
	knows := func() bool {
		for _, n := range ib.Neighbors() {
			if n.IP == netip.MustParseAddr("192.168.50.1") && n.Address == ia.Address() {
				return true
			}
		}
		return false
	}
	eventually(t, "the peer knows the interface", knows)
	var frames buffer
	if err := ib.Capture(&frames); err != nil {
		t.Fatal(err)
	}
	a.Run("sysctl", "-qw", "net.ipv4.conf.ib0.arp_notify=1")
	a.Run("ip", "link", "set", "ib0", "address", "02:00:00:00:be:ef") // the kernel announces itself
	announcement := wire.NewARP(wire.ARPFields{Op: wire.ARPRequest, SenderHW: ia.Address(), SenderIP: netip.MustParseAddr("192.168.50.1"), TargetIP: netip.MustParseAddr("192.168.50.1")})
	eventually(t, "the announcement reaches the peer", func() bool { return bytes.Contains(frames.bytes(), announcement) && knows() })
	eventually(t, "the interface knows the address of the device", func() bool {
		m, ok := ia.MAC()
		return ok && m == ether.MAC{2, 0, 0, 0, 0xbe, 0xef}
	})
	b.ping("192.168.50.1")
	a.ping("192.168.50.2")
}

// TestEthernet_Multicast: groups of the kernel are groups of the link.
func TestEthernet_Multicast(t *testing.T) {
	a, b := hosts(t, 4200)
	ia := a.open(Config{Ethernet: true}, "192.168.50.1/24", "fd50::1/64")
	b.open(Config{Ethernet: true}, "192.168.50.2/24", "fd50::2/64")
	a.Run("ip", "addr", "add", "239.1.2.3/32", "dev", "ib0", "autojoin")
	eventually(t, "the group is joined", func() bool {
		for _, g := range ia.Groups() {
			if g.MGID.String() == "ff12:401b:ffff:0:0:0:f01:203" && g.Complete {
				return true
			}
		}
		return false
	})
	to := a.udp("udp4", "239.1.2.3:7000", nil)
	b.Run("ip", "route", "add", "239.0.0.0/8", "dev", "ib0")
	from := b.udp("udp4", "192.168.50.2:0", nil)
	exchange(t, from, "239.1.2.3:7000", to, []byte("to all"))
}
