package dev

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/cm"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// connectedPair is pair with interfaces in connected mode.
func connectedPair(t *testing.T) (a, b *host, ia, ib *Interface) {
	t.Helper()
	a, b = hosts(t, 4200)
	ia = a.open(Config{Mode: Connected}, "192.168.50.1/24", "fd50::1/64")
	ib = b.open(Config{Mode: Connected}, "192.168.50.2/24", "fd50::2/64")
	return a, b, ia, ib
}

// mtuOf returns the MTU of an interface in the kernel of the host.
func (h *host) mtuOf(name string) string {
	return strings.TrimSpace(h.Run("cat", "/sys/class/net/"+name+"/mtu"))
}

// TestConnected_IP12_IP16_ModeAndMTU: the mode can be changed, and with it the MTU; a datagram of
// 65000 bytes is one packet, one message of a connection.
func TestConnected_IP12_IP16_ModeAndMTU(t *testing.T) {
	a, b, ia, ib := pair(t)
	for _, s := range []struct {
		h *host
		i *Interface
	}{{a, ia}, {b, ib}} {
		if s.i.Mode() != Datagram || s.i.Address().Flags() != 0 {
			t.Errorf("at first %s mode, address %s", s.i.Mode(), s.i.Address())
		}
		if err := s.i.SetMode(Connected); err != nil {
			t.Fatal(err)
		}
		if s.i.Mode() != Connected || s.i.MTU() != 65520 || s.h.mtuOf("ib0") != "65520" || s.i.Address().Flags() != wire.FlagRC {
			t.Errorf("%s mode, MTU %d, in the kernel %s, address %s", s.i.Mode(), s.i.MTU(), s.h.mtuOf("ib0"), s.i.Address())
		}
	}
	for _, ends := range [][2]string{{"192.168.50.1", "192.168.50.2"}, {"fd50::1", "fd50::2"}} {
		ca := a.udp("udp", net.JoinHostPort(ends[0], "0"), nil)
		cb := b.udp("udp", net.JoinHostPort(ends[1], "7000"), nil)
		exchange(t, ca, net.JoinHostPort(ends[1], "7000"), cb, []byte("first"))
		eventually(t, "the connection is up", func() bool { return ia.Stats().Conns.Active == 1 })
		before := ib.Stats()
		payload := make([]byte, 65000)
		rand.Read(payload)
		exchange(t, ca, net.JoinHostPort(ends[1], "7000"), cb, payload)
		eventually(t, "what has arrived is counted", func() bool { return ib.Stats().RxBytes-before.RxBytes > 65000 })
		after := ib.Stats()
		if n := after.RxBytes - before.RxBytes; after.Conns.RxMessages == before.Conns.RxMessages || n < 65000 || (after.RxPackets-before.RxPackets)*65000 > 2*n {
			t.Errorf("65000 bytes took %d packets of %d bytes", after.RxPackets-before.RxPackets, n)
		}
	}
	for _, mtu := range []int{65521, 67} {
		if err := ia.SetMTU(mtu); !errors.Is(err, unix.EINVAL) {
			t.Errorf("MTU %d: %v", mtu, err)
		}
	}
	if err := ia.SetMTU(9000); err != nil || a.mtuOf("ib0") != "9000" {
		t.Errorf("MTU 9000: %v, in the kernel %s", err, a.mtuOf("ib0"))
	}
	if err := ia.SetMode(Datagram); err != nil {
		t.Fatal(err)
	}
	if ia.MTU() != 2044 || a.mtuOf("ib0") != "2044" || ia.Address().Flags() != 0 {
		t.Errorf("back in datagram mode: MTU %d, in the kernel %s, address %s", ia.MTU(), a.mtuOf("ib0"), ia.Address())
	}
	a.ping("192.168.50.2")
	b.ping("fd50::1")
	for _, word := range []string{"", "Connected", "datagram\n", "ud"} {
		if _, err := ParseMode(word); !errors.Is(err, unix.EINVAL) {
			t.Errorf("mode %q: %v", word, err)
		}
	}
}

