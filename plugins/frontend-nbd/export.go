package main

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// export is a device as NBD clients see it.
type export struct {
	index    uint32
	name     string
	arena    []byte
	arenaID  uint32
	slotSize int
	slots    int
	block    uint64 // logical block size in bytes
	queues   int    // the most that may serve it

	limits atomic.Pointer[blk.Limits] // replaced by a resize
	claims rangeClaims
	disk   atomic.Pointer[kernelDisk] // nil: an export alone

	mu       sync.Mutex    // the export's own, taken after the server's; never per request
	opens    int           // connections, from GO to the return of their last slot
	own      int           // of these, of the kernel's client that we have attached
	removed  bool          // no new openers
	idle     chan struct{} // closed when removed and opens == 0
	shares   []*slotShare  // changed only while assigned == 0
	assigned int           // connections given to a share
}

func newExport(s plugin.DeviceSpec) (*export, error) {
	if err := checkSpec(&s); err != nil {
		return nil, err
	}
	set, err := parseSettings(s.Config)
	if err != nil {
		return nil, err
	}
	e := &export{
		index: s.Index, name: s.Name, arena: s.Arena, arenaID: s.ArenaID,
		slotSize: s.SlotSize, slots: s.Slots, block: uint64(s.Limits.LogicalBlockSize),
		idle: make(chan struct{}), queues: set.queues,
	}
	e.claims.writes = make([]byteRange, s.Slots)
	e.setLimits(s.Limits)
	return e, nil
}

func checkSpec(s *plugin.DeviceSpec) error {
	bs := s.Limits.LogicalBlockSize
	switch {
	case len(s.Name) == 0 || len(s.Name) > nbdwire.MaxName:
		return fmt.Errorf("name of %d bytes, want 1 to %d: %w", len(s.Name), nbdwire.MaxName, blk.EINVAL)
	case bs < blk.SectorSize || bits.OnesCount32(bs) != 1:
		return fmt.Errorf("logical block size %d: %w", bs, blk.EINVAL)
	case s.Slots < 1 || s.SlotSize < int(bs):
		return fmt.Errorf("%d slots of %d bytes for blocks of %d: %w", s.Slots, s.SlotSize, bs, blk.EINVAL)
	case len(s.Arena)/s.SlotSize < s.Slots:
		return fmt.Errorf("arena of %d bytes for %d slots of %d: %w", len(s.Arena), s.Slots, s.SlotSize, blk.EINVAL)
	}
	return nil
}

// setLimits sets new limits. The size is rounded down to whole blocks.
func (e *export) setLimits(l blk.Limits) {
	l.Size &^= e.block - 1
	e.limits.Store(&l)
}

// geometry returns the size in bytes and the transmission flags for the
// negotiation.
func (e *export) geometry() (size uint64, flags uint16) {
	l := e.limits.Load()
	return l.Size, transmissionFlags(l)
}

// minBlock returns the smallest unit of requests, in bytes. It is 1 where a slot
// has room for a block and a payload beside it, else the block.
func (e *export) minBlock() uint32 {
	if uint64(e.slotSize) >= 2*e.block {
		return 1
	}
	return uint32(e.block)
}

// slotBytes returns the most bytes that one slot transfers, in whole blocks.
func (e *export) slotBytes(l *blk.Limits) uint64 {
	n := uint64(e.slotSize)
	if l.MaxIOSize != 0 {
		n = min(n, uint64(l.MaxIOSize))
	}
	return max(n&^(e.block-1), e.block)
}

// listsExtents reports whether a slot has room for a list of extents.
func (e *export) listsExtents() bool { return e.slotSize >= extents.Size }

// slotMemory returns the memory of a tag.
func (e *export) slotMemory(tag uint32) []byte {
	return e.arena[int(tag)*e.slotSize:][:e.slotSize:e.slotSize]
}

// addOpener counts an opener. It returns false if the device is being removed.
func (e *export) addOpener() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.removed {
		return false
	}
	e.opens++
	return true
}

// removeOpener takes back one acquire.
func (e *export) removeOpener() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.opens--
	if e.removed && e.opens == 0 {
		close(e.idle)
	}
}

// acquireOwn is acquire for a connection of the kernel's client. It is not
// counted as a user.
func (e *export) acquireOwn() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.removed {
		return false
	}
	e.opens++
	e.own++
	return true
}

