package load

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/tally"
)

// job keeps Depth I/Os in flight on one queue. An I/O that is longer than the
// device's largest request goes in parts, and is done when all of them are.
type job struct {
	target  *Target
	w       *Workload
	number  int // among the jobs of the device
	stop    *atomic.Bool
	opened  func()          // called when open has returned
	begin   <-chan struct{} // closed when all jobs have opened
	most    uint64          // I/Os that it makes; 0: any number
	made    uint64
	latency [2]latency.Fine // by latency.IndexOf
	bytes   [2]tally.Count  // by latency.IndexOf

	chooser  *chooser
	queue    Queue
	ios      []io
	parts    int // of the longest I/O: each has so many slots
	slotSize int
	inFlight int // I/Os
	err      error
	done     [64]Done
	scratch  [sector]byte
}

// io is one I/O.
type io struct {
	op    blk.Op
	off   uint64
	len   int
	start int64
	left  int // parts under way
}

// run is the job's goroutine.
func (j *job) run(ctx context.Context) error {
	err := j.open(ctx)
	j.opened()
	if err != nil {
		return err
	}
	<-j.begin
	now := latency.Now()
	for i := range j.ios {
		if !j.spent() {
			j.submit(i, now)
		}
	}
	for j.inFlight > 0 {
		n := j.queue.Wait(j.done[:])
		now := latency.Now()
		for _, d := range j.done[:n] {
			j.complete(d, now)
		}
	}
	if err := j.queue.Close(); j.err == nil && err != nil {
		j.err = err
	}
	return j.err
}

func (j *job) open(ctx context.Context) (err error) {
	l := j.target.Device.Limits()
	j.slotSize = max(j.w.largest(), int(l.LogicalBlockSize))
	if most := int(l.MaxIOSize); most > 0 {
		j.slotSize = min(j.slotSize, most)
	}
	j.parts = (j.w.largest() + j.slotSize - 1) / j.slotSize
	j.ios = make([]io, j.w.Depth)
	r := j.target.region().part(j.number, j.w.Jobs, max(sector, uint64(l.LogicalBlockSize)))
	j.chooser = newChooser(j.w, r, l.LogicalBlockSize, rand.Uint64())
	if j.queue, err = j.target.Device.Open(ctx, j.number, j.w.Jobs, j.w.Depth*j.parts, j.slotSize); err != nil {
		return err
	}
	if j.w.Writes() && j.target.Pattern == nil {
		for i := range j.w.Depth * j.parts {
			noise(j.queue.Buf(i))
		}
	}
	return nil
}

// noise fills b with bytes that do not compress and are not zero.
func noise(b []byte) {
	var key [32]byte
	for i := range key {
		key[i] = byte(rand.Uint32())
	}
	rand.NewChaCha8(key).Read(b)
}

// spent reports whether the job has made all its I/Os.
func (j *job) spent() bool { return j.most > 0 && j.made >= j.most }

// submit starts I/O i.
func (j *job) submit(i int, now int64) {
	o := &j.ios[i]
	for again := true; again; again = j.target.Pattern != nil && j.overlaps(i) {
		o.op, o.off, o.len = j.chooser.choose()
	}
	o.start, o.left = now, 0
	for at := 0; at < o.len; at += j.slotSize {
		r := Request{Op: o.op, Slot: i*j.parts + o.left, Off: o.off + uint64(at), Len: min(o.len-at, j.slotSize)}
		if o.op == blk.Write && j.target.Pattern != nil {
			j.target.Pattern.fill(j.queue.Buf(r.Slot)[:r.Len], r.Off)
		}
		j.queue.Submit(r)
		o.left++
	}
	j.inFlight++
	j.made++
}

// overlaps reports whether another I/O in flight overlaps I/O i: their order
// would not be known.
func (j *job) overlaps(i int) bool {
	o := &j.ios[i]
	for k := range j.ios {
		p := &j.ios[k]
		if k != i && p.left > 0 && o.off < p.off+uint64(p.len) && p.off < o.off+uint64(o.len) {
			return true
		}
	}
	return false
}

// complete takes one answer, and starts the next I/O with the last of its
// parts.
func (j *job) complete(d Done, now int64) {
	i := d.Slot / j.parts
	o := &j.ios[i]
	if err := j.judge(o, d); err != nil && j.err == nil {
		j.err = err
		j.stop.Store(true)
	}
	if o.left--; o.left > 0 {
		return
	}
	j.inFlight--
	if j.err == nil {
		op := latency.IndexOf(o.op)
		j.latency[op].Record(now - o.start)
		j.bytes[op].Add(uint64(o.len))
	}
	if !j.stop.Load() && !j.spent() {
		j.submit(i, now)
	}
}

// judge returns an error for a wrong answer.
func (j *job) judge(o *io, d Done) error {
	at := d.Slot % j.parts * j.slotSize
	off, n := o.off+uint64(at), min(o.len-at, j.slotSize)
	if d.Err != nil {
		return fmt.Errorf("%s of %d bytes at %d: %w", o.op, n, off, d.Err)
	}
	if o.op == blk.Read && j.target.Pattern != nil {
		return j.target.Pattern.check(j.queue.Buf(d.Slot)[:n], off, j.scratch[:])
	}
	return nil
}
