package shm

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Ring is one pair of queues in shared memory: requests one way, completions
// the other. It has one life: both ends start at index 0, and a peer that was
// replaced gets a new ring.
type Ring struct {
	mem     []byte // mapped, or heap when memFD < 0
	view    view
	entries uint32

	memFD, sqEvent, cqEvent int

	sub  Submitter
	comp Completer
}

// NewRing makes a ring of the given number of entries, a power of two.
func NewRing(entries int) (*Ring, error) {
	if err := checkEntries(entries); err != nil {
		return nil, err
	}
	fd, err := sealedMemfd("rnbd-ring", ringSize(entries))
	if err != nil {
		return nil, fmt.Errorf("new ring: %w", err)
	}
	mem, err := unix.Mmap(fd, 0, ringSize(entries), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("new ring: map: %w", err)
	}
	r, err := newRing(mem, fd, entries)
	if err != nil {
		unix.Munmap(mem)
		unix.Close(fd)
	}
	return r, err
}

// NewHeapRing is NewRing over heap memory, so that the race detector watches
// it. Both ends are in this process.
func NewHeapRing(entries int) (*Ring, error) {
	if err := checkEntries(entries); err != nil {
		return nil, err
	}
	return newRing(heapMemory(ringSize(entries)), -1, entries)
}

// Peer returns the other end's view of a heap ring, with descriptors of its
// own. Each of the two is closed by its end, in any order.
func (r *Ring) Peer() (*Ring, error) {
	if r.memFD >= 0 {
		return nil, fmt.Errorf("peer of a ring: its memory is no heap: %w", unix.EINVAL)
	}
	sq, err := unix.FcntlInt(uintptr(r.sqEvent), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("peer of a ring: %w", err)
	}
	cq, err := unix.FcntlInt(uintptr(r.cqEvent), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		unix.Close(sq)
		return nil, fmt.Errorf("peer of a ring: %w", err)
	}
	return assemble(r.mem, int(r.entries), -1, sq, cq), nil
}

func newRing(mem []byte, memFD, entries int) (*Ring, error) {
	sq, err := newEvent()
	if err != nil {
		return nil, fmt.Errorf("new ring: %w", err)
	}
	cq, err := newEvent()
	if err != nil {
		unix.Close(sq)
		return nil, fmt.Errorf("new ring: %w", err)
	}
	writeGeometry(mem, geometryOf(entries))
	return assemble(mem, entries, memFD, sq, cq), nil
}

// OpenRing maps the ring that a peer made. It owns the descriptors from the
// call on and closes them on failure too.
func OpenRing(memfd, sqEvent, cqEvent int) (*Ring, error) {
	mem, entries, err := openRingMemory(memfd)
	if err == nil {
		err = errors.Join(setNonblock(sqEvent), setNonblock(cqEvent))
		if err != nil {
			unix.Munmap(mem)
		}
	}
	if err != nil {
		closeAll(memfd, sqEvent, cqEvent)
		return nil, fmt.Errorf("open ring: %w", err)
	}
	return assemble(mem, entries, memfd, sqEvent, cqEvent), nil
}

func openRingMemory(fd int) ([]byte, int, error) {
	size, err := checkSealed(fd)
	if err != nil {
		return nil, 0, err
	}
	if size < headerSize || size > int64(ringSize(MaxEntries)) {
		return nil, 0, fmt.Errorf("%w: file of %d bytes", ErrLayout, size)
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, 0, fmt.Errorf("map: %w", err)
	}
	g := geometryIn(mem)
	if err := g.check(size); err != nil {
		unix.Munmap(mem)
		return nil, 0, err
	}
	return mem, int(g.entries), nil
}

func assemble(mem []byte, entries, memFD, sqEvent, cqEvent int) *Ring {
	r := &Ring{mem: mem, view: viewOf(mem, entries), entries: uint32(entries),
		memFD: memFD, sqEvent: sqEvent, cqEvent: cqEvent}
	sq, cq := &r.view.hdr.sq, &r.view.hdr.cq
	r.sub = Submitter{
		out: producer{words: sq, size: r.entries, event: sqEvent},
		in:  consumer{words: cq, size: r.entries, event: cqEvent},
		v:   r.view,
	}
	r.comp = Completer{
		in:  consumer{words: sq, size: r.entries, event: sqEvent},
		out: producer{words: cq, size: r.entries, event: cqEvent},
		v:   r.view,
	}
	return r
}

