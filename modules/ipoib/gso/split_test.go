package gso

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// tcpPacket makes a packet with n bytes of payload and options of 12 bytes.
func tcpPacket(v6 bool, n int, flags byte) []byte {
	head := ipv4Len
	if v6 {
		head = ipv6Len
	}
	b := make([]byte, head+32+n)
	if v6 {
		b[0], b[6], b[7], b[23], b[39] = 0x60, protocolTCP, 64, 1, 2
		be.PutUint16(b[4:], uint16(len(b)-head))
	} else {
		b[0], b[8], b[9], b[15], b[19] = 0x45, 64, protocolTCP, 1, 2
		be.PutUint16(b[2:], uint16(len(b)))
		be.PutUint16(b[4:], 0xfffe)
	}
	t := b[head:]
	be.PutUint32(t[4:], 0xfffffff0)
	t[12], t[13] = 8<<4, flags
	for i := range t[32:] {
		t[32+i] = byte(rand.Uint32())
	}
	return b
}

func fresh(n int) []byte { return make([]byte, n) }

// checksums reports whether those of a segment are right.
func checksums(s []byte) bool {
	p, err := parseTCP(s)
	if err != nil {
		return false
	}
	addresses := s[12:20]
	if p.v6 {
		addresses = s[8:40]
	} else if wire.Sum(0, s[:p.ip]) != 0xffff {
		return false
	}
	t := s[p.ip:]
	return wire.Sum(wire.Sum(wire.Sum(0, addresses), []byte{0, protocolTCP, byte(len(t) >> 8), byte(len(t))}), t) == 0xffff
}

func TestIP22_Segments(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		b := tcpPacket(v6, 2500, flagFIN|flagPSH|flagCWR|0x10)
		p, _ := parseTCP(b)
		head := p.ip + p.tcp
		var payload []byte
		var flags []byte
		n := 0
		err := TCP(b, 1000, fresh, func(s []byte) {
			if !checksums(s) {
				t.Errorf("segment %d: wrong checksum", n)
			}
			if got, want := be.Uint32(s[p.ip+4:]), uint32(0xfffffff0)+uint32(1000*n); got != want {
				t.Errorf("segment %d: sequence number %08x, want %08x", n, got, want)
			}
			if !v6 && (int(be.Uint16(s[2:])) != len(s) || be.Uint16(s[4:]) != 0xfffe+uint16(n)) || v6 && int(be.Uint16(s[4:])) != len(s)-ipv6Len {
				t.Errorf("segment %d: length or identification", n)
			}
			payload, flags = append(payload, s[head:]...), append(flags, s[p.ip+13])
			n++
		})
		if err != nil || !bytes.Equal(payload, b[head:]) {
			t.Fatalf("%d bytes of payload in %d segments, %v", len(payload), n, err)
		}
		if want := []byte{0x10 | flagCWR, 0x10, 0x10 | flagFIN | flagPSH}; !bytes.Equal(flags, want) {
			t.Errorf("flags %x, want %x", flags, want)
		}
	}
}

func TestMalformed(t *testing.T) {
	good := tcpPacket(false, 100, 0x10)
	udp := bytes.Clone(good)
	udp[9] = 17
	long := bytes.Clone(good)
	long[ipv4Len+12] = 0xf0
	short := bytes.Clone(good)
	short[ipv4Len+12] = 0x40
	for name, tc := range map[string]struct {
		b    []byte
		size int
	}{
		"empty": {nil, 10}, "UDP": {udp, 10}, "no payload": {good[:52], 10}, "half a header": {good[:30], 10}, "header too short": {short, 10},
		"header beyond the end": {long[:60], 10}, "size 0": {good, 0}, "IPv5": {append([]byte{0x55}, good[1:]...), 10},
	} {
		if err := TCP(tc.b, tc.size, fresh, func([]byte) { t.Errorf("%s: a segment", name) }); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func FuzzTCP(f *testing.F) {
	f.Add(tcpPacket(false, 300, 0x11), 100)
	f.Add(tcpPacket(true, 300, 0x11), 77)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		before := bytes.Clone(b)
		var payload []byte
		err := TCP(b, size, fresh, func(s []byte) {
			p, err := parseTCP(s)
			if err != nil || !checksums(s) || len(s)-p.ip-p.tcp > size {
				t.Fatalf("segment % x of % x", s, b)
			}
			payload = append(payload, s[p.ip+p.tcp:]...)
		})
		if !bytes.Equal(b, before) {
			t.Error("the packet was changed")
		}
		if p, perr := parseTCP(b); err == nil && (perr != nil || !bytes.Equal(payload, b[p.ip+p.tcp:])) {
			t.Errorf("%d bytes of payload came out", len(payload))
		}
	})
}
