package load

import (
	"math/rand/v2"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// chooser draws the requests of one job: operation, place and length.
type chooser struct {
	w       *Workload
	rng     *rand.Rand
	region  region
	align   uint64   // of places and lengths
	weights int      // of all sizes
	popular *scatter // nil: all places alike
	next    uint64   // place behind the last request, from the region's start
	left    int      // requests that still follow it
}

// region is the part of a device that a job has for itself.
type region struct{ first, size uint64 }

// part is the i-th of n equal parts of r, at multiples of align.
func (r region) part(i, n int, align uint64) region {
	size := r.size / uint64(n) / align * align
	return region{r.first + uint64(i)*size, size}
}

// newChooser draws in r, in multiples of the device's blocks. The same seed
// draws the same.
func newChooser(w *Workload, r region, block uint32, seed uint64) *chooser {
	c := &chooser{w: w, region: r, rng: rand.New(rand.NewPCG(seed, 1)), align: max(uint64(block), uint64(w.smallest()))}
	for _, b := range w.Blocks {
		c.weights += b.Weight
	}
	if w.Zipf > 0 {
		c.popular = newScatter(c.rng, w.Zipf, r.size/c.align)
	}
	return c
}

func (c *chooser) choose() (op blk.Op, off uint64, n int) {
	op, n = c.op(), c.length()
	switch {
	case !c.w.Random:
	case c.left > 0:
		c.left--
	default:
		c.next, c.left = c.draw(), max(c.w.InRow, 1)-1
	}
	if c.next+uint64(n) > c.region.size {
		c.next = c.back(uint64(n))
	}
	off = c.region.first + c.next
	c.next += uint64(n)
	return op, off, n
}

// back is where a request of n bytes goes that does not fit any more: to the
// start if it is one of a sequence, else a bit before the end.
func (c *chooser) back(n uint64) uint64 {
	if !c.w.Random {
		return 0
	}
	return (c.region.size - n) / c.align * c.align
}

func (c *chooser) op() blk.Op {
	if c.w.Reads == 100 || c.w.Reads > 0 && c.rng.IntN(100) < c.w.Reads {
		return blk.Read
	}
	return blk.Write
}

func (c *chooser) length() int {
	n := c.w.Blocks[0].Bytes
	if len(c.w.Blocks) > 1 {
		n = c.draws()
	}
	return (n + int(c.align) - 1) / int(c.align) * int(c.align)
}

func (c *chooser) draws() int {
	k := c.rng.IntN(c.weights)
	for _, b := range c.w.Blocks {
		if k -= b.Weight; k < 0 {
			return b.Bytes
		}
	}
	panic("weights do not add up")
}

func (c *chooser) draw() uint64 {
	places := c.region.size / c.align
	if c.popular != nil {
		return c.popular.draw() * c.align
	}
	return c.rng.Uint64N(places) * c.align
}
