package wire

import (
	"math/rand/v2"
	"testing"
)

// sumWords is Sum by the words of RFC 1071.
func sumWords(sum uint16, b []byte) uint16 {
	n := uint32(sum)
	for i, v := range b {
		if i%2 == 0 {
			n += uint32(v) << 8
		} else {
			n += uint32(v)
		}
		n = n>>16 + n&0xffff
	}
	return uint16(n)
}

func TestSumOfAllLengths(t *testing.T) {
	for n := range 200 {
		for _, fill := range []func() byte{func() byte { return 0 }, func() byte { return 0xff }, func() byte { return byte(rand.Uint32()) }} {
			b := make([]byte, n)
			for i := range b {
				b[i] = fill()
			}
			for _, sum := range []uint16{0, 1, 0xffff, uint16(rand.Uint32())} {
				if got, want := Sum(sum, b), sumWords(sum, b); got != want {
					t.Fatalf("Sum(%04x, % x) = %04x, want %04x", sum, b, got, want)
				}
			}
		}
	}
}

func BenchmarkSum(b *testing.B) {
	p := make([]byte, 2000)
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		Sum(0, p)
	}
}