// TestConnectedWire has tshark judge connected mode.
func TestConnectedWire(t *testing.T) {
	a, b := hosts(t, 4200)
	stop := a.captureUnderlay()
	const pkey = 0x8001
	ia := a.open(Config{Mode: Connected, PKey: pkey}, "192.168.50.1/24")
	ib := b.open(Config{Mode: Connected, PKey: pkey}, "192.168.50.2/24")
	a.ping("192.168.50.2")
	ca, cb := a.udp("udp", "192.168.50.1:0", nil), b.udp("udp", "192.168.50.2:7000", nil)
	exchange(t, ca, "192.168.50.2:7000", cb, make([]byte, 60000))
	index := 0
	a.Do(func() {
		if ifi, err := net.InterfaceByName("ib0"); err == nil {
			index = ifi.Index
		}
	})
	group := a.udp("udp4", "192.168.50.1:0", func(fd int) error {
		return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, &unix.IPMreqn{Ifindex: int32(index)})
	})
	for range 3 {
		group.WriteToUDPAddrPort([]byte("to the group"), netip.MustParseAddrPort("239.1.2.3:7002"))
	}
	file := stop()

	t.Run("W-11 service ID and private data", func(t *testing.T) {
		for kind, filter := range map[string]string{"request": "infiniband.mad.attributeid==0x10", "answer": "infiniband.mad.attributeid==0x13"} {
			lines := tshark(t, file, filter, "ip.src", "infiniband.cm.req.serviceid", "udp.payload")
			if len(lines) == 0 {
				t.Fatalf("no %s", kind)
			}
			for _, l := range lines {
				f := strings.Split(l, "|")
				from, to := ia, ib
				if strings.HasPrefix(f[0], "10.9.0.2") {
					from, to = ib, ia
				}
				at := map[string]int{"request": 140, "answer": 36}[kind]
				private := fmt.Sprintf("%08x%08x", from.Address().QPN(), 65524)
				if raw := f[2][2*(12+8+24+at):]; !strings.HasPrefix(raw, private) {
					t.Errorf("%s from %s has the private data %.16s, want %s", kind, f[0], raw, private)
				}
				if id := fmt.Sprintf("0x%016x", wire.ServiceIDLinux(to.Address().QPN())); kind == "request" && f[1] != id {
					t.Errorf("service ID %s, want %s", f[1], id)
				}
			}
		}
	})
	packets := dissect(t, file)
	t.Run("IP-15 RC is the transport of unicast packets", func(t *testing.T) {
		rc := 0
		for _, p := range packets {
			switch p["infiniband.bth.opcode"] {
			case "0", "1", "2", "4": // SEND first, middle, last, only
				n, _ := strconv.Atoi(strings.Split(p["udp.length"], ",")[0]) // segments of one packet of the host count as one
				rc += n
				if p["infiniband.bth.p_key"] != fmt.Sprint(pkey) {
					t.Fatalf("P_Key of %v", p)
				}
			}
		}
		if rc < 60000 {
			t.Errorf("%d bytes in SENDs", rc)
		}
		for _, p := range packets {
			if p["infiniband.bth.opcode"] == "100" && strings.Contains(p["udp.payload"], "08000000") && p["infiniband.bth.destqp"] != "0xffffff" && p["infiniband.bth.destqp"] != "0x000001" {
				t.Errorf("IPv4 in UD: %v", p)
			}
		}
	})
	t.Run("IP-18 W-13 ARP and multicast stay UD", func(t *testing.T) {
		packets.with("arp.opcode").all(t, "infiniband.bth.opcode", "100")
		to := tshark(t, file, "ip.dst==239.1.2.3", "infiniband.bth.opcode", "infiniband.bth.destqp")
		if len(to) == 0 || slices.ContainsFunc(to, func(l string) bool { return l != "100|0xffffff" }) {
			t.Errorf("multicast packets %q", to)
		}
	})
	t.Run("IP-31 the flag of RFC 4755", func(t *testing.T) {
		for _, l := range tshark(t, file, "arp", "arp.src.hw") {
			if !strings.HasPrefix(l, "80") {
				t.Errorf("ARP sender %s", l)
			}
		}
	})
}

// TestIP19_IP20_MixedFleet: a peer in datagram mode is reached by UD, and the
// kernel learns its MTU.
func TestIP19_IP20_MixedFleet(t *testing.T) {
	a, b := hosts(t, 4200)
	ia := a.open(Config{Mode: Connected}, "192.168.50.1/24", "fd50::1/64")
	ib := b.open(Config{}, "192.168.50.2/24", "fd50::2/64")
	a.ping("192.168.50.2")
	a.ping("fd50::2")
	for _, dst := range []string{"192.168.50.2", "fd50::2"} {
		at := netip.AddrPortFrom(netip.MustParseAddr(dst), 7000)
		cb := b.udp("udp", at.String(), nil)
		df := a.udp("udp", net.JoinHostPort(map[bool]string{true: "192.168.50.1", false: "fd50::1"}[at.Addr().Is4()], "0"), func(fd int) error {
			if at.Addr().Is4() {
				return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			}
			return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
		})
		eventually(t, "the kernel refuses what is too long", func() bool {
			_, err := df.WriteToUDPAddrPort(make([]byte, 60000), at)
			return errors.Is(err, unix.EMSGSIZE)
		})
		if out := a.Run("ip", "route", "get", dst); !strings.Contains(out, "mtu 2044") {
			t.Errorf("route %s", out)
		}
		exchange(t, df, at.String(), cb, bytes.Repeat([]byte("x"), 1900))
		exchange(t, a.udp("udp", net.JoinHostPort(map[bool]string{true: "192.168.50.1", false: "fd50::1"}[at.Addr().Is4()], "0"), nil), at.String(), cb, bytes.Repeat([]byte("y"), 60000))
	}
	s := ia.Stats()
	if s.PMTUSent == 0 || s.TxErrors == 0 || s.Conns.Connects != 0 || s.Conns.Refused != 0 {
		t.Errorf("stats %+v", s)
	}
	// Both ways when the peer changes its mode.
	if err := ib.SetMode(Connected); err != nil {
		t.Fatal(err)
	}
	eventually(t, "packets go by connections", func() bool {
		a.ping("192.168.50.2")
		return ia.Stats().Conns.Active == 1 && ib.Stats().Conns.Active == 1
	})
	if err := ib.SetMode(Datagram); err != nil {
		t.Fatal(err)
	}
	a.ping("192.168.50.2")
	b.ping("192.168.50.1")
}

