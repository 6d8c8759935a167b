package dev

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// upper keeps the frames that an interface hands to its Above.
type upper struct {
	mu     sync.Mutex
	frames [][]byte
}

func (u *upper) receive(f []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.frames = append(u.frames, bytes.Clone(f))
}

func (u *upper) has(etherType uint16, part []byte) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.ContainsFunc(u.frames, func(f []byte) bool { return wire.Frame(f).Type() == etherType && bytes.Contains(f, part) })
}

// ipv4 is a UDP datagram without a checksum.
func ipv4(src, dst netip.Addr, payload string) []byte {
	p := make([]byte, 28, 28+len(payload))
	p[0], p[8], p[9] = 0x45, 64, 17
	p[3], p[25] = byte(28+len(payload)), byte(8+len(payload))
	copy(p[12:], src.AsSlice())
	copy(p[16:], dst.AsSlice())
	sum := wire.Sum(0, p[:20])
	p[10], p[11] = byte(^sum>>8), byte(^sum)
	return append(p, payload...)
}

// TestAttach has users above two interfaces that are not the kernel: they send
// and receive frames, and the interfaces find neighbours for their addresses.
func TestAttach(t *testing.T) {
	ha, hb := hosts(t, 4200)
	a := ha.open(Config{Name: "ib0", Local: portA, Peers: []netip.Addr{portB}, Fabric: ha.fabric})
	b := hb.open(Config{Name: "ib0", Local: portB, Peers: []netip.Addr{portA}, Fabric: hb.fabric})
	ipA, ipB := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	var ua, ub upper
	a.Attach(Above{Receive: ua.receive})
	b.Attach(Above{Receive: ub.receive})
	a.SetPrefixes([]netip.Prefix{netip.PrefixFrom(ipA, 24)})
	send := func(i *Interface, etherType uint16, p []byte) error {
		return i.SendFrame(wire.AppendFrame(nil, etherType, p))
	}
	if err := send(a, wire.TypeIPv4, ipv4(ipA, ipB, "hello")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the question who has the address is handed over", func() bool { return ub.has(wire.TypeARP, ipB.AsSlice()) })
	if a.hasNeighbor(ipB) {
		t.Error("an interface without the address has answered")
	}
	b.SetPrefixes([]netip.Prefix{netip.PrefixFrom(ipB, 24)})
	eventually(t, "the packet arrives, which waited for the answer", func() bool { return ub.has(wire.TypeIPv4, []byte("hello")) })
	if err := send(b, wire.TypeIPv4, ipv4(ipB, ipA, "answer")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the answer arrives", func() bool { return ua.has(wire.TypeIPv4, []byte("answer")) })
	if err := a.SendFrame(make([]byte, 3)); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a frame of 3 bytes: %v, want EINVAL", err)
	}
	if err := send(a, wire.TypeIPv4, make([]byte, a.MTU()+1)); !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("a packet longer than the MTU: %v, want EMSGSIZE", err)
	}
	if err := send(a, wire.TypeIPv4, ipv4(ipA, netip.MustParseAddr("198.51.100.1"), "x")); err != nil || !a.Carrier() {
		t.Errorf("no gateway: %v, carrier %v; want the packet dropped", err, a.Carrier())
	}
}

// TestDetach gives the interface back to the kernel with its addresses.
func TestDetach(t *testing.T) {
	ha, hb := hosts(t, 4200)
	a := ha.open(Config{Name: "ib0", Local: portA, Peers: []netip.Addr{portB}, Fabric: ha.fabric}, "192.0.2.1/24")
	hb.open(Config{Name: "ib0", Local: portB, Peers: []netip.Addr{portA}, Fabric: hb.fabric}, "192.0.2.2/24")
	a.Attach(Above{Receive: func([]byte) {}})
	a.mu.Lock()
	attached := len(a.ips)
	a.mu.Unlock()
	if err := a.Detach(); err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	detached := len(a.ips)
	a.mu.Unlock()
	if attached != 0 || detached != 2 { // with link-local
		t.Errorf("%d addresses while attached, %d afterwards, want 0 and 2", attached, detached)
	}
	if err := a.SetMTU(1500); err != nil || a.MTU() != 1500 {
		t.Errorf("MTU %d, %v, want 1500", a.MTU(), err)
	}
	if err := a.SetMTU(9000); !errors.Is(err, unix.EINVAL) {
		t.Errorf("MTU 9000: %v, want EINVAL", err)
	}
	if err := errors.Join(a.SetUp(false)); err != nil || a.IsUp() {
		t.Errorf("set down: %v, up %v", err, a.IsUp())
	}
}

func (i *Interface) hasNeighbor(ip netip.Addr) bool {
	return slices.ContainsFunc(i.Neighbors(), func(e neigh.Entry) bool { return e.IP == ip && e.State != neigh.Incomplete })
}
