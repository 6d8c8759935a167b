package load

import (
	"math/bits"
	"math/rand/v2"
)

// scatter draws places by Zipf's law: the k-th most popular of n is drawn in
// proportion to 1/k^s. Popular places do not lie together.
type scatter struct {
	zipf   *rand.Zipf
	n      uint64
	stride uint64
}

func newScatter(rng *rand.Rand, s float64, n uint64) *scatter {
	return &scatter{zipf: rand.NewZipf(rng, s, 1, n-1), n: n, stride: strideOf(n)}
}

// strideOf is a step that visits each of n places once, in wide leaps: near n
// divided by the golden ratio, without a divisor in common with n.
func strideOf(n uint64) uint64 {
	stride := uint64(float64(n)*0.6180339887) | 1
	for gcd(stride, n) != 1 {
		stride += 2
	}
	return stride
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func (s *scatter) draw() uint64 { return s.place(s.zipf.Uint64()) }

// place is where the rank-th most popular place is, from 0.
func (s *scatter) place(rank uint64) uint64 {
	hi, lo := bits.Mul64(rank, s.stride)
	return bits.Rem64(hi, lo, s.n)
}
