package sim

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// disk is storage that outlives plugins and servers. Its operations take time, and
// go on when the plugin that asked for them has died, as those in a kernel do.
type disk struct {
	w      *world
	name   string
	limits blk.Limits

	mu      sync.Mutex
	rnd     *rand.Rand
	visible []byte // content that a read returns
	durable []byte // content after a loss of power
	dirty   []bool // by unit: visible differs from durable
	least   time.Duration
	most    time.Duration // how long an operation takes
	hung    bool
	failing bool
	untold  bool         // write-back has failed, and no flush has been answered with that
	failed  bool         // a flush has been answered with an error
	waiting []*operation // of a disk that hangs
	running map[*operation]bool
	holders map[*storage]int // how often each process has it open
	changed chan struct{}    // closed and replaced when running or holders change
	faulty  time.Time        // when a request last failed, or might have
}

// operation is a request on its way through a disk.
type operation struct {
	d    *disk
	p    *storage
	q    *plugin.Queue
	r    plugin.Request
	mem  *region // that r's memory is in; nil: it has none
	data []byte  // of a write, as it was at first
	lost bool    // the power failed: it has no effect
	// tells reports that o was answered with the error of a write-back.
	tells bool
}

func newDisk(w *world, name string, blocks int, cache bool, rnd *rand.Rand) *disk {
	size := blocks * blockSize
	return &disk{w: w, name: name, rnd: rnd,
		limits: blk.Limits{Size: uint64(size), LogicalBlockSize: 512, PhysicalBlockSize: 4096, MaxIOSize: 1 << 20, MaxSegments: 64,
			MaxDiscard: 1 << 20, MaxWriteZeroes: 1 << 20, DiscardGranularity: 4096, WriteCache: cache, FUA: cache},
		visible: make([]byte, size), durable: make([]byte, size), dirty: make([]bool, size/unitSize),
		least: 50 * time.Microsecond, most: 500 * time.Microsecond,
		running: map[*operation]bool{}, holders: map[*storage]int{}, changed: make(chan struct{})}
}

// open waits until no operation of another process is in flight and none has
// the disk open, like the lock of a real plugin.
func (d *disk) open(ctx context.Context, p *storage) error {
	for {
		d.mu.Lock()
		if !d.othersUse(p) {
			d.holders[p]++
			d.mu.Unlock()
			return nil
		}
		changed := d.changed
		d.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s is in use by another process: %w", d.name, context.Cause(ctx))
		case <-p.ended:
			return fmt.Errorf("the plugin has ended: %w", blk.EIO)
		}
	}
}

func (d *disk) othersUse(p *storage) bool {
	for o := range d.running {
		if o.p != p {
			return true
		}
	}
	for other := range d.holders {
		if other != p {
			return true
		}
	}
	return false
}

// release drops one reference of p to the disk, or, for a process that dies,
// all of them.
func (d *disk) release(p *storage, all bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.holders[p]--; all || d.holders[p] <= 0 {
		delete(d.holders, p)
	}
	d.tell()
}

func (d *disk) tell() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// begin starts an operation.
func (d *disk) begin(o *operation) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running[o] = true
	if o.mem != nil {
		o.mem.claim(o)
	}
	if o.r.Op == blk.Write {
		o.data = bytes.Clone(o.memory())
	}
	d.schedule(o)
}

func (o *operation) memory() []byte { return o.mem.bytes[o.r.BufOff:][:o.r.Len] }

func (d *disk) schedule(o *operation) {
	if d.hung {
		d.waiting = append(d.waiting, o)
		return
	}
	time.AfterFunc(d.least+time.Duration(d.rnd.Int64N(int64(d.most-d.least)+1)), func() { d.end(o) })
}

// end carries o out, whoever may still wait for it.
func (d *disk) end(o *operation) {
	d.mu.Lock()
	if d.hung {
		d.waiting = append(d.waiting, o)
		d.mu.Unlock()
		return
	}
	errno := d.carryOut(o)
	delete(d.running, o)
	if o.mem != nil {
		o.mem.giveUp(o)
	}
	d.tell()
	d.mu.Unlock()
	o.p.done(o, errno)
}

