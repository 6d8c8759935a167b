package wire

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	alice = NewAddress(FlagRC, 0x000456, AddrGID(addr("10.0.0.1")))
	bob   = NewAddress(0, 0xabcdef, AddrGID(addr("10.0.0.2")))
)

func TestW01_Encap(t *testing.T) {
	packet := []byte{0x45, 1, 2}
	f := Frame(AppendFrame([]byte{9}, TypeIPv4, packet)[1:])
	if want := unhex(t, "08000000 450102"); !bytes.Equal(f, want) {
		t.Fatalf("frame % x, want % x", []byte(f), want)
	}
	f[2], f[3] = 0xff, 0xff // reserved: ignored
	if !f.Valid() || f.Type() != TypeIPv4 || !bytes.Equal(f.Payload(), packet) {
		t.Errorf("type %04x, payload % x", f.Type(), f.Payload())
	}
	PutEncap(f, TypeIPv6)
	if want := unhex(t, "86dd0000 450102"); !bytes.Equal(f, want) {
		t.Errorf("frame % x, want % x", []byte(f), want)
	}
	if Frame(make([]byte, 3)).Valid() {
		t.Error("3 octets are no frame")
	}
}

func TestIP14_MTUIsTheLinkMTULess4(t *testing.T) {
	want := []int{252, 508, 1020, 2044, 4092}
	for i, m := range LinkMTUs {
		if MTU(m) != want[i] {
			t.Errorf("MTU(%d) = %d, want %d", m, MTU(m), want[i])
		}
	}
}

func TestIP03_AddressHas20Octets(t *testing.T) {
	want := "80:00:04:56:00:00:00:00:00:00:00:00:00:00:ff:ff:0a:00:00:01"
	if alice.String() != want || len(alice) != 20 {
		t.Errorf("address %s, want %s", alice, want)
	}
	if alice.Flags() != 0x80 || alice.QPN() != 0x456 || alice.GID() != AddrGID(addr("10.0.0.1")) {
		t.Errorf("flags %x, queue pair %x, GID %s", alice.Flags(), alice.QPN(), alice.GID())
	}
	if !alice.SamePort(NewAddress(0, 0x456, alice.GID())) || alice.SamePort(bob) {
		t.Error("SamePort does not compare queue pair and GID alone")
	}
	for _, s := range []string{"", want[3:], want + ":00", want[:len(want)-1], strings.Replace(want, "ff", "fg", 1)} {
		if _, err := ParseAddress(s); err == nil {
			t.Errorf("ParseAddress(%q) returned no error", s)
		}
	}
	for a, valid := range map[Address]bool{
		alice: true, bob: true,
		NewAddress(0, 0, alice.GID()):            false,
		NewAddress(0, 1, alice.GID()):            false,
		NewAddress(0, MulticastQPN, bob.GID()):   false,
		NewAddress(0, 5, Link{}.Broadcast()):     false,
		NewAddress(0, 5, GID{}):                  false,
		MulticastAddress(Link{2, 2}.Broadcast()): false,
	} {
		if a.ValidUnicast() != valid {
			t.Errorf("%s: ValidUnicast is %t", a, !valid)
		}
	}
}

func TestMulticastMaps(t *testing.T) {
	link := Link{PKey: 0xffff, Scope: ScopeLinkLocal}
	for name, groups := range map[string][][2]string{
		"W-05 IPv4 groups": {
			{"255.255.255.255", "ff12:401b:ffff::ffff:ffff"},
			{"224.0.0.1", "ff12:401b:ffff::1"},
			{"239.1.2.3", "ff12:401b:ffff::f01:203"},
			{"239.255.255.255", "ff12:401b:ffff::fff:ffff"},
		},
		"W-06 IPv6 groups": {
			{"ff02::1", "ff12:601b:ffff::1"},
			{"ff02::1:ff00:2", "ff12:601b:ffff::1:ff00:2"},
			{"ff0e:1:2:3:4:5:6:7", "ff12:601b:ffff:3:4:5:6:7"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, g := range groups {
				got, err := link.Multicast(addr(g[0]))
				if want := GID(addr(g[1]).As16()); err != nil || got != want {
					t.Errorf("%s maps to %s, %v; want %s", g[0], got, err, want)
				}
			}
		})
	}
	for _, s := range []string{"10.0.0.1", "fe80::1", "::ffff:224.0.0.1"} {
		if g, err := link.Multicast(addr(s)); err == nil {
			t.Errorf("%s maps to %s: it is not a group", s, g)
		}
	}
}

