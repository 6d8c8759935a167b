package dev

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

func TestPing(t *testing.T) {
	a, _, ia, ib := pair(t)
	a.ping("192.168.50.2")
	a.ping("fd50::2")
	if n := ia.Neighbors(); len(n) != 2 || n[0].Address != ib.Address() || n[1].Address != ib.Address() {
		t.Errorf("neighbours %+v, want two entries with %s", n, ib.Address())
	}
}

func TestIP02_InterfaceTypeIsInfiniBand(t *testing.T) {
	a, _ := hosts(t, 4200)
	i := a.open(Config{Name: "ib7"})
	if out := a.Run("cat", "/sys/class/net/ib7/type"); strings.TrimSpace(out) != "32" {
		t.Errorf("type %s, want 32", out)
	}
	if out := a.Run("ip", "link", "show", "ib7"); !strings.Contains(out, "link/infiniband") {
		t.Errorf("ip link shows %s", out)
	}
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
	if out, err := a.Command("cat", "/sys/class/net/ib7/type").CombinedOutput(); err == nil {
		t.Errorf("the interface is there after Close: %s", out)
	}
}

func TestUDP(t *testing.T) {
	a, b, _, ib := pair(t)
	for _, ends := range [][2]string{{"192.168.50.1", "192.168.50.2"}, {"fd50::1", "fd50::2"}} {
		ca := a.udp("udp", net.JoinHostPort(ends[0], "0"), nil)
		cb := b.udp("udp", net.JoinHostPort(ends[1], "7000"), nil)
		for _, n := range []int{1, 100, ib.MTU() - 48, 9000} { // the last one in fragments
			payload := make([]byte, n)
			rand.Read(payload)
			from := exchange(t, ca, net.JoinHostPort(ends[1], "7000"), cb, payload)
			if from.Addr().Unmap() != netip.MustParseAddr(ends[0]) {
				t.Errorf("datagram came from %s, want %s", from, ends[0])
			}
		}
	}
}

// TestIP22_TCP: the kernel leaves segmentation to the interface. No packet is
// larger than the MTU, and the bytes arrive.
func TestIP22_TCP(t *testing.T) {
	a, b, ia, _ := pair(t)
	var capture buffer
	if err := ia.Capture(&capture); err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{"192.168.50.2:7001", "[fd50::2]:7001"} {
		if err := transfer(t, a, b, addr, 8<<20); err != nil {
			t.Error(err)
		}
	}
	if err := ia.Capture(nil); err != nil {
		t.Fatal(err)
	}
	longest := 0
	for b := capture.bytes()[24:]; len(b) >= 16; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		longest = max(longest, n-40-wire.EncapLen) // without the place of the GRH
		b = b[16+n:]
	}
	if longest != ia.MTU() {
		t.Errorf("longest packet %d bytes, want %d", longest, ia.MTU())
	}
	if s := ia.Stats(); s.TxSegmented == 0 || s.TxDropped != 0 {
		t.Errorf("stats %+v: the kernel left no packet to be segmented, or one was dropped", s)
	}
}

// transfer sends n bytes by TCP from a to an address of b.
func transfer(t *testing.T, a, b *host, addr string, n int) error {
	t.Helper()
	var l net.Listener
	var c net.Conn
	var err error
	b.Do(func() { l, err = net.Listen("tcp", addr) })
	if err != nil {
		return err
	}
	defer l.Close()
	got := make(chan [32]byte, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		h := sha256.New()
		io.Copy(h, c)
		got <- [32]byte(h.Sum(nil))
	}()
	a.Do(func() { c, err = net.DialTimeout("tcp", addr, 20*time.Second) })
	if err != nil {
		return err
	}
	payload := make([]byte, n)
	rand.Read(payload)
	c.SetDeadline(time.Now().Add(60 * time.Second))
	_, err = c.Write(payload)
	c.Close()
	if err != nil {
		return err
	}
	if sum := <-got; sum != sha256.Sum256(payload) {
		return fmt.Errorf("%s: other bytes arrived than were sent", addr)
	}
	return nil
}