// TestIP19_PeerRefuses: the flag says that the peer takes connections, but it does not
// listen. Packets to it go by UD.
func TestIP19_PeerRefuses(t *testing.T) {
	a, b, ia, ib := connectedPair(t)
	c := ib.cm.Swap(nil) // the interface still says that it is in connected mode
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	a.ping("192.168.50.2")
	if s := ia.Stats(); s.Conns.Refused == 0 || s.Conns.Connects != 0 {
		t.Errorf("stats %+v", s.Conns)
	}
	b.ping("192.168.50.1")
}

// TestIP25: in connected mode the kernel leaves neither checksums nor segmentation to
// the interface, and TCP takes packets of the large MTU; in datagram mode again both.
func TestIP25_OffloadsInDatagramModeOnly(t *testing.T) {
	a, b, ia, ib := connectedPair(t)
	if err := transfer(t, a, b, "192.168.50.2:7001", 16<<20); err != nil {
		t.Fatal(err)
	}
	s := ia.Stats()
	if s.TxSegmented != 0 || s.TxChecksums != 0 {
		t.Errorf("stats %+v: the kernel left work to the interface", s)
	}
	connected := s.TxPackets
	for _, i := range []*Interface{ia, ib} {
		if err := i.SetMode(Datagram); err != nil {
			t.Fatal(err)
		}
	}
	if err := transfer(t, a, b, "192.168.50.2:7002", 16<<20); err != nil {
		t.Fatal(err)
	}
	s = ia.Stats()
	if s.TxSegmented == 0 {
		t.Errorf("stats %+v: nothing was segmented", s)
	}
	t.Run("IP-17 fewer packets", func(t *testing.T) {
		if d := s.TxPackets - connected; d < 5*connected {
			t.Errorf("%d packets in datagram mode, %d in connected mode", d, connected)
		}
	})
}

// TestConnected_BadFrames: a member of the link sends forbidden frames to an
// interface in connected mode.
func TestConnected_BadFrames(t *testing.T) {
	a, _, _, ib := connectedPair(t)
	var evil *cm.Manager
	var err error
	a.Do(func() {
		evil, err = cm.Open(cm.Config{Fabric: a.fabric.(verbs.ServiceDevice), Local: portA, QPN: 0x123456, Receive: func(netip.Addr, uint32, []byte) {}})
	})
	if err != nil {
		t.Fatal(err)
	}
	defer evil.Close()
	var c *cm.Conn
	eventually(t, "the connection is up", func() bool {
		c = evil.Lookup(portB, ib.Address().QPN())
		s, _ := c.State()
		return s == cm.Up
	})
	spoofed := wire.NewARP(wire.ARPFields{Op: wire.ARPRequest, SenderHW: wire.NewAddress(0, 77, wire.AddrGID(portA)), SenderIP: netip.MustParseAddr("192.168.50.9"), TargetIP: netip.MustParseAddr("192.168.50.2")})
	for _, tc := range []struct {
		name  string
		frame []byte
		count func(s Stats) uint64
	}{
		{"an empty message", nil, func(s Stats) uint64 { return s.RxDropped }},
		{"three octets", []byte{8, 0, 0}, func(s Stats) uint64 { return s.RxDropped }},
		{"an unknown type", wire.AppendFrame(nil, 0x88cc, make([]byte, 60)), func(s Stats) uint64 { return s.RxUnknownType }},
		{"IPv4 that is none", wire.AppendFrame(nil, wire.TypeIPv4, []byte{0x60, 19: 0}), func(s Stats) uint64 { return s.RxDropped }},
		{"ARP in the name of another queue pair", wire.AppendFrame(nil, wire.TypeARP, spoofed), func(s Stats) uint64 { return s.Neigh.Spoofed }},
	} {
		before := tc.count(ib.Stats())
		if !c.Send(tc.frame, time.Second) {
			t.Fatalf("%s was not sent", tc.name)
		}
		eventually(t, tc.name+" is counted", func() bool { return tc.count(ib.Stats()) == before+1 })
	}
	a.ping("192.168.50.2")
}
