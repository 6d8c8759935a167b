package sim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
)

const (
	blockSize = 4096
	unitSize  = 512 // bytes that a disk writes atomically
)

// stamp numbers the writes of a device in the order in which they begin. 0 is
// the content of a block before the first write.
type stamp uint64

// history judges the answers of a device. Two writes of a block do not overlap
// in time, unless the earlier has failed; reads overlap with anything.
type history struct {
	id     uint32 // of the device, in each unit
	mu     sync.Mutex
	last   stamp
	blocks []blockHistory
}

// blockHistory is the knowledge about a block: it holds floor or one of open.
type blockHistory struct {
	floor   stamp   // the latest that was acknowledged or seen
	durable stamp   // the latest that a failure of power leaves
	acked   stamp   // the latest that was acknowledged and that no failure of power is known to have lost
	mapping string  // whose users acked was acknowledged to
	open    []stamp // begun later than floor, without an acknowledgement
	cached  []stamp // later than durable, acknowledged or seen: a failure of power may lose them
}

func newHistory(id uint32, blocks int) *history {
	return &history{id: id, blocks: make([]blockHistory, blocks)}
}

// begin starts a write and fills buf, one block, with its content.
func (h *history) begin(block int, buf []byte) stamp {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last++
	b := &h.blocks[block]
	b.open = append(b.open, h.last)
	for at := 0; at < blockSize; at += unitSize {
		h.putUnit(buf[at:], block, at, h.last)
	}
	return h.last
}

func (h *history) putUnit(unit []byte, block, at int, s stamp) {
	binary.LittleEndian.PutUint32(unit, h.id)
	binary.LittleEndian.PutUint32(unit[4:], uint32(block*blockSize+at))
	binary.LittleEndian.PutUint64(unit[8:], uint64(s))
	binary.LittleEndian.PutUint64(unit[unitSize-8:], ^uint64(s))
}

// acknowledge is told that the write, which began in that mapping of the device, has
// succeeded, durably if it was with FUA. Of a write that failed nothing is told: it may
// happen yet.
func (h *history) acknowledge(block int, s stamp, mapping string, durable bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := &h.blocks[block]
	b.raise(s)
	if s > b.acked {
		b.acked, b.mapping = s, mapping
	}
	if durable {
		b.persist(s)
	}
}

func (b *blockHistory) raise(s stamp) {
	if s > b.floor {
		if b.floor > b.durable && !slices.Contains(b.cached, b.floor) {
			b.cached = append(b.cached, b.floor)
		}
		b.floor = s
		later := func(o stamp) bool { return o > s }
		for _, o := range b.open {
			if !later(o) && o > b.durable && !slices.Contains(b.cached, o) {
				b.cached = append(b.cached, o)
			}
		}
		b.open = slices.DeleteFunc(b.open, func(o stamp) bool { return !later(o) })
	}
}

func (b *blockHistory) persist(s stamp) {
	if s > b.durable {
		b.durable = s
		b.cached = slices.DeleteFunc(b.cached, func(o stamp) bool { return o <= s })
	}
}

// floors returns, for each block, the stamp that a flush beginning now makes
// durable if it succeeds.
func (h *history) floors() []stamp {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := make([]stamp, len(h.blocks))
	for i := range h.blocks {
		all[i] = h.blocks[i].floor
	}
	return all
}

// flushed is told that a flush has succeeded; floors is from before it.
func (h *history) flushed(floors []stamp) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, s := range floors {
		h.blocks[i].persist(s)
	}
}

// powerCut records a loss of power: from now on each block may hold its durable
// content or any write after it. content is what the disk holds now. powerCut reports
// whether a write is lost that was acknowledged in that mapping of the device: another one
// knows nothing of it.
func (h *history) powerCut(content []byte, mapping string) (lost bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.blocks {
		b := &h.blocks[i]
		if s := stamp(binary.LittleEndian.Uint64(content[i*blockSize+8:])); s < b.acked {
			lost, b.acked = lost || b.mapping == mapping, s
		}
		if b.floor > b.durable {
			b.open = append(append(b.cached, b.floor), b.open...)
			b.cached, b.floor = nil, b.durable
		}
	}
	return lost
}

// reading is called before a read; its result is passed to check.
func (h *history) reading(block int) stamp {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.blocks[block].floor
}

// check judges the content that a read returned; since is the result of
// reading. cut: the power failed meanwhile, so since does not hold.
func (h *history) check(block int, since stamp, content []byte, cut bool) error {
	s, err := h.identify(block, content)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	b := &h.blocks[block]
	switch {
	case s < since && !cut:
		return fmt.Errorf("block %d holds write %d, though write %d was acknowledged or seen before", block, s, since)
	case s > b.floor && !slices.Contains(b.open, s):
		return fmt.Errorf("block %d holds write %d, which is none of %v", block, s, b.open)
	}
	if !cut { // else it may be from before
		b.raise(s)
	}
	return nil
}

// identify returns the write that content is of; all of it must be of one.
func (h *history) identify(block int, content []byte) (stamp, error) {
	first := stamp(binary.LittleEndian.Uint64(content[8:]))
	var want [unitSize]byte
	for at := 0; at < blockSize; at += unitSize {
		unit := content[at:][:unitSize]
		s := stamp(binary.LittleEndian.Uint64(unit[8:]))
		if s != 0 {
			h.putUnit(want[:], block, at, s)
		} else {
			clear(want[:])
		}
		switch {
		case !bytes.Equal(unit, want[:]):
			return 0, fmt.Errorf("block %d holds garbage at byte %d: device %d, offset %d, write %d", block, at,
				binary.LittleEndian.Uint32(unit), binary.LittleEndian.Uint32(unit[4:]), s)
		case s != first:
			return 0, fmt.Errorf("block %d is torn: write %d, and write %d from byte %d on", block, first, s, at)
		}
	}
	return first, nil
}