func TestW07_MGIDHasTheFullMembersPKey(t *testing.T) {
	for _, pkey := range []uint16{0x0001, 0x8001} {
		link := Link{PKey: pkey, Scope: 5}
		v6, _ := link.Multicast(addr("ff02::1"))
		for _, g := range []GID{link.Broadcast(), v6} {
			if got, ok := PKeyOf(g); got != 0x8001 || !ok || g[1] != 0x15 {
				t.Errorf("P_Key %04x: MGID %s has P_Key %04x, %t", pkey, g, got, ok)
			}
		}
	}
	if _, ok := PKeyOf(alice.GID()); ok {
		t.Error("the GID of a port is no multicast GID")
	}
}

func TestGIDsAreWrittenAsLinuxDoes(t *testing.T) {
	if s := (Link{0xffff, 2}).Broadcast().String(); s != "ff12:401b:ffff:0:0:0:ffff:ffff" {
		t.Error(s)
	}
}

func TestW02_ARP(t *testing.T) {
	f := ARPFields{Op: ARPRequest, SenderHW: alice, SenderIP: addr("192.168.1.1"), TargetIP: addr("192.168.1.2")}
	a := NewARP(f)
	want := unhex(t, `0020 0800 14 04 0001
		80000456 00000000000000000000ffff0a000001 c0a80101
		00000000 00000000000000000000000000000000 c0a80102`)
	if len(a) != 56 || !bytes.Equal(a, want) {
		t.Fatalf("ARP\n% x, want\n% x", []byte(a), want)
	}
	if !a.Valid() || a.Fields() != f {
		t.Errorf("ARP says %+v, want %+v", a.Fields(), f)
	}
	for at, name := range map[int]string{1: "hardware type", 2: "protocol", 4: "hardware length", 5: "protocol length"} {
		bad := bytes.Clone(a)
		bad[at] ^= 1
		if ARP(bad).Valid() {
			t.Errorf("ARP with a wrong %s is valid", name)
		}
	}
	if a[:55].Valid() {
		t.Error("ARP of 55 octets is valid")
	}
}

func TestW09_NeighborDiscoveryOption(t *testing.T) {
	f := NDFields{Type: NDNeighborSolicit, Src: addr("fe80::1"), Dst: SolicitedNode(addr("fe80::2")),
		Target: addr("fe80::2"), LinkLayer: alice, HasLinkLayer: true}
	p := NewND(f)
	option := p[len(p)-24:]
	if want := append([]byte{1, 3, 0, 0}, alice[:]...); !bytes.Equal(option, want) {
		t.Fatalf("option % x, want % x", []byte(option), want)
	}
	if !p.Valid() || p.Fields() != f || NDType(p) != NDNeighborSolicit {
		t.Errorf("solicitation says %+v, want %+v", p.Fields(), f)
	}
	f = NDFields{Type: NDNeighborAdvert, Flags: NDSolicited | NDOverride, Src: addr("fe80::2"), Dst: addr("fe80::1"),
		Target: addr("fe80::2"), LinkLayer: bob, HasLinkLayer: true}
	if p = NewND(f); !p.Valid() || p.Fields() != f || p[len(p)-24] != 2 {
		t.Errorf("advertisement says %+v, want %+v", p.Fields(), f)
	}
}

func TestND_Malformed(t *testing.T) {
	good := NDFields{Type: NDNeighborSolicit, Src: addr("fe80::1"), Dst: SolicitedNode(addr("fe80::2")),
		Target: addr("fe80::2"), LinkLayer: alice, HasLinkLayer: true}
	fix := func(p ND) ND { // makes the checksum right again
		p[42], p[43] = 0, 0
		be.PutUint16(p[42:], ^sumICMPv6(p.Fields().Src, p.Fields().Dst, p[ipv6Len:]))
		return p
	}
	for name, change := range map[string]func(p ND) ND{
		"hop limit 254":           func(p ND) ND { p[7] = 254; return p },
		"checksum":                func(p ND) ND { p[42] ^= 1; return p },
		"code 1":                  func(p ND) ND { p[41] = 1; return fix(p) },
		"cut":                     func(p ND) ND { return p[:len(p)-1] },
		"option of length 0":      func(p ND) ND { p[65] = 0; return fix(p) },
		"option beyond the end":   func(p ND) ND { p[65] = 4; return fix(p) },
		"option of Ethernet":      func(p ND) ND { p[5] -= 16; p = p[:len(p)-16]; p[65] = 1; return fix(p) },
		"target is a group":       func(p ND) ND { p[48] = 0xff; return fix(p) },
		"option, no source":       func(p ND) ND { clear(p[8:24]); return fix(p) },
		"another type of message": func(p ND) ND { p[40] = NDRouterSolicit; return fix(p) },
	} {
		if p := change(NewND(good)); p.Valid() {
			t.Errorf("%s: valid", name)
		}
	}
}

