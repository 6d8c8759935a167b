package ether

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

func addr(qpn uint32, last byte) wire.Address {
	return wire.NewAddress(0, qpn, wire.AddrGID(netip.AddrFrom4([4]byte{10, 0, 0, last})))
}

var local = addr(0x101, 1)

func TestTable_AllHostsMakeTheSameAddress(t *testing.T) {
	a, b := NewTable(local), NewTable(addr(0x102, 2))
	if b.MAC(local) != a.Own() || a.MAC(addr(0x102, 2)) != b.Own() {
		t.Error("a host has another Ethernet address at its neighbour")
	}
	if m := a.Own(); m[0] != 2 {
		t.Errorf("%s is not local and unicast", m)
	}
}

func TestTable_LearnsFlags(t *testing.T) {
	tb, peer := NewTable(local), addr(0x200, 2)
	m := tb.MAC(peer)
	flagged := peer
	flagged[0] = wire.FlagRC
	if tb.Learn(flagged) != m {
		t.Error("the flags are part of the hash")
	}
	if tb.MAC(peer) != m {
		t.Error("another Ethernet address after Learn")
	}
	if a, ok := tb.Address(m); !ok || a != flagged {
		t.Errorf("address %s, want %s", a, flagged)
	}
}

func TestTable_Collision(t *testing.T) {
	tb, peer := NewTable(local), addr(0x200, 2)
	tb.SetKernel(Hash(peer, 0)) // the device has it
	m := tb.MAC(peer)
	if m != Hash(peer, 1) || tb.Stats().Collisions != 1 {
		t.Errorf("%s, want the second choice %s; %+v", m, Hash(peer, 1), tb.Stats())
	}
	if a, ok := tb.Address(m); !ok || a != peer {
		t.Errorf("%s leads to %s", m, a)
	}
}

func TestTable_IsBounded(t *testing.T) {
	tb := NewTable(local)
	kept := addr(7, 7)
	m := tb.MAC(kept)
	for n := uint32(0); n < 2*maxPeers; n++ {
		tb.MAC(addr(0x1000+n, 3))
		tb.Address(m)
	}
	if n := len(tb.Peers()); n != maxPeers || len(tb.byPort) != n || tb.Stats().Evicted != maxPeers+1 {
		t.Errorf("%d peers, %d; %+v", n, len(tb.byPort), tb.Stats())
	}
	if _, ok := tb.Address(m); !ok {
		t.Error("the neighbour that was used all the time is gone")
	}
}

func ethernetARP(op byte, sender MAC, sip byte, target MAC, tip byte) []byte {
	p := []byte{0, 1, 8, 0, 6, 4, 0, op}
	p = append(append(p, sender[:]...), 10, 1, 0, sip)
	return append(append(p, target[:]...), 10, 1, 0, tip)
}

func TestARP(t *testing.T) {
	a, b := NewTable(local), NewTable(addr(0x102, 2))
	peer := addr(0x102, 2)
	request := ethernetARP(1, a.Own(), 1, MAC{}, 2)
	onWire, ok := a.ARPToLink(request)
	if !ok || onWire.SenderHW() != local || onWire.TargetHW() != (wire.Address{}) || len(onWire) != 56 {
		t.Fatalf("request %x %t", []byte(onWire), ok)
	}
	got, ok := b.ARPFromLink(local, onWire)
	if !ok || !bytes.Equal(got, request) {
		t.Errorf("request arrives as\n%x, want\n%x", got, request)
	}
	reply := ethernetARP(2, b.Own(), 2, a.Own(), 1)
	onWire, ok = b.ARPToLink(reply)
	if !ok || onWire.SenderHW() != peer || onWire.TargetHW() != local {
		t.Fatalf("reply %x %t", []byte(onWire), ok)
	}
	if got, ok = a.ARPFromLink(peer, onWire); !ok || !bytes.Equal(got, reply) {
		t.Errorf("reply arrives as\n%x, want\n%x", got, reply)
	}
	if _, ok := a.ARPFromLink(addr(0x999, 9), onWire); ok {
		t.Error("a reply with the address of another neighbour was taken")
	}
	for _, bad := range [][]byte{nil, request[:27], append([]byte{0, 32}, request[2:]...), ethernetARP(9, a.Own(), 1, MAC{}, 2)} {
		if _, ok := a.ARPToLink(bad); ok {
			t.Errorf("%x was taken", bad)
		}
	}
}

func TestND(t *testing.T) {
	b := NewTable(addr(0x102, 2))
	src, dst := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("ff02::1:ff00:2")
	want := wire.NewND(wire.NDFields{Type: wire.NDNeighborSolicit, Src: src, Dst: dst, Target: netip.MustParseAddr("fe80::2"), LinkLayer: local, HasLinkLayer: true})
	kernel, ok := b.NDFromLink(local, want)
	if !ok || len(kernel) != len(want)-16 {
		t.Fatalf("%x %t", kernel, ok)
	}
	m := Hash(local, 0)
	if !bytes.Equal(kernel[64:], append([]byte{1, 1}, m[:]...)) {
		t.Errorf("option %x, want the address %s", kernel[64:], m)
	}
	a := NewTable(local)
	back, ok := a.NDToLink(kernel)
	if !ok || !bytes.Equal(back, want) {
		t.Errorf("back on the link:\n%x, want\n%x", back, want)
	}
	if _, ok := b.NDFromLink(addr(0x999, 9), want); ok {
		t.Error("a solicitation with the address of another neighbour was taken")
	}
	kernel[50] ^= 1
	if _, ok := a.NDToLink(kernel); ok {
		t.Error("a wrong checksum was taken")
	}
}

func TestGroup(t *testing.T) {
	for ip, want := range map[string]string{"239.129.2.3": "01:00:5e:01:02:03", "ff02::1:ff00:2": "33:33:ff:00:00:02"} {
		if got := Group(netip.MustParseAddr(ip)).String(); got != want {
			t.Errorf("%s: %s, want %s", ip, got, want)
		}
	}
}

// FuzzFromLink: whatever comes from the link, the result is a packet of Ethernet
// that the other direction takes.
func FuzzFromLink(f *testing.F) {
	src := netip.MustParseAddr("fe80::1")
	f.Add(true, []byte(wire.NewARP(wire.ARPFields{Op: 1, SenderHW: local, SenderIP: netip.MustParseAddr("10.1.0.1"), TargetIP: netip.MustParseAddr("10.1.0.2")})))
	f.Add(false, []byte(wire.NewND(wire.NDFields{Type: wire.NDNeighborAdvert, Src: src, Dst: src, Target: src, LinkLayer: local, HasLinkLayer: true})))
	f.Fuzz(func(t *testing.T, arp bool, b []byte) {
		tb := NewTable(addr(0x102, 2))
		if arp {
			if p, ok := tb.ARPFromLink(local, b); ok {
				if back, ok := NewTable(local).ARPToLink(p); !ok || back.SenderHW() != local {
					t.Errorf("%x does not go back", p)
				}
			}
			return
		}
		if p, ok := tb.NDFromLink(local, b); ok {
			if back, ok := NewTable(local).NDToLink(p); !ok || len(back) != len(b) {
				t.Errorf("%x does not go back", p)
			}
		}
	})
}