func (e *export) releaseOwn() {
	e.mu.Lock()
	e.own--
	e.mu.Unlock()
	e.removeOpener()
}

// openerCount returns the number of users' connections.
func (e *export) openerCount() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.opens - e.own
}

// closeToNew refuses new openers from now on. It returns EBUSY, and refuses
// none, if there are users and force is not set.
func (e *export) closeToNew(force bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if users := e.opens - e.own; users > 0 && !force {
		return fmt.Errorf("%d connections are open: %w", users, blk.EBUSY)
	}
	if !e.removed {
		e.removed = true
		if e.opens == 0 {
			close(e.idle)
		}
	}
	return nil
}

// slotShare is the part of an export's slots that one queue owns.
type slotShare struct {
	exp      *export
	q        *queue
	first    uint32
	ops      []op     // by tag - first
	free     []uint32 // stack of indices of ops
	sent     int      // ops that the device has
	backlog  opList   // ops that wait for room in the ring
	conns    []*conn
	gather   *request // the one read that may hold slots while it waits for more
	assigned int      // connections given to this share; guarded by exp.mu
}

// assignShare returns the share with the fewest connections, for a new connection, or
// nil if there is no queue. Slots are distributed among the queues that exist
// when the first connection comes.
func (e *export) assignShare(queues []*queue) *slotShare {
	queues = queues[:min(len(queues), e.queues)]
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.assigned == 0 && !e.dealtTo(queues) {
		e.dealSlots(queues)
	}
	var best *slotShare
	for _, s := range e.shares {
		if len(s.ops) > 0 && (best == nil || s.assigned < best.assigned) {
			best = s
		}
	}
	if best != nil {
		best.assigned++
		e.assigned++
	}
	return best
}

func (e *export) dealtTo(queues []*queue) bool {
	return slices.EqualFunc(e.shares, queues, func(s *slotShare, q *queue) bool { return s.q == q })
}

func (e *export) dealSlots(queues []*queue) {
	e.shares = make([]*slotShare, len(queues))
	for i, q := range queues {
		first, end := e.slots*i/len(queues), e.slots*(i+1)/len(queues)
		s := &slotShare{exp: e, q: q, first: uint32(first), ops: make([]op, end-first)}
		for j := range s.ops {
			s.ops[j] = op{sh: s, tag: uint32(first + j)}
			s.free = append(s.free, uint32(len(s.ops)-1-j))
		}
		e.shares[i] = s
	}
}

// unassignShare takes back one assign.
func (e *export) unassignShare(s *slotShare) {
	e.mu.Lock()
	s.assigned--
	e.assigned--
	e.mu.Unlock()
}

// currentShares returns the current shares.
func (e *export) currentShares() []*slotShare {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.shares
}

// takeSlot returns a slot for c, or nil if c may have none now. Queue's thread.
func (s *slotShare) takeSlot(c *conn) *op {
	if !s.allowsConn(c) {
		return nil
	}
	o := &s.ops[s.free[len(s.free)-1]]
	s.free = s.free[:len(s.free)-1]
	o.conn = c
	c.held++
	return o
}

// hoard bounds the slots of one connection: hoard times the free slots.
const hoard = 4

// allowsConn reports whether c may take a slot. The last free slot goes only to a
// connection without one, and a connection that holds most of the slots gets no
// more. So a client that does not read its replies does not starve the others.
func (s *slotShare) allowsConn(c *conn) bool {
	free := len(s.free)
	if c.held == 0 || free == 0 {
		return free > 0
	}
	if s.gather != nil && s.gather == c.cur {
		return free > 1
	}
	return c.held < hoard*(free-1)
}

// putSlot gives a slot back.
func (s *slotShare) putSlot(o *op) {
	o.conn.held--
	*o = op{sh: o.sh, tag: o.tag}
	s.free = append(s.free, o.tag-s.first)
	s.q.again = true
}

// removeConn removes a connection from the share.
func (s *slotShare) removeConn(c *conn) {
	s.conns = slices.DeleteFunc(s.conns, func(other *conn) bool { return other == c })
}

// beingRemoved reports whether the device is being removed.
func (e *export) beingRemoved() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.removed
}