func (d *disk) carryOut(o *operation) blk.Errno {
	if o.lost {
		return blk.EIO
	}
	if o.r.Op == blk.Write && !bytes.Equal(o.data, o.memory()) {
		d.w.violate("memory: the payload of a write to %s at %d changed while the disk worked on it", d.name, o.r.Off)
	}
	if d.failing {
		d.faulty = time.Now()
		d.failed = d.failed || o.isDurable()
		return blk.EIO
	}
	at, n := int(o.r.Off), int(o.r.Len)
	switch o.r.Op {
	case blk.Read:
		copy(o.memory(), d.visible[at:])
	case blk.Write:
		d.put(at, o.data, o.r.Flags&blk.FUA != 0)
	case blk.Discard, blk.WriteZeroes, blk.SecureErase:
		d.put(at, make([]byte, n), o.r.Flags&blk.FUA != 0)
	case blk.Flush:
		copy(d.durable, d.visible)
		clear(d.dirty)
	}
	if d.untold && o.isDurable() {
		d.untold, o.tells = false, true
		return blk.EIO
	}
	return blk.OK
}

// isDurable reports whether the plugin syncs the file for o, and gets the error of an
// earlier write-back.
func (o *operation) isDurable() bool { return o.r.Op == blk.Flush || o.r.Flags&blk.FUA != 0 }

// failWriteBack loses some of the blocks that were not made durable, as a file system does
// whose disk fails for a moment. One flush is answered with the error. failWriteBack returns
// the content afterwards.
func (d *disk) failWriteBack() []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	for b := 0; b < len(d.visible); b += blockSize {
		if d.rnd.IntN(2) == 0 {
			copy(d.visible[b:][:blockSize], d.durable[b:])
		}
	}
	copy(d.durable, d.visible)
	clear(d.dirty)
	d.untold = true
	return bytes.Clone(d.visible)
}

// tellAgain is called when a process that was answered with the error of a write-back ends
// before it has told its server. The kernel tells the server itself, by the server's own
// descriptor; this disk has none, and answers the next process.
func (d *disk) tellAgain() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.untold = true
}

func (d *disk) put(at int, data []byte, durable bool) {
	copy(d.visible[at:], data)
	for u := at / unitSize; u < (at+len(data))/unitSize; u++ {
		d.dirty[u] = true
		if durable || !d.limits.WriteCache {
			copy(d.durable[u*unitSize:][:unitSize], d.visible[u*unitSize:])
			d.dirty[u] = false
		}
	}
}

// powerCut loses some of the blocks that were not made durable; operations
// under way have no effect. Whole blocks are lost: a write of a block is
// atomic to this disk. powerCut returns the content afterwards.
func (d *disk) powerCut() []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	for b := 0; b < len(d.visible); b += blockSize {
		if d.rnd.IntN(2) == 0 {
			copy(d.visible[b:][:blockSize], d.durable[b:])
		} else {
			copy(d.durable[b:][:blockSize], d.visible[b:])
		}
	}
	clear(d.dirty)
	for o := range d.running {
		o.mem.giveUp(o)
		o.mem, o.lost = nil, true
	}
	return bytes.Clone(d.visible)
}

// told returns the limits that a plugin tells.
func (d *disk) told() blk.Limits {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.limits
}

// setCache changes the cache policy; one that is switched off is written back before.
func (d *disk) setCache(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !on {
		copy(d.durable, d.visible)
		clear(d.dirty)
	}
	d.limits.WriteCache, d.limits.FUA = on, on
}

func (d *disk) setHung(hung bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hung = hung
	if !hung {
		waiting := d.waiting
		d.waiting = nil
		for _, o := range waiting {
			d.schedule(o)
		}
	}
}

func (d *disk) setPace(least, most time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.least, d.most = least, most
}

func (d *disk) setFailing(failing bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failing = failing
}

// hasFailedFlush reports whether a flush, or a write with FUA, has met an error.
func (d *disk) hasFailedFlush() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed
}

// failedSince reports whether a request that began then may have met an error.
func (d *disk) failedSince(begin time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failing || !d.faulty.Before(begin)
}