func TestMulticast(t *testing.T) {
	a, b, ia, ib := pair(t)
	group4, group6 := [4]byte{239, 1, 2, 3}, netip.MustParseAddr("ff05::1234").As16()
	index := func(h *host) int {
		var ifi *net.Interface
		var err error
		h.Do(func() { ifi, err = net.InterfaceByName("ib0") })
		if err != nil {
			t.Fatal(err)
		}
		return ifi.Index
	}
	indexA, indexB := index(a), index(b)
	send4 := a.udp("udp4", "0.0.0.0:0", func(fd int) error {
		return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, &unix.IPMreqn{Ifindex: int32(indexA)})
	})
	join4 := b.udp("udp4", "239.1.2.3:7002", func(fd int) error {
		return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, &unix.IPMreqn{Multiaddr: group4, Ifindex: int32(indexB)})
	})
	send6 := a.udp("udp6", "[::]:0", func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, indexA)
	})
	join6 := b.udp("udp6", "[ff05::1234]:7002", func(fd int) error {
		return unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, &unix.IPv6Mreq{Multiaddr: group6, Interface: uint32(indexB)})
	})
	exchange(t, send4, "239.1.2.3:7002", join4, []byte("to the group"))
	exchange(t, send6, "[ff05::1234]:7002", join6, []byte("to the group"))
	for _, ip := range []string{"239.1.2.3", "ff05::1234"} {
		mgid, err := ia.link.Multicast(netip.MustParseAddr(ip))
		if err != nil {
			t.Fatal(err)
		}
		state := func(i *Interface) string {
			for _, g := range i.Groups() {
				if g.MGID == mgid && g.Complete {
					return map[bool]string{true: "send-only", false: "full"}[g.SendOnly]
				}
			}
			return "none"
		}
		eventually(t, "the kernel's report was seen", func() bool { return state(ib) == "full" })
		if s := state(ia); s != "send-only" {
			t.Errorf("the sender's membership in %s is %s, want send-only", ip, s)
		}
	}
	join4.Close()
	eventually(t, "the kernel's leave was seen", func() bool { return !has(ib, "239.1.2.3") })
}

func has(i *Interface, ip string) bool {
	mgid, _ := i.link.Multicast(netip.MustParseAddr(ip))
	for _, g := range i.Groups() {
		if g.MGID == mgid {
			return true
		}
	}
	return false
}

func TestBroadcast(t *testing.T) {
	a, b, _, _ := pair(t)
	ca := a.udp("udp4", "192.168.50.1:0", func(fd int) error {
		if err := unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "ib0"); err != nil {
			return err
		}
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1)
	})
	cb := b.udp("udp4", "0.0.0.0:7003", nil)
	exchange(t, ca, "255.255.255.255:7003", cb, []byte("to all"))
}

// TestGateway: packets for another network go to the neighbour that the routing
// table names.
func TestGateway(t *testing.T) {
	a, b, ia, ib := pair(t)
	b.Run("ip", "addr", "add", "172.16.9.1/32", "dev", "lo")
	b.Run("ip", "addr", "add", "fd99::1/128", "dev", "lo", "nodad")
	a.Run("ip", "route", "add", "172.16.9.0/24", "via", "192.168.50.2")
	a.Run("ip", "route", "add", "fd99::/64", "via", "fd50::2")
	a.ping("172.16.9.1")
	a.ping("fd99::1")
	for _, n := range ia.Neighbors() {
		if n.IP == netip.MustParseAddr("172.16.9.1") || n.Address != ib.Address() {
			t.Errorf("neighbour %+v", n)
		}
	}
}

func TestLinkLocal(t *testing.T) {
	a, _, _, ib := pair(t)
	want := ib.Address().GID().LinkLocal()
	if out := a.Run("ip", "-6", "addr", "show", "dev", "ib0"); !strings.Contains(out, "fe80::200:ffff:a09:1/64") {
		t.Errorf("addresses %s", out)
	}
	if want != netip.MustParseAddr("fe80::200:ffff:a09:2") {
		t.Errorf("link-local address %s", want)
	}
	a.Run("ip", "link", "set", "ib0", "down")
	a.Run("ip", "link", "set", "ib0", "up")
	eventually(t, "the address is back after the interface was down", func() bool {
		out, _ := a.Command("ip", "-6", "addr", "show", "dev", "ib0").Output()
		return bytes.Contains(out, []byte("fe80::200:ffff:a09:1/64"))
	})
}
