package ether

import (
	"encoding/binary"
	"testing"
)

// udp returns a frame with the sum of the pseudo header as its UDP checksum, as
// Linux leaves it, and the virtio-net header that says so.
func udp(payload []byte) (h, f []byte, pseudo uint16) {
	f = make([]byte, 14+20+8, 14+20+8+len(payload))
	f = append(f, payload...)
	copy(f[26:], []byte{10, 0, 0, 1, 10, 0, 0, 2})
	n := 8 + len(payload)
	sum := uint32(0x0a00) + 1 + 0x0a00 + 2 + 17 + uint32(n)
	pseudo = uint16(sum>>16 + sum&0xffff)
	u := f[34:]
	copy(u, []byte{0x1b, 0x58, 0x1b, 0x59})
	binary.BigEndian.PutUint16(u[4:], uint16(n))
	binary.BigEndian.PutUint16(u[6:], pseudo)
	h = make([]byte, vnetHeader)
	h[0] = needsCsum
	binary.NativeEndian.PutUint16(h[6:], 34)
	binary.NativeEndian.PutUint16(h[8:], 6)
	return h, f, pseudo
}

// verify adds up the datagram and its pseudo header: with a right checksum all
// bits are set.
func verify(u []byte, pseudo uint16) bool {
	sum := uint32(pseudo)
	for i := 0; i < len(u); i += 2 {
		sum += uint32(u[i]) << 8
		if i+1 < len(u) {
			sum += uint32(u[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return sum == 0xffff
}

func TestFinishChecksum(t *testing.T) {
	for n := range 64 {
		payload := make([]byte, n)
		for i := range payload {
			payload[i] = byte(i*37 + n)
		}
		h, f, pseudo := udp(payload)
		finishChecksum(h, f)
		if !verify(f[34:], pseudo) {
			t.Errorf("%d octets of payload: the checksum %x is wrong", n, f[40:42])
		}
		h[0] = 0
		binary.BigEndian.PutUint16(f[40:], 0x1234)
		if finishChecksum(h, f); f[40] != 0x12 {
			t.Error("a checksum that is right already was changed")
		}
	}
}

func FuzzFinishChecksum(f *testing.F) {
	h, frame, _ := udp([]byte("hello"))
	f.Add(h, frame)
	f.Fuzz(func(t *testing.T, h, frame []byte) {
		if len(h) < vnetHeader {
			return
		}
		before := append([]byte(nil), frame...)
		finishChecksum(h, frame)
		changed := 0
		for i := range frame {
			if frame[i] != before[i] {
				changed++
			}
		}
		if changed > 2 {
			t.Fatalf("%d octets were changed", changed)
		}
	})
}
