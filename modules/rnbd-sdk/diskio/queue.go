package diskio

// DATA PATH. The functions in the order in which a request meets them: intake
// takes it from the ring, onRequest asks the disk for a step, run tries it inline,
// submit gives it to the engine; outlet reaps, onDone continues with the rest,
// finish answers. Everything runs on the thread of the queue.

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

const (
	batchSize = 64
	largeIO   = 256 << 10 // no spinning for the answer to I/O of this size
	maxTries  = 8         // of a step that the kernel asks to try again
)

// ring is a queue's part of *plugin.Queue.
type ring interface {
	Next(batch []plugin.Request) int
	Complete(tag uint64, e blk.Errno)
	Publish()
	Arm() bool
	Disarm()
	FD() int
	Closed() bool
	Depth() int
	UseClock(now func() int64)
}

// op is a request in flight; its index is the request's tag.
type op struct {
	req     plugin.Request
	disk    Planner
	step    Step
	done    uint64 // bytes of the range that are finished
	tries   uint8
	syncing bool   // the step is the Fdatasync behind another one
	bounced bool   // the transfer in flight uses bounce
	share   *share // of the engine's workers that it counts for; nil: none
	next    int32  // tag of the next one in a list; -1: last
	bounce  []byte // nil until first needed, kept for later requests
}

// queue drives one ring with one engine.
type queue struct {
	ring   ring
	engine uring.Engine
	ops    []op
	count  Counters

	inFlight int
	throttle
	refused  list // the engine had no room
	large    bool // the last request was large
	started  bool // the engine holds requests that are not started
	answered bool // the ring holds answers that are not published

	// Scratch, so that nothing escapes to the heap per request.
	batch   [batchSize]plugin.Request
	done    [batchSize]uring.Completion
	request uring.Request
	iov     unix.Iovec
}

func newQueue(r ring, e uring.Engine) *queue {
	return &queue{ring: r, engine: e, ops: make([]op, r.Depth()), refused: empty, throttle: newThrottle(r.Depth())}
}

// intake is the ring as a source of the pump. It is the last one polled in a
// loop and closes it: one start of the engine, one publication.
type intake struct{ *queue }

// Poll takes new requests.
func (q intake) Poll() int {
	total := 0
	for {
		n := q.ring.Next(q.batch[:])
		for i := range q.batch[:n] {
			q.onRequest(&q.batch[i])
		}
		total += n
		if n < len(q.batch) {
			break
		}
	}
	q.closeLoop()
	return total
}

func (q intake) Arm() bool { return q.ring.Arm() }
func (q intake) Disarm()   { q.ring.Disarm() }
func (q intake) FD() int   { return q.ring.FD() }

// LargeIO tells the pump, through both sources, not to spin.
func (q *queue) LargeIO() bool { return q.large }

func (q *queue) closeLoop() {
	if q.refused != empty {
		q.submitAgain()
	}
	if q.started {
		q.started = false
		q.engine.Flush()
	}
	if q.answered {
		q.answered = false
		q.ring.Publish()
	}
}

// onRequest has the disk plan a request and runs its first step.
func (q *queue) onRequest(r *plugin.Request) {
	o := &q.ops[r.Tag]
	o.req, o.done, o.tries, o.syncing, o.bounced, o.share = *r, 0, 0, false, false, nil
	q.inFlight++
	disk, ok := r.Disk.(Planner)
	if !ok {
		q.finish(o, blk.EIO)
		return
	}
	q.large = r.Op.HasData() && r.Len >= largeIO
	o.disk, o.step = disk, disk.Plan(r)
	q.run(o)
}

// run begins a step.
func (q *queue) run(o *op) {
	switch {
	case o.step.Inline == InlineNo:
		q.admit(o)
	case o.step.Op == uring.Fdatasync:
		q.inlineSync(o)
	default:
		q.inlineTransfer(o)
	}
}

// inlineTransfer transfers the bytes that need no waiting and leaves the rest to
// the engine.
func (q *queue) inlineTransfer(o *op) {
	flags := o.step.RWFlags
	if o.step.Inline == InlineCached {
		flags |= unix.RWF_NOWAIT
	}
	n, errno := transfer(o.step.Op == uring.Pwrite, o.step.FD, o.req.Buf, o.req.Off, flags, &q.iov)
	switch {
	case errno == unix.EAGAIN || errno == unix.EINTR:
		q.admit(o)
	case errno != 0:
		q.onError(o, errno)
	case n == len(o.req.Buf):
		q.count.Inline.Add(1)
		q.onStepDone(o)
	default:
		o.done = uint64(n)
		q.admit(o)
	}
}

func (q *queue) inlineSync(o *op) {
	if err := unix.Fdatasync(int(o.step.FD)); err != nil {
		q.admit(o) // the engine tries again, and reports the error
		return
	}
	q.count.Inline.Add(1)
	q.onStepDone(o)
}

