package rtrs

import (
	"math/bits"
	"sync/atomic"
)

// permitSet is the set of free buffer ids of a session. A permit is one number
// with three uses: it names the server's chunk, the client's request and the
// answer. The set is session-wide, so an id is never in flight twice.
//
// Queues are numbered by cid. The ids are split into groups of a power of two,
// one cache line each, at least one group per I/O queue where the queue depth
// allows it. A queue takes from its own groups first and from the others when
// those run dry; queue 0, the service connection, starts with the last group.
// Taking and putting are one compare-and-swap each in the common case.
//
// A queue that found nothing marks itself as starved; the next put calls wake
// for every starved queue.
type permitSet struct {
	groups []permitGroup
	shift  uint  // log2 of the ids per group
	homes  []int // by queue: the group it starts with
	depth  int

	starved atomic.Int32  // how many of the marks are set
	marks   []atomic.Bool // by queue
	wake    func(queue int)

	spares [maxSpares]atomic.Uint32 // ids kept back for fences, + 1; 0: none or in use
	kept   int                      // number of spares, in use or not; one goroutine calls keepSpares and hasSpares
}

// maxSpares fences can be under way when every other permit waits for one.
const maxSpares = 4

// permitGroup is a bitmap of free ids alone on its cache line.
type permitGroup struct {
	free atomic.Uint64
	_    [56]byte
}

// newPermits returns a set with the ids 0 to depth-1 free. wake is called on
// the thread of the put, for queues 0 to queues-1.
func newPermits(depth, queues int, wake func(queue int)) *permitSet {
	ioQueues := max(queues-1, 1)
	shift := uint(6)
	for shift > 0 && ioQueues<<shift > depth {
		shift--
	}
	p := &permitSet{
		groups: make([]permitGroup, (depth+1<<shift-1)>>shift),
		shift:  shift,
		homes:  make([]int, queues),
		depth:  depth,
		marks:  make([]atomic.Bool, queues),
		wake:   wake,
	}
	p.homes[0] = len(p.groups) - 1
	for q := 1; q < queues; q++ {
		p.homes[q] = (q - 1) * len(p.groups) / ioQueues
	}
	for id := range uint32(depth) {
		p.groupOf(id).free.Or(p.bitOf(id))
	}
	return p
}

func (p *permitSet) groupOf(id uint32) *permitGroup { return &p.groups[id>>p.shift] }

func (p *permitSet) bitOf(id uint32) uint64 { return 1 << (id & (1<<p.shift - 1)) }

// acquire returns the lowest free id of the first group that has one, starting
// with the queue's own groups. ok is false when every id is in use.
func (p *permitSet) acquire(queue int) (id uint32, ok bool) {
	n := len(p.groups)
	g := p.homes[queue]
	for range n {
		if bit := p.groups[g].takeLowest(); bit >= 0 {
			return uint32(g<<p.shift + bit), true
		}
		if g++; g == n {
			g = 0
		}
	}
	return 0, false
}

func (g *permitGroup) takeLowest() int {
	for {
		free := g.free.Load()
		if free == 0 {
			return -1
		}
		if g.free.CompareAndSwap(free, free&(free-1)) {
			return bits.TrailingZeros64(free)
		}
	}
}

// takeOrMark is take, but when nothing is free the queue is marked: wake is
// called for it after the next put.
func (p *permitSet) takeOrMark(queue int) (id uint32, ok bool) {
	if id, ok = p.acquire(queue); ok {
		return id, true
	}
	if p.marks[queue].CompareAndSwap(false, true) {
		p.starved.Add(1)
	}
	// Look again: a put between the first look and the mark saw no mark.
	if id, ok = p.acquire(queue); ok && p.marks[queue].CompareAndSwap(true, false) {
		p.starved.Add(-1)
	}
	return id, ok
}

// release gives an id back.
func (p *permitSet) release(id uint32) {
	p.groupOf(id).free.Or(p.bitOf(id))
	if p.starved.Load() != 0 {
		p.wakeStarved()
	}
}

func (p *permitSet) wakeStarved() {
	for q := range p.marks {
		if p.marks[q].CompareAndSwap(true, false) {
			p.starved.Add(-1)
			p.wake(q)
		}
	}
}

// inUse counts the ids that are taken, a kept back spare included.
func (p *permitSet) inUse() int {
	free := 0
	for i := range p.groups {
		free += bits.OnesCount64(p.groups[i].free.Load())
	}
	return p.depth - free
}

// keepSpares takes a few ids out of the set for fences: when every other id
// waits for a fence, the fence itself still needs one. It tops up to an eighth
// of the queue depth and returns how many there are; a depth of 1 has none. Not
// for two goroutines at a time.
func (p *permitSet) keepSpares() int {
	want := min(max(p.depth/8, 1), maxSpares, p.depth-1)
	for p.kept < want {
		id, ok := p.acquire(0)
		if !ok {
			break
		}
		p.kept++
		p.putSpare(id)
	}
	return p.kept
}

// hasSpares reports whether there are spares, in use or not. Not for two
// goroutines at a time with keepSpares.
func (p *permitSet) hasSpares() bool { return p.kept > 0 }

// takeSpare returns a spare id if one is left.
func (p *permitSet) takeSpare() (id uint32, ok bool) {
	for i := range p.spares {
		if v := p.spares[i].Swap(0); v != 0 {
			return v - 1, true
		}
	}
	return 0, false
}

// putSpare gives a spare id back.
func (p *permitSet) putSpare(id uint32) {
	for i := range p.spares {
		if p.spares[i].CompareAndSwap(0, id+1) {
			return
		}
	}
}
