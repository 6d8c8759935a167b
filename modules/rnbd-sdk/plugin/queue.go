package plugin

// DATA PATH. Next takes a copy of a request from the ring, resolves and
// checks it; the author answers with Complete and Publish. Everything here
// runs on the thread of the queue, except the methods of asks.

import (
	"fmt"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// popBatch is how many entries are taken from the ring at once.
const popBatch = 64

// publishEvery is how many bytes of requests are answered before the host is
// shown the answers without being asked to: it sends the first while the author is
// still busy with the rest of a batch.
const publishEvery = 32 << 10

// waitSpin covers the round trip of a request through sleeping processes.
const waitSpin = 100 * time.Microsecond

// After promptWaits waits in a row with something in time one may last longer, see
// pump.Limit.
const promptWaits = 16

// Queue is the plugin's end of one ring: the requests of all disks from one
// pump of the host. It belongs to the thread that Serve runs on; only Closed
// may be called from elsewhere.
type Queue struct {
	asks   asks
	pump   int
	c      *shm.Completer
	disks  *table[device]
	arenas *table[mapping]
	slots  []slot   // by Request.Tag
	free   []uint32 // stack of unused slots
	popped [popBatch]shm.SQE
	next   int // popped[next:have] are not resolved yet
	have   int
	pushed bool // completions that are not published
	bytes  int  // of the requests that they answer
	prompt int  // waits in a row with something in time

	now      func() int64 // see UseClock
	fresh    func() int64 // latency.Now
	poppedAt int64        // when popped was filled
	timings  [popBatch]timing
	timed    int // timings[:timed] are of answers that are not published
}

// slot is a request in flight.
type slot struct {
	tag   uint64 // the submitter's
	disk  *device
	arena *mapping
	busy  bool
	op    blk.Op
	n     uint32 // bytes
	since int64  // when it came out of the ring
}

// device is an open disk as the data path sees it; immutable. A resize makes
// another one of the same root.
type device struct {
	disk   Disk
	limits blk.Limits
	root   *root
}

// root is the part that the versions of a device share.
type root struct {
	readOnly    bool
	stats       deviceStats
	maps, sizes diskUse // not for the data path: Extents, and Resize
}

// mapping is an attached arena; immutable.
type mapping struct {
	mem   []byte
	fd    int // of mem, from its beginning
	close func() error
}

func newQueue(pump int, ring *shm.Ring, disks *table[device], arenas *table[mapping]) *Queue {
	entries := ring.Entries()
	q := &Queue{
		pump: pump, c: ring.Completer(), disks: disks, arenas: arenas,
		slots: make([]slot, entries), free: make([]uint32, entries), now: latency.Now, fresh: latency.Now,
	}
	for i := range q.free {
		q.free[i] = uint32(entries - 1 - i)
	}
	q.asks.init(q.c.FD())
	return q
}

// Next fills batch with new requests and returns their number, 0 if there is
// none. Requests that a disk must not see are answered here: unknown disk
// ENODEV, memory out of bounds or unknown flags EINVAL, the rest as
// blk.Limits.Check says.
func (q *Queue) Next(batch []Request) int {
	n := 0
	for n < len(batch) && len(q.free) > 0 {
		if q.next == q.have && !q.pop() {
			break
		}
		e := &q.popped[q.next]
		q.next++
		if errno := q.resolve(e, &batch[n]); errno != blk.OK {
			q.answerTag(e.Tag, errno)
			continue
		}
		n++
	}
	if n == 0 && q.pushed {
		q.Publish() // the author may have nothing to publish
	}
	if q.asks.pending() {
		q.asks.answer()
	}
	return n
}

// pop takes a batch of entries out of the ring: copies that the host cannot
// change any more.
func (q *Queue) pop() bool {
	q.next, q.have = 0, q.c.Pop(q.popped[:])
	if q.have > 0 {
		q.poppedAt = q.now()
		return true
	}
	if q.c.Err() != nil {
		q.asks.broken.Store(true)
	}
	return false
}

// resolve turns an entry into a request, or says why not. r is written only on
// success, but for its own fields.
func (q *Queue) resolve(e *shm.SQE, r *Request) blk.Errno {
	d := q.disks.get(e.Device)
	if d == nil {
		return blk.ENODEV
	}
	if errno := d.limits.Check(e.Op, e.Offset, uint64(e.Len)); errno != blk.OK {
		return errno
	}
	if e.Flags&^blk.KnownFlags != 0 {
		return blk.EINVAL
	}
	var a *mapping
	var buf []byte
	if e.Op.HasData() {
		if a = q.arenas.get(e.Arena); a == nil {
			return blk.EINVAL
		}
		size := uint64(len(a.mem))
		if uint64(e.Len) > size || e.ArenaOff > size-uint64(e.Len) {
			return blk.EINVAL
		}
		buf = a.mem[e.ArenaOff:][:e.Len:e.Len]
	}
	i := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	q.slots[i] = slot{tag: e.Tag, disk: d, arena: a, busy: true, op: e.Op, n: e.Len, since: q.poppedAt}
	*r = Request{
		Disk: d.disk, Op: e.Op, Flags: e.Flags, Prio: e.Prio, Len: e.Len,
		Tag: uint64(i), Off: e.Offset, Buf: buf, Arena: e.Arena, BufOff: e.ArenaOff,
	}
	return blk.OK
}

// Complete answers a request that Next has given out. The answer reaches the
// host with the next Publish, or sooner. It panics for a tag that is not in flight: the
// data of another request would be at stake.
func (q *Queue) Complete(tag uint64, e blk.Errno) {
	if tag >= uint64(len(q.slots)) || !q.slots[tag].busy {
		panic(fmt.Sprintf("plugin: Complete of tag %d, which is not in flight", tag))
	}
	s := &q.slots[tag]
	host := s.tag
	q.time(s)
	q.bytes += int(s.n)
	*s = slot{}
	q.free = append(q.free, uint32(tag))
	q.answerTag(host, e)
	if q.bytes >= publishEvery {
		q.Publish()
	}
}

func (q *Queue) answerTag(tag uint64, e blk.Errno) {
	q.c.Push(&shm.CQE{Tag: tag, Errno: uint32(e)})
	q.pushed = true
}

// Publish shows the host everything completed so far. Once per batch is
// enough.
func (q *Queue) Publish() {
	q.c.Publish()
	q.pushed, q.bytes = false, 0
	q.countTimings()
}

// UseClock sets the clock of the queue's requests to now, that of a pump: the
// queue need not read the system's clock then. Before the first Next.
func (q *Queue) UseClock(now func() int64) { q.now = now }

// Arm asks for FD to become readable at the next event. False: something is
// there already, do not sleep.
func (q *Queue) Arm() bool {
	if q.next != q.have || q.asks.pending() || q.Closed() {
		return false
	}
	if !q.c.Arm() {
		return false
	}
	if q.asks.pending() || q.Closed() {
		q.c.Disarm()
		return false
	}
	return true
}

// Wait returns when Next may find something, or Closed is true. It is for
// plugins that wait for nothing else: it spins, giving way to others, and then
// sleeps.
func (q *Queue) Wait() {
	if q.next != q.have || q.asks.pending() {
		return
	}
	if q.look() {
		return
	}
	if q.Arm() {
		sleep(q.FD())
		q.Disarm()
	}
}

// look spins, and reports whether there is something to do.
func (q *Queue) look() bool {
	limit := pump.NewLimit(latency.Now(), waitSpin, q.prompt >= promptWaits)
	for !q.pop() && !q.asks.pending() && !q.Closed() {
		if limit.Spent() {
			q.prompt = 0
			return false
		}
		yield()
	}
	if q.prompt++; limit.Late() {
		q.prompt = 0
	}
	return true
}

// Disarm withdraws Arm after waking.
func (q *Queue) Disarm() { q.c.Disarm() }

// FD is the descriptor to sleep on.
func (q *Queue) FD() int { return q.c.FD() }

// Closed tells Serve to return: the host detached, or it broke the ring.
func (q *Queue) Closed() bool { return q.asks.ended() }

// Pump is the number of the queue, from 0.
func (q *Queue) Pump() int { return q.pump }

// Depth is the most requests that can be in flight; tags are below it.
func (q *Queue) Depth() int { return len(q.slots) }

// InFlight is how many requests are given out and not completed.
func (q *Queue) InFlight() int { return len(q.slots) - len(q.free) }

// usesDisk and usesArena are asked on the queue's thread.
func (q *Queue) usesDisk(r *root) bool {
	for i := range q.slots {
		if q.slots[i].busy && q.slots[i].disk.root == r {
			return true
		}
	}
	return false
}

func (q *Queue) usesArena(a *mapping) bool {
	for i := range q.slots {
		if q.slots[i].arena == a {
			return true
		}
	}
	return false
}

// idle reports whether no request is in flight and none is to come.
func (q *Queue) idle() bool {
	return q.InFlight() == 0 && q.next == q.have && !q.pop()
}
