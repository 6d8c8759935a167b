package wire

import (
	"bytes"
	"net/netip"
	"testing"
)

func ipv4Packet(n int, protocol byte, payload ...byte) []byte {
	b := make([]byte, n)
	b[0], b[9] = 0x45, protocol
	copy(b[12:], []byte{192, 0, 2, 1, 192, 0, 2, 2})
	copy(b[20:], payload)
	return b
}

func ipv6Packet(n int, protocol byte, payload ...byte) []byte {
	b := make([]byte, n)
	b[0], b[6] = 0x60, protocol
	src, dst := netip.MustParseAddr("fd00::1").As16(), netip.MustParseAddr("fd00::2").As16()
	copy(b[8:], src[:])
	copy(b[24:], dst[:])
	copy(b[40:], payload)
	return b
}

func TestIP20_TooBig(t *testing.T) {
	for _, tc := range []struct {
		name  string
		typ   uint16
		p     []byte
		quote int
	}{
		{"IPv4", TypeIPv4, ipv4Packet(3000, 17), 548},
		{"IPv6", TypeIPv6, ipv6Packet(3000, 17), 1232},
		{"echo", TypeIPv4, ipv4Packet(3000, 1, 8), 548},
		{"echo of IPv6", TypeIPv6, ipv6Packet(3000, 58, 128), 1232},
		{"a short packet", TypeIPv4, ipv4Packet(100, 17), 100},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := TooBig(tc.typ, tc.p, 2044)
			head := 20
			if tc.typ == TypeIPv6 {
				head = 40
			}
			if len(b) != head+8+tc.quote || !bytes.Equal(b[head+8:], tc.p[:tc.quote]) {
				t.Fatalf("answer of %d bytes %x", len(b), b)
			}
			dst, _ := Destination(tc.typ, b)
			if tc.typ == TypeIPv4 {
				if Sum(0, b[:20]) != 0xffff || Sum(0, b[20:]) != 0xffff || !bytes.Equal(b[20:22], []byte{3, 4}) || be.Uint16(b[26:]) != 2044 || dst != netip.MustParseAddr("192.0.2.1") {
					t.Errorf("answer %x", b[:28])
				}
				return
			}
			if sumICMPv6(netip.MustParseAddr("fd00::2"), dst, b[40:]) != 0xffff || b[40] != 2 || be.Uint32(b[44:]) != 2044 || dst != netip.MustParseAddr("fd00::1") {
				t.Errorf("answer %x", b[:48])
			}
		})
	}
}

func TestIP20_NoAnswer(t *testing.T) {
	edit := func(b []byte, f func(b []byte)) []byte { f(b); return b }
	for name, p := range map[string][]byte{
		"a later fragment":        edit(ipv4Packet(3000, 17), func(b []byte) { b[7] = 5 }),
		"an error":                ipv4Packet(3000, 1, 3),
		"no sender":               edit(ipv4Packet(3000, 17), func(b []byte) { copy(b[12:], []byte{0, 0, 0, 0}) }),
		"multicast":               edit(ipv4Packet(3000, 17), func(b []byte) { b[16] = 224 }),
		"a header that is short":  edit(ipv4Packet(3000, 17), func(b []byte) { b[0] = 0x44 }),
		"a header beyond its end": edit(ipv4Packet(30, 17), func(b []byte) { b[0] = 0x4f }),
		"nothing":                 nil,
	} {
		if b := TooBig(TypeIPv4, p, 2044); b != nil {
			t.Errorf("%s: answer %x", name, b)
		}
	}
	for name, p := range map[string][]byte{
		"an error of IPv6":      ipv6Packet(3000, 58, 1),
		"ICMPv6 without a kind": ipv6Packet(40, 58),
		"no sender":             edit(ipv6Packet(3000, 17), func(b []byte) { clear(b[8:24]) }),
		"multicast":             edit(ipv6Packet(3000, 17), func(b []byte) { b[24] = 0xff }),
	} {
		if b := TooBig(TypeIPv6, p, 2044); b != nil {
			t.Errorf("%s: answer %x", name, b)
		}
	}
}

func FuzzTooBig(f *testing.F) {
	f.Add(true, ipv4Packet(60, 17))
	f.Add(false, ipv6Packet(60, 17))
	f.Fuzz(func(t *testing.T, v4 bool, p []byte) {
		typ := uint16(TypeIPv6)
		if v4 {
			typ = TypeIPv4
		}
		if b := TooBig(typ, p, 2044); len(b) > 1280 {
			t.Errorf("answer of %d bytes", len(b))
		}
	})
}
