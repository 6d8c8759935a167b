package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// disk is a device in memory. Reads and writes happen when a request is
// answered, in any order, as on a real device.
type disk struct {
	limits   blk.Limits
	arena    []byte
	slotSize int

	mu      sync.Mutex
	mem     []byte
	fails   func(*shm.SQE) blk.Errno // nil: nothing fails
	log     []shm.SQE                // every request, when keep is set
	keep    bool
	flushes int
	bad     atomic.Pointer[string] // first error of the front end

	// tell answers a request for extents: the list goes to b. nil: as mem is.
	tell func(e *shm.SQE, b []byte) blk.Errno
	list [extents.Max]extents.Extent // of the answer that is made
}

func testLimits(size uint64) blk.Limits {
	return blk.Limits{
		Size: size, LogicalBlockSize: 512, PhysicalBlockSize: 4096, MaxIOSize: 64 << 10,
		MaxDiscard: 1 << 20, MaxWriteZeroes: 1 << 20, WriteCache: true, FUA: true,
	}
}

func newDisk(l blk.Limits, slots, slotSize int) *disk {
	return &disk{limits: l, arena: make([]byte, slots*slotSize), slotSize: slotSize, mem: make([]byte, l.Size)}
}

// answer runs one request.
func (d *disk) answer(e *shm.SQE) blk.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.keep {
		d.log = append(d.log, *e)
	}
	if e.Op == blk.Extents {
		return d.answerExtents(e)
	}
	if errno := d.limits.Check(e.Op, e.Offset, uint64(e.Len)); errno != blk.OK {
		s := e.Op.String() + " refused by the device: " + errno.Error()
		d.bad.Store(&s)
		return errno
	}
	if d.fails != nil {
		if errno := d.fails(e); errno != blk.OK {
			return errno
		}
	}
	if e.Op == blk.Flush {
		d.flushes++
		return blk.OK
	}
	m := d.mem[e.Offset:][:e.Len]
	switch e.Op {
	case blk.Read:
		copy(d.arena[e.ArenaOff:], m)
	case blk.Write:
		copy(m, d.arena[e.ArenaOff:])
	case blk.Discard, blk.WriteZeroes:
		clear(m)
	}
	return blk.OK
}

// answerExtents answers a request for the extents of a range.
func (d *disk) answerExtents(e *shm.SQE) blk.Errno {
	n := uint64(e.Len)
	if n == 0 || (n|e.Offset)%512 != 0 || e.Offset > d.limits.Size || n > d.limits.Size-e.Offset || e.ArenaOff > uint64(len(d.arena)-extents.Size) {
		s := fmt.Sprintf("a request for extents that is out of bounds: %+v", *e)
		d.bad.Store(&s)
		return blk.EINVAL
	}
	b := d.arena[e.ArenaOff:][:extents.Size]
	if d.tell != nil {
		return d.tell(e, b)
	}
	list := d.list[:0]
	for m, ok := d.mem[e.Offset:][:n], true; ok && len(m) > 0; m = m[512:] {
		list, ok = extents.Add(list, 512, bytes.Equal(m[:512], make([]byte, 512)))
	}
	extents.Put(b, list)
	return blk.OK
}

// telling has requests for extents answered as f says.
func (d *disk) telling(f func(*shm.SQE, []byte) blk.Errno) { d.with(func() { d.tell = f }) }

// at returns a copy of the device's contents.
func (d *disk) at(off uint64, n int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]byte(nil), d.mem[off:][:n]...)
}

// with runs f while the device does nothing.
func (d *disk) with(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func (d *disk) flushed() (n int) {
	d.with(func() { n = d.flushes })
	return n
}

func (d *disk) requests() []shm.SQE {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]shm.SQE(nil), d.log...)
}

func (d *disk) check(t testing.TB) {
	t.Helper()
	if s := d.bad.Load(); s != nil {
		t.Error(*s)
	}
}

// host is the other end of one ring.
type host struct {
	c     *shm.Completer
	disks map[uint32]*disk
	rnd   *rand.Rand // nil: in order; else random requests stay for a while
	held  []shm.SQE
	hold  atomic.Bool  // answer nothing
	kept  atomic.Int32 // requests without an answer
	pop   [64]shm.SQE
}

func newHost(r *shm.Ring, disks map[uint32]*disk, seed uint64) *host {
	h := &host{c: r.Completer(), disks: disks, held: make([]shm.SQE, 0, 4096)}
	if seed != 0 {
		h.rnd = rand.New(rand.NewPCG(seed, 1))
	}
	return h
}

// step takes the waiting requests and answers some of them. It returns the
// number of answers.
func (h *host) step() int {
	for {
		n := h.c.Pop(h.pop[:])
		h.held = append(h.held, h.pop[:n]...)
		if n == 0 {
			break
		}
	}
	h.kept.Store(int32(len(h.held)))
	if h.hold.Load() {
		return 0
	}
	n := len(h.held)
	if h.rnd != nil && n > 0 {
		h.rnd.Shuffle(n, func(i, j int) { h.held[i], h.held[j] = h.held[j], h.held[i] })
		n = h.rnd.IntN(n + 1)
	}
	for i := range h.held[:n] {
		e := &h.held[i]
		h.c.Push(&shm.CQE{Tag: e.Tag, Errno: uint32(h.disks[e.Device].answer(e))})
	}
	h.held = h.held[:copy(h.held, h.held[n:])]
	h.c.Publish()
	return n
}
