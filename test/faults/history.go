package faults

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
)

// History judges the answers of a device against the history of writes.
//
// Every write of a block has a stamp, counted in the order in which writes are
// begun, and the block's content carries it. A read must return the last write
// that was acknowledged, or one that was begun later and has no answer yet;
// and once a write was acknowledged or seen, an older one never comes back.
//
// Writes of one block must not overlap in time, unless the earlier one has
// failed; reads may overlap with anything. All methods may be called from any
// goroutine.
type History struct {
	seed  uint64
	size  int
	mu    sync.Mutex
	last  Stamp
	block []blockHistory
}

// Stamp numbers the writes. 0 is the content of a block before the first write:
// zeroes.
type Stamp uint64

// blockHistory is the knowledge about one block. The block holds floor or one
// of open, all of them later than floor.
type blockHistory struct {
	floor Stamp   // the latest that was acknowledged or seen
	open  []Stamp // begun later, without an answer
}

// NewHistory is the history of blocks blocks of size bytes, a multiple of 32,
// that are all zero. The content of writes depends on seed, so that data of
// another history is not taken for ours.
func NewHistory(blocks, size int, seed uint64) *History {
	if size < 32 || size%32 != 0 {
		panic(fmt.Sprintf("history: blocks of %d bytes", size))
	}
	return &History{seed: seed, size: size, block: make([]blockHistory, blocks)}
}

// Blocks is the number of blocks, BlockSize the bytes of each.
func (h *History) Blocks() int    { return len(h.block) }
func (h *History) BlockSize() int { return h.size }

// Begin starts a write of block and fills buf, one block long, with its
// content.
func (h *History) Begin(block int, buf []byte) Stamp {
	h.mu.Lock()
	h.last++
	s := h.last
	b := &h.block[block]
	b.open = append(b.open, s)
	h.mu.Unlock()
	h.fill(buf, block, s)
	return s
}

// Acknowledge tells that the write has succeeded. A write that failed or got
// no answer is not told: it may have happened, now or later.
func (h *History) Acknowledge(block int, s Stamp) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.block[block].raise(s)
}

// raise makes s the floor: older writes must not be seen again.
func (b *blockHistory) raise(s Stamp) {
	if s <= b.floor {
		return
	}
	b.floor = s
	b.open = slices.DeleteFunc(b.open, func(o Stamp) bool { return o <= s })
}

// Reading is called before a read of block; its result is passed to Check.
func (h *History) Reading(block int) Stamp {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.block[block].floor
}

// Check judges the content that a read of block returned. since is the result
// of Reading from before the read.
func (h *History) Check(block int, since Stamp, content []byte) error {
	s, err := h.identify(block, content)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	b := &h.block[block]
	switch {
	case s < since:
		return fmt.Errorf("block %d holds write %d, but write %d was acknowledged or seen before: newer data is lost (seed %d)", block, s, since, h.seed)
	case s > b.floor && !slices.Contains(b.open, s):
		return fmt.Errorf("block %d holds write %d, which was never begun (seed %d)", block, s, h.seed)
	}
	b.raise(s)
	return nil
}

// identify returns the stamp of the write that content belongs to. All of
// content must belong to that write.
func (h *History) identify(block int, content []byte) (Stamp, error) {
	s := Stamp(binary.LittleEndian.Uint64(content[8:]))
	want := make([]byte, h.size)
	if h.fill(want, block, s); slices.Equal(content, want) {
		return s, nil
	}
	for at := 0; at < h.size; at += 32 {
		if slices.Equal(content[at:at+32], want[at:at+32]) {
			continue
		}
		other := Stamp(binary.LittleEndian.Uint64(content[at+8:]))
		if h.fill(want, block, other); slices.Equal(content[at:at+32], want[at:at+32]) {
			return 0, fmt.Errorf("block %d is torn: write %d at first, write %d from byte %d on (seed %d)", block, s, other, at, h.seed)
		}
		return 0, fmt.Errorf("block %d holds garbage at byte %d: % x (seed %d)", block, at, content[at:at+32], h.seed)
	}
	return 0, fmt.Errorf("block %d has %d bytes, want %d", block, len(content), h.size)
}

// fill writes the content of a write: 32 bytes at a time they tell the block,
// the write, the place and noise of these three.
func (h *History) fill(buf []byte, block int, s Stamp) {
	if s == 0 {
		clear(buf)
		return
	}
	noise := rand.NewPCG(h.seed^uint64(block), uint64(s))
	for at := 0; at < len(buf); at += 32 {
		binary.LittleEndian.PutUint64(buf[at:], uint64(block)<<32|uint64(at))
		binary.LittleEndian.PutUint64(buf[at+8:], uint64(s))
		binary.LittleEndian.PutUint64(buf[at+16:], noise.Uint64())
		binary.LittleEndian.PutUint64(buf[at+24:], noise.Uint64())
	}
}
