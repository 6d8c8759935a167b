package main

import (
	"slices"
	"sync"
	"sync/atomic"
)

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
//
// A connection that has ended may leave requests behind: some are with the device,
// some wait, some are in the socket and have not been read. Whoever comes later
// must not be overtaken by these. A connection is ended when its client can send
// nothing more, and counts in claims.ended until its last request has ended:
//
//   - while its commands are not taken, their ranges are not known, and no other
//     connection takes a slot. Ended connections go first, in the order of their ends;
//   - then the ranges of its writes are published, and a read or write that
//     overlaps one of these waits until the write has ended.

// claimBuckets bounds the read-modify-writes under way on a device. Blocks
// that share a bucket exclude one another.
const claimBuckets = 16

type rangeClaims struct {
	exclusive atomic.Bool // overlapping writes are never in flight together

	active  atomic.Int32 // claimed buckets
	waiting atomic.Int32 // parked operations of all queues
	blocks  [claimBuckets]atomic.Uint64
	writes  []byteRange // by slot

	ended  atomic.Int32  // ended connections whose requests have not all ended
	ahead  atomic.Uint64 // the ended connection that takes its commands ahead of all others; 0: none
	mu     sync.Mutex    // guards ending and last; never taken per request
	ending []uint64      // ended connections whose commands are not all taken, by the order of their ends
	last   uint64        // the number of the connection that ended last
}

// byteRange is the byte range of a plain write in flight; end is 0 if there is none.
type byteRange struct {
	start, end atomic.Uint64
}

// beginWrite publishes a plain write of [start, end) and reports whether it may be
// submitted. It may not while it overlaps a claimed block or, where writes are
// exclusive, another write.
func (c *rangeClaims) beginWrite(slot uint32, start, end, blockSize uint64) bool {
	s := &c.writes[slot]
	s.start.Store(start)
	s.end.Store(end)
	if c.active.Load() != 0 && c.blockClaimed(start, end, blockSize) {
		s.end.Store(0)
		return false
	}
	return !c.exclusive.Load() || c.onlyWriter(slot, start, end)
}

// addEnded counts a connection that has ended. It returns the connection's number,
// for mayTake and taken.
func (c *rangeClaims) addEnded() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended.Add(1)
	c.last++
	c.ending = append(c.ending, c.last)
	c.ahead.Store(c.ending[0])
	return c.last
}

// endPrecedence ends the precedence of the connection with that number: the ranges of all
// of its writes are published.
func (c *rangeClaims) endPrecedence(number uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ending = slices.DeleteFunc(c.ending, func(n uint64) bool { return n == number })
	ahead := uint64(0)
	if len(c.ending) > 0 {
		ahead = c.ending[0]
	}
	c.ahead.Store(ahead)
}

// mayTake reports whether the connection with that number, 0 for one that has not
// ended, may take a slot for a command.
func (c *rangeClaims) mayTake(number uint64) bool {
	ahead := c.ahead.Load()
	return ahead == 0 || ahead == number
}

// followsWrites reports whether no write overlaps [start, end), but for the one that
// slot has published.
func (c *rangeClaims) followsWrites(slot uint32, start, end, blockSize uint64) bool {
	for i := range c.writes {
		s := &c.writes[i]
		if e := s.end.Load(); uint32(i) != slot && e > start && s.start.Load() < end {
			return false
		}
	}
	return !c.blockClaimed(start, end, blockSize)
}

// blockClaimed reports whether a block of [start, end) is claimed.
func (c *rangeClaims) blockClaimed(start, end, blockSize uint64) bool {
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

// onlyWriter reports whether no other plain write overlaps [start, end), the range
// that slot has published. If a write with a lower slot overlaps it, alone
// withdraws slot's range.
func (c *rangeClaims) onlyWriter(slot uint32, start, end uint64) bool {
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

// endWrite withdraws the range of a plain write. It reports whether there was one.
func (c *rangeClaims) endWrite(slot uint32) bool { return c.writes[slot].end.Swap(0) != 0 }

// claimBlock claims a block for a read-modify-write. It returns false if the block's
// bucket is taken.
func (c *rangeClaims) claimBlock(block uint64) bool {
	c.active.Add(1)
	if c.blocks[block%claimBuckets].CompareAndSwap(0, block+1) {
		return true
	}
	c.active.Add(-1)
	return false
}

// writesDrained reports whether no plain write of a claimed block is in flight. A
// span that changes during the scan has either ended, or was published after
// the claim and will find it.
func (c *rangeClaims) writesDrained(block, blockSize uint64) bool {
	at := block * blockSize
	for i := range c.writes {
		end := c.writes[i].end.Load()
		if end > at && c.writes[i].start.Load() < at+blockSize {
			return false
		}
	}
	return true
}

func (c *rangeClaims) unclaimBlock(block uint64) {
	c.blocks[block%claimBuckets].Store(0)
	c.active.Add(-1)
}
