package gcm

import (
	"crypto/cipher"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestNothingIsReadBeyond seals and opens between pages that must not be touched.
func TestNothingIsReadBeyond(t *testing.T) {
	if !wide {
		t.Skip("this CPU has no VAES with VPCLMULQDQ")
	}
	page := os.Getpagesize()
	b, err := unix.Mmap(-1, 0, 3*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	for _, guard := range [][]byte{b[:page], b[2*page:]} {
		if err := unix.Mprotect(guard, unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	g, nonce := ours(t, make([]byte, 16)), make([]byte, NonceSize)
	room := b[page : 2*page : 2*page]
	for n := range 700 {
		for _, buf := range [][]byte{room[: n+TagSize : n+TagSize], room[page-n-TagSize:]} {
			g.Seal(buf[:0], nonce, buf[:n], buf[:min(n, 5)])
			g.Open(buf[:0], nonce, buf, nil)
		}
	}
	partsBeyond(t, g, room)
}

// partsBeyond seals a part at either end of room, which has nothing around it,
// and opens to there. What is sealed is at its ends, too.
func partsBeyond(t *testing.T, g cipher.AEAD, room []byte) {
	t.Helper()
	var s Sealing
	nonce, page, other := make([]byte, NonceSize), len(room), make([]byte, 2048)
	for n := range 1200 {
		for _, part := range [][]byte{room[:n:n], room[page-n:]} {
			for _, head := range []int{0, 16, 20, stride} {
				dst := other[:head+n+TagSize]
				s.Begin(g, dst, nonce, nil)
				s.Add(other[len(other)-head:])
				s.Add(part)
				s.End()
				if _, err := OpenSplit(g, part, nonce, dst, nil); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, dst := range [][]byte{room[: n+TagSize : n+TagSize], room[page-n-TagSize:]} {
			s.Begin(g, dst, nonce, nil)
			s.Add(other[:n/3])
			s.Add(other[:n-n/3])
			s.End()
			if _, err := OpenSplit(g, other[:n/2], nonce, dst, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestPowers multiplies by x and back.
func TestPowers(t *testing.T) {
	x := element{1 << 62, 0}
	for _, e := range []element{{1 << 63, 0}, {0, 1}, {0xdeadbeef << 32, 0x12345}, {^uint64(0), ^uint64(0)}} {
		b := e.power()
		low, high := uint64(0), uint64(0)
		for i := range 8 {
			low |= uint64(b[i]) << (8 * i)
			high |= uint64(b[8+i]) << (8 * i)
		}
		if got := (element{high, low}).times(x); got != e {
			t.Errorf("x*(%x/x) = %x", e, got)
		}
	}
}