func TestConnectedModeFormats(t *testing.T) {
	p := NewCMPrivate(0x456, 65524)
	if want := unhex(t, "00000456 0000fff4"); !bytes.Equal(p, want) || p.QPN() != 0x456 || p.ReceiveMTU() != 65524 || !p.Valid() {
		t.Errorf("private data % x, want % x", []byte(p), want)
	}
	for _, bad := range []CMPrivate{nil, p[:7], NewCMPrivate(1, 4)} {
		if bad.Valid() {
			t.Errorf("private data % x is valid", []byte(bad))
		}
	}
	if ServiceIDRFC(0x456) != 0x0100000000000456 || ServiceIDLinux(0x456) != 0x1000000000000456 {
		t.Errorf("service IDs %016x and %016x", ServiceIDRFC(0x456), ServiceIDLinux(0x456))
	}
	for id, want := range map[uint64]bool{0x0100000000000456: true, 0x1000000000000456: true, 0x0000000001060456: false, 0x1100000000000456: false} {
		if qpn, ok := ServiceQPN(id); ok != want || ok && qpn != 0x456 {
			t.Errorf("service ID %016x: queue pair %x, %t", id, qpn, ok)
		}
	}
}

func TestInterfaceID(t *testing.T) {
	if got := alice.GID().LinkLocal(); got != addr("fe80::200:ffff:a00:1") {
		t.Errorf("link-local address %s", got)
	}
}

func FuzzFrame(f *testing.F) {
	f.Add([]byte(AppendFrame(nil, TypeARP, NewARP(ARPFields{Op: 1, SenderHW: alice, SenderIP: addr("1.2.3.4"), TargetIP: addr("1.2.3.5")}))))
	f.Add([]byte(AppendFrame(nil, TypeIPv6, NewND(NDFields{Type: NDNeighborSolicit, Src: addr("fe80::1"), Dst: SolicitedNode(addr("fe80::2")),
		Target: addr("fe80::2"), LinkLayer: alice, HasLinkLayer: true}))))
	f.Add([]byte(AppendFrame(nil, TypeIPv6, NewND(NDFields{Type: NDNeighborAdvert, Flags: 0x60, Src: addr("fe80::1"), Dst: addr("fe80::2"), Target: addr("fe80::1")}))))
	f.Fuzz(func(t *testing.T, b []byte) {
		frame := Frame(b)
		if !frame.Valid() {
			return
		}
		p := frame.Payload()
		if a := ARP(p); a.Valid() && !bytes.Equal(NewARP(a.Fields()), a[:ARPLen]) {
			t.Errorf("ARP % x is not what its fields make", p)
		}
		// Fields survive being written again.
		if n := ND(p); n.Valid() {
			if again := NewND(n.Fields()); !again.Valid() || again.Fields() != n.Fields() {
				t.Errorf("ND % x says %+v, and %+v when it is written again", p, n.Fields(), again.Fields())
			}
		}
		if dst, ok := Destination(frame.Type(), p); ok && dst.Is4() != (frame.Type() == TypeIPv4) {
			t.Errorf("type %04x has the destination %s", frame.Type(), dst)
		}
	})
}

func FuzzParseAddress(f *testing.F) {
	f.Add(alice.String())
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParseAddress(s)
		if err == nil && !strings.EqualFold(a.String(), s) {
			t.Errorf("%q was parsed as %s", s, a)
		}
	})
}

func FuzzMulticast(f *testing.F) {
	f.Add([]byte{239, 1, 2, 3}, uint16(0xffff), byte(2))
	f.Fuzz(func(t *testing.T, ip []byte, pkey uint16, scope byte) {
		a, ok := netip.AddrFromSlice(ip)
		if !ok {
			return
		}
		g, err := Link{pkey, scope}.Multicast(a)
		if err != nil {
			return
		}
		if got, ok := PKeyOf(g); !ok || got != pkey|0x8000 || MulticastAddress(g).ValidUnicast() || g[1] != 0x10|scope&15 {
			t.Errorf("%s maps to %s with P_Key %04x", a, g, pkey)
		}
	})
}

func TestSum(t *testing.T) {
	b := unhex(t, "45000073 00004000 4011 0000 c0a80001 c0a800c7")
	if s := ^Sum(0, b); s != 0xb861 {
		t.Errorf("checksum %04x, want b861", s)
	}
	for n := range b { // in two parts, and of odd length
		if n%2 == 0 && Sum(Sum(0, b[:n]), b[n:]) != Sum(0, b) {
			t.Errorf("sum in two parts differs at %d", n)
		}
	}
	if Sum(0, []byte{1}) != 0x0100 {
		t.Error("the last byte of an odd length is not padded with 0")
	}
}
