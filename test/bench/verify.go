package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// The verifying twin of a workload moves blocks of the same size with the same
// number in flight. It writes blocks with place and version in every word, and
// reads them back later: data that is lost, late, torn or misplaced shows.

// checker has the expected contents of the blocks of one job. The blocks of
// jobs do not overlap, and a block has one I/O at a time.
type checker struct {
	w        workload
	first    uint64   // offset of block 0
	versions []uint64 // by block; 0: never written
	flying   []bool   // by block
	current  []flight // by I/O
	version  uint64
}

type flight struct {
	block int
	op    blk.Op
}

// newChecker takes few blocks, so that each is written and read many times.
func newChecker(w workload, job int, size uint64) *checker {
	blocks := min(2*w.Depth, int(size)/w.Block/w.Jobs)
	return &checker{w: w, first: uint64(job*blocks) * uint64(w.Block), versions: make([]uint64, blocks),
		flying: make([]bool, blocks), current: make([]flight, w.Depth)}
}

// begin chooses operation and place of I/O i, and fills the data of a write.
// buf is its memory from an offset on.
func (c *checker) begin(i int, buf func(off int) []byte) (uint64, blk.Op) {
	b := rand.IntN(len(c.versions))
	for c.flying[b] { // there are more blocks than I/Os
		b = (b + 1) % len(c.versions)
	}
	c.flying[b] = true
	op := blk.Read
	if c.versions[b] == 0 || rand.IntN(2) == 0 {
		op = blk.Write
		c.version++
		c.versions[b] = c.version
		c.each(b, buf, func(word []byte, want uint64) { binary.LittleEndian.PutUint64(word, want) })
	}
	c.current[i] = flight{b, op}
	return c.offset(b), op
}

// finish compares the data of I/O i, a read.
func (c *checker) finish(i int, buf func(off int) []byte) error {
	f := c.current[i]
	c.flying[f.block] = false
	if f.op == blk.Write {
		return nil
	}
	var err error
	c.each(f.block, buf, func(word []byte, want uint64) {
		if got := binary.LittleEndian.Uint64(word); got != want && err == nil {
			err = fmt.Errorf("block at %d, version %d: read %#x, want %#x", c.offset(f.block), c.versions[f.block], got, want)
		}
	})
	return err
}

func (c *checker) offset(block int) uint64 { return c.first + uint64(block*c.w.Block) }

// each visits the words of a block with their expected values.
func (c *checker) each(block int, buf func(off int) []byte, visit func(word []byte, want uint64)) {
	x := c.offset(block) ^ c.versions[block]<<40
	for off := 0; off < c.w.Block; {
		b := buf(off)
		for k := 0; k < len(b); k += 8 {
			x = x*6364136223846793005 + 1442695040888963407 // Knuth's MMIX
			visit(b[k:k+8], x)
		}
		off += len(b)
	}
}

// verifyTime is how long a verifying twin runs.
const verifyTime = 40 * time.Millisecond

// verify runs the twin of each workload of each target of ours.
func (s *site) verify(ctx context.Context, r *results, out io.Writer) error {
	for _, t := range s.targets {
		for _, w := range s.plan.loads[t.name] {
			if t.verify == nil {
				continue
			}
			err := t.verify(ctx, w, verifyTime)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			what := fmt.Sprintf("%s, %s", t.name, w.Name)
			if err != nil {
				r.errors = append(r.errors, fmt.Sprintf("verify %s: %v", what, err))
				fmt.Fprintf(out, "wrong data: %s: %v\n", what, err)
				continue
			}
			r.verified = append(r.verified, what)
		}
	}
	return nil
}