// Entries returns the size of the ring.
func (r *Ring) Entries() int { return int(r.entries) }

// FDs returns the descriptors to hand to the peer; mem is -1 for a heap ring.
// They stay the ring's.
func (r *Ring) FDs() (mem, sqEvent, cqEvent int) { return r.memFD, r.sqEvent, r.cqEvent }

// Submitter returns the requesting end, always the same one.
func (r *Ring) Submitter() *Submitter { return &r.sub }

// Completer returns the answering end, always the same one.
func (r *Ring) Completer() *Completer { return &r.comp }

// Close unmaps the ring and closes its descriptors. Neither end may be used
// after it.
func (r *Ring) Close() error {
	var err error
	if r.memFD >= 0 && r.mem != nil {
		err = unix.Munmap(r.mem)
	}
	r.mem, r.view = nil, view{}
	err = errors.Join(err, closeAll(r.memFD, r.sqEvent, r.cqEvent))
	r.memFD, r.sqEvent, r.cqEvent = -1, -1, -1
	return err
}

// producer is the writing half of one direction. Its index is its own copy;
// the peer's head is accepted only between the last head and the tail.
type producer struct {
	words     *words
	size      uint32
	event     int
	tail      uint32 // next entry to write
	published uint32 // tail that the peer has been shown
	head      uint32 // peer's index when last looked at
	kicks     uint64
}

// room reports whether an entry can be written. It reads the peer's head only
// when the last known one says full.
func (p *producer) room() (bool, error) {
	if p.tail-p.head < p.size {
		return true, nil
	}
	head := p.words.Head.Load()
	if head-p.head > p.published-p.head {
		return false, fmt.Errorf("%w: peer took %d entries of %d", ErrCorrupt, head-p.head, p.published-p.head)
	}
	p.head = head
	return p.tail-head < p.size, nil
}

// publish shows the peer everything written, and wakes it if it asked.
// The write of the tail and the load of the flag must not change places, and
// neither must their counterparts in consumer.arm: then one of the two sees the
// other. Swap, not Store: under the race detector a store to memory that is not
// Go's is a release only, and a wake-up was lost.
func (p *producer) publish() {
	if p.published == p.tail {
		return
	}
	p.published = p.tail
	p.words.Tail.Swap(p.tail)
	if p.words.Wake.Load() != 0 && p.words.Wake.Swap(0) != 0 {
		p.kicks++
		kick(p.event)
	}
}

// consumer is the reading half of one direction.
type consumer struct {
	words *words
	size  uint32
	event int
	head  uint32 // next entry to read
	stale bool   // a kick of the peer may be pending in the eventfd
	armed bool
	token [8]byte
}

// ready returns how many entries wait; limit is the most the peer may have
// written.
func (c *consumer) ready(limit uint32) (uint32, error) {
	n := c.words.Tail.Load() - c.head
	if n > limit {
		return 0, fmt.Errorf("%w: peer shows %d entries where %d are possible", ErrCorrupt, n, limit)
	}
	return n, nil
}

// release gives n entries back to the peer.
func (c *consumer) release(n uint32) {
	c.head += n
	c.words.Head.Store(c.head)
}

// arm asks for a kick. It returns false when an entry came meanwhile; the flag
// is cleared then.
func (c *consumer) arm() bool {
	c.disarm()
	if c.words.Tail.Load() != c.head {
		return false
	}
	if c.stale {
		c.stale = !drainEvent(c.event, c.token[:])
	}
	c.armed = true
	c.words.Wake.Swap(1)
	if c.words.Tail.Load() != c.head {
		c.disarm()
		return false
	}
	return true
}

// disarm withdraws the request for a kick. When the flag is gone already, the
// peer has kicked or is about to: that token is taken out by a later arm.
func (c *consumer) disarm() {
	if !c.armed {
		return
	}
	c.armed = false
	if c.words.Wake.Swap(0) == 0 {
		c.stale = true
	}
}

// woken is disarm for a consumer that has taken a token out of the eventfd
// itself: that of the kick, unless there was an older one.
func (c *consumer) woken() {
	older := c.stale
	c.stale = false
	c.disarm()
	c.stale = c.stale && older
}
