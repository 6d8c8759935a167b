package main

import "sync/atomic"

// A write of less than a block reads the block, changes it and writes it back.
// Another write of the block between the two would be lost. Connections run on
// several queues, so the claims on a device's blocks are shared between the
// queues, by atomics only:
//
//   - a plain write publishes its range, then looks for claimed blocks;
//   - a read-modify-write claims its block, then looks for published ranges.
//
// Each publishes before it looks, so of two that overlap at least one sees the
// other. A plain write that finds a claim withdraws its range and waits. A claim
// stays, keeps further plain writes away, and waits for the plain writes in
// flight to end. A read-modify-write holds one claim and waits for no other, so
// there is no cycle of waiters.
//
// Where writes are exclusive, a plain write also waits for plain writes that
// overlap it. If two find each other, the one with the lower slot stays
// published and looks again, and the other one withdraws: one of them goes on.

// claimBuckets bounds the read-modify-writes under way on a device. Blocks
// that share a bucket exclude one another.
const claimBuckets = 16

type claims struct {
	exclusive atomic.Bool // overlapping writes are never in flight together

	active  atomic.Int32 // claimed buckets
	waiting atomic.Int32 // parked operations of all queues
	blocks  [claimBuckets]atomic.Uint64
	writes  []span // by slot
}

// span is the byte range of a plain write in flight; end is 0 if there is none.
type span struct {
	start, end atomic.Uint64
}

// begin publishes a plain write of [start, end) and reports whether it may be
// submitted. It may not while it overlaps a claimed block or, where writes are
// exclusive, another write.
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

// claimed reports whether a block of [start, end) is claimed.
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

// alone reports whether no other plain write overlaps [start, end), the range
// that slot has published. If a write with a lower slot overlaps it, alone
// withdraws slot's range.
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

// claim claims a block for a read-modify-write. It returns false if the block's
// bucket is taken.
func (c *claims) claim(block uint64) bool {
	c.active.Add(1)
	if c.blocks[block%claimBuckets].CompareAndSwap(0, block+1) {
		return true
	}
	c.active.Add(-1)
	return false
}

// drained reports whether no plain write of a claimed block is in flight. A
// span that changes during the scan has either ended, or was published after
// the claim and will find it.
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
