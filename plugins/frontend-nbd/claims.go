package main

import "sync/atomic"

// A write of less than a block reads the block, changes it and writes it
// back. Between the two nobody else may change the block, or one of the two
// writes is lost. Connections run on several queues, so the claims on a
// device's blocks are shared between them, by atomics only:
//
//   - a plain write publishes its range, then looks for claimed blocks;
//   - a read-modify-write claims its block, then looks for published ranges.
//
// Each publishes before it looks, so of two that overlap at least one sees
// the other. A plain write that meets a claim withdraws and waits; a claim
// stays, keeps further plain writes away, and waits for those under way to
// end. A read-modify-write holds one block at a time and needs nothing else,
// so nobody waits for one who waits.
//
// Where writes are exclusive a plain write also waits for others that overlap
// it. Of two that find each other the one with the lower slot stays published
// and looks again, the other one withdraws: so one of them goes on.

// claimBuckets bounds the read-modify-writes under way on a device. Blocks
// that share a bucket exclude one another.
const claimBuckets = 16

type claims struct {
	exclusive atomic.Bool // writes that overlap are not under way at once

	active  atomic.Int32 // claimed buckets
	waiting atomic.Int32 // operations of all queues that met a conflict
	blocks  [claimBuckets]atomic.Uint64
	writes  []span // by slot
}

// span is the range of a plain write under way; end is 0 when there is none.
type span struct {
	start, end atomic.Uint64
}

// begin publishes a plain write of [start, end). False: it overlaps a claimed
// block, or a write where these are exclusive; try again later.
func (c *claims) begin(slot uint32, start, end, blockSize uint64) bool {
	s := &c.writes[slot]
	s.start.Store(start)
	s.end.Store(end)
	if c.active.Load() != 0 && c.claimed(start, end, blockSize) {
		s.end.Store(0)
		return false
	}
	return !c.exclusive.Load() || c.alone(slot, start, end)
}

// claimed reports whether a block of [start, end) is.
func (c *claims) claimed(start, end, blockSize uint64) bool {
	for i := range c.blocks {
		b := c.blocks[i].Load()
		if b == 0 {
			continue
		}
		if at := (b - 1) * blockSize; at < end && start < at+blockSize {
			return true
		}
	}
	return false
}

// alone reports whether no other plain write overlaps [start, end), which slot
// has published. It withdraws the write for one with a lower slot.
func (c *claims) alone(slot uint32, start, end uint64) bool {
	alone := true
	for i := range c.writes {
		s := &c.writes[i]
		if e := s.end.Load(); uint32(i) == slot || e <= start || s.start.Load() >= end {
			continue
		}
		if uint32(i) < slot {
			c.writes[slot].end.Store(0)
			return false
		}
		alone = false
	}
	return alone
}

func (c *claims) end(slot uint32) { c.writes[slot].end.Store(0) }

// claim takes a block for a read-modify-write. False: the bucket is taken.
func (c *claims) claim(block uint64) bool {
	c.active.Add(1)
	if c.blocks[block%claimBuckets].CompareAndSwap(0, block+1) {
		return true
	}
	c.active.Add(-1)
	return false
}

// drained reports whether no plain write of a claimed block is under way.
// A span that changes while we look either ended, or looks for claims itself
// after publishing and finds ours.
func (c *claims) drained(block, blockSize uint64) bool {
	at := block * blockSize
	for i := range c.writes {
		end := c.writes[i].end.Load()
		if end > at && c.writes[i].start.Load() < at+blockSize {
			return false
		}
	}
	return true
}

func (c *claims) unclaim(block uint64) {
	c.blocks[block%claimBuckets].Store(0)
	c.active.Add(-1)
}
