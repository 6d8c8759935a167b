package main

import (
	"math/bits"
	"time"
)

// histogram counts durations in buckets with a width of 1/32 of their value.
type histogram struct {
	count [64 * 32]uint64
	n     uint64
	sum   time.Duration
}

func bucket(d time.Duration) int {
	v := uint64(max(d, 0))
	if v < 32 {
		return int(v)
	}
	e := bits.Len64(v) - 6 // v>>e has six bits; the first is 1
	return e*32 + int(v>>e)
}

// middle is the inverse of bucket.
func middle(i int) float64 {
	if i < 64 {
		return float64(i)
	}
	e := i/32 - 1
	return (float64(i-e*32) + 0.5) * float64(uint64(1)<<e)
}

func (h *histogram) add(d time.Duration) {
	h.count[bucket(d)]++
	h.n++
	h.sum += d
}

func (h *histogram) merge(o *histogram) {
	for i, n := range o.count {
		h.count[i] += n
	}
	h.n += o.n
	h.sum += o.sum
}

// quantile returns nanoseconds.
func (h *histogram) quantile(q float64) float64 {
	want := uint64(q * float64(h.n))
	for i, n := range h.count {
		if want < n {
			return middle(i)
		}
		want -= n
	}
	return 0
}

func (h *histogram) fill(s *sample) {
	s.IOs = h.n
	s.Mean = float64(h.sum) / float64(max(h.n, 1)) / 1e3
	s.P50, s.P99 = h.quantile(0.5)/1e3, h.quantile(0.99)/1e3
}