// submit gives the rest of the range to the engine.
func (q *queue) submit(o *op) {
	q.request = uring.Request{
		Op: o.step.Op, FD: o.step.FD, RWFlags: o.step.RWFlags, Prio: o.req.Prio, Tag: o.req.Tag,
		Off: o.req.Off + o.done, Len: uint64(o.req.Len) - o.done, Blocks: o.step.Blocks,
	}
	if o.step.moves() {
		buf := q.memory(o)
		if buf == nil {
			q.finish(o, blk.ENOMEM)
			return
		}
		q.request.Buf, q.request.Len = buf, uint64(len(buf))
	}
	switch {
	case q.engine.Submit(&q.request):
		q.started = true
	case q.engine.InFlight() == 0: // it is broken: it takes nothing
		q.finish(o, blk.EIO)
	default:
		q.refused.push(q.ops, o)
	}
}

// submitAgain submits the requests that the engine had no room for.
func (q *queue) submitAgain() {
	waiting := q.refused
	for q.refused = empty; waiting != empty; {
		q.submit(waiting.pop(q.ops))
	}
}

// memory returns the memory of the next transfer, or nil if there is none left.
func (q *queue) memory(o *op) []byte {
	o.bounced = false
	if o.step.Zeroes {
		return zeroes(uint64(o.req.Len) - o.done)
	}
	buf := o.req.Buf[o.done:]
	if Aligned(buf, o.step.MemAlign) {
		return buf
	}
	return q.place(o, buf)
}

// place puts a bounce buffer between the engine and a buffer that is not
// aligned. It is the only copy of payload in this package, with its way back
// in advance.
func (q *queue) place(o *op, buf []byte) []byte {
	if o.bounce == nil {
		o.bounce = newBounce()
		if o.bounce == nil {
			return nil
		}
	}
	o.bounced = true
	n := min(len(buf), len(o.bounce))
	if o.step.Op == uring.Pwrite {
		copy(o.bounce, buf[:n])
		q.count.BouncedBytes.Add(uint64(n))
	}
	return o.bounce[:n]
}

// outlet is the engine as a source of the pump.
type outlet struct{ *queue }

// Poll handles the engine's completions.
func (q outlet) Poll() int {
	total := 0
	for {
		n := q.engine.Reap(q.done[:])
		for i := range q.done[:n] {
			q.onDone(&q.done[i])
		}
		total += n
		if n < len(q.done) {
			return total
		}
	}
}

func (q outlet) Arm() bool { q.closeLoop(); return q.engine.Arm() }
func (q outlet) FD() int   { return q.engine.FD() }

// onDone handles the result of a step or of a part of it.
func (q *queue) onDone(c *uring.Completion) {
	o := &q.ops[c.Tag]
	switch {
	case c.Res < 0:
		q.onError(o, unix.Errno(-c.Res))
	case o.step.moves():
		q.advance(o, uint64(c.Res))
	default:
		q.onStepDone(o)
	}
}

// advance counts n bytes as transferred and continues with the rest.
func (q *queue) advance(o *op, n uint64) {
	before := o.done
	if o.bounced && o.step.Op == uring.Pread {
		copy(o.req.Buf[o.done:], o.bounce[:n])
		q.count.BouncedBytes.Add(n)
	}
	o.done += n
	if o.done == uint64(o.req.Len) {
		q.onStepDone(o)
		return
	}
	if o.step.Align > 1 {
		o.done -= o.done % uint64(o.step.Align)
	}
	if o.done == before { // the file ends here
		q.onEnd(o)
		return
	}
	o.tries = 0
	q.submit(o)
}

// onEnd handles a transfer that has met the end of the file: a read of the padding
// gets zeroes, any other transfer has found a file that was truncated.
func (q *queue) onEnd(o *op) {
	rest := uint64(o.req.Len) - o.done
	if o.step.Op != uring.Pread || rest > uint64(o.step.Padding) {
		q.finish(o, blk.EIO)
		return
	}
	clear(o.req.Buf[o.done:])
	q.onStepDone(o)
}

// onStepDone handles the end of a step: its whole range is done.
func (q *queue) onStepDone(o *op) {
	if o.step.Sync && !o.syncing {
		o.syncing = true
		o.step = Step{Op: uring.Fdatasync, FD: o.step.FD}
		q.admit(o)
		return
	}
	q.finish(o, blk.OK)
}

// onError retries the step, asks the disk for another one, or answers.
func (q *queue) onError(o *op, errno unix.Errno) {
	if (errno == unix.EINTR || errno == unix.EAGAIN) && o.tries < maxTries {
		o.tries++
		q.count.Retries.Add(1)
		q.submit(o)
		return
	}
	e := toErrno(errno)
	if o.done == 0 && !o.syncing {
		if step, ok := o.disk.Fallback(&o.req, o.step, e); ok {
			q.count.Fallbacks.Add(1)
			o.step = step
			q.run(o)
			return
		}
	}
	q.finish(o, e)
}

// finish answers the request and clears its slot, except for the bounce buffer.
func (q *queue) finish(o *op, e blk.Errno) {
	tag, s := o.req.Tag, o.share
	*o = op{bounce: o.bounce}
	q.inFlight--
	if s != nil {
		q.giveWorker(s)
	}
	q.answered = true
	q.ring.Complete(tag, e)
}
