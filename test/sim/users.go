package sim

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// load is the users of one device: they read and write, and judge the answers.
type load struct {
	w       *world
	name    string
	user    *userDisk
	disk    *disk
	history *history
	blocks  int
	index   int
	session string
	queues  bool // loss=queue: no request may fail but by the disk
	cuts    atomic.Int64
	errors  atomic.Int64
	given   atomic.Bool // the device is given up: errors are no news

	mu      sync.Mutex
	writing []bool // by block
	answers int
	pending map[*userRequest]time.Time
	loss    loss
	excuses int       // active faults that excuse failed requests
	excused time.Time // when the last of them ended
}

// excuse lets requests fail until end is called.
func (l *load) excuse() (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.excuses++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.excuses--
		l.excused = time.Now()
	}
}

// mayFail reports whether a request that began then may have failed for a reason.
func (l *load) mayFail(begin time.Time) bool {
	l.mu.Lock()
	excused := l.excuses > 0 || !l.excused.Before(begin)
	l.mu.Unlock()
	if !l.user.isThere() && (l.w.plan.has("other-sizes") || l.w.plan.has("other-cache") || l.w.plan.has("swap-cache")) {
		return true // the operator has unmapped it, for users cannot be told
	}
	return excused || !l.queues || l.given.Load() || l.disk.failedSince(begin)
}

// run lets n users work until ctx is done.
func (l *load) run(ctx context.Context, n int, seed uint64, wg *sync.WaitGroup) {
	for i := range n {
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		wg.Go(func() {
			for ctx.Err() == nil {
				l.step(rnd)
				select {
				case <-ctx.Done():
				case <-time.After(l.pause(rnd, n)):
				}
			}
		})
	}
}

// pause is how long one of n users thinks. Many users exist to have many
// requests in flight when a disk hangs. The later part of a long schedule is
// for hanging requests.
func (l *load) pause(rnd *rand.Rand, n int) time.Duration {
	d := time.Duration(5+rnd.IntN(100)) * time.Millisecond * time.Duration(max(n*l.w.plan.Devices/8, 1))
	if l.w.since(time.Now()) > 2*l.w.plan.Length {
		d *= 4
	}
	return d
}

// step is one request and its judgement.
func (l *load) step(rnd *rand.Rand) {
	caches, fua := l.user.caches()
	switch k := rnd.IntN(20); {
	case k == 0 && caches:
		l.flush()
	case k < 10:
		l.read(rnd.IntN(l.blocks), 1+rnd.IntN(4))
	default:
		l.write(rnd.IntN(l.blocks), 1+rnd.IntN(4), fua && rnd.IntN(4) == 0)
	}
}

// do has one request answered.
func (l *load) do(r *userRequest) blk.Errno {
	r.done = make(chan blk.Errno, 1)
	begin, cuts := time.Now(), l.cuts.Load()
	l.mu.Lock()
	l.pending[r] = begin
	l.mu.Unlock()
	l.user.submit(r)
	errno := <-r.done
	l.mu.Lock()
	delete(l.pending, r)
	l.answers++
	l.mu.Unlock()
	if errno != blk.OK {
		l.errors.Add(1)
	}
	l.w.judgeIsolation(l, r.op.String(), begin)
	tells := r.isDurable() && l.judgeLoss(r, cuts, errno)
	if errno != blk.OK && !tells && !l.mayFail(begin) {
		l.w.violate("errors: %s of %s at %d, begun at %s, failed after %s: %v", r.op, l.name, r.off,
			l.w.since(begin), time.Since(begin).Round(time.Millisecond), errno)
	}
	return errno
}

func (l *load) read(block, n int) {
	n = min(n, l.blocks-block)
	since := make([]stamp, n)
	for i := range since {
		since[i] = l.history.reading(block + i)
	}
	cuts := l.cuts.Load()
	r := &userRequest{op: blk.Read, off: uint64(block) * blockSize, length: uint32(n * blockSize), data: make([]byte, n*blockSize)}
	if l.do(r) != blk.OK {
		return
	}
	for i := range since {
		err := l.history.check(block+i, since[i], r.data[i*blockSize:][:blockSize], cuts != l.cuts.Load())
		if err != nil {
			l.w.violate("data: %s: %v", l.name, err)
		}
	}
}

func (l *load) write(block, n int, fua bool) {
	n = l.claim(block, min(n, l.blocks-block))
	if n == 0 {
		return
	}
	defer l.release(block, n)
	data := make([]byte, n*blockSize)
	stamps := make([]stamp, n)
	for i := range stamps {
		stamps[i] = l.history.begin(block+i, data[i*blockSize:][:blockSize])
	}
	var flags blk.Flags
	if fua {
		flags = blk.FUA
	}
	caches, _ := l.user.caches()
	cuts, mapping := l.cuts.Load(), l.user.mapping()
	r := &userRequest{op: blk.Write, flags: flags, off: uint64(block) * blockSize, length: uint32(len(data)), data: data}
	if l.do(r) != blk.OK || cuts != l.cuts.Load() {
		return // it may have happened
	}
	for i, s := range stamps {
		l.history.acknowledge(block+i, s, mapping, fua || !caches)
	}
}

// claim takes up to n blocks that nobody else writes.
func (l *load) claim(block, n int) (got int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for got < n && !l.writing[block+got] {
		l.writing[block+got] = true
		got++
	}
	return got
}

func (l *load) release(block, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range n {
		l.writing[block+i] = false
	}
}

func (l *load) flush() {
	floors, cuts := l.history.floors(), l.cuts.Load()
	if l.do(&userRequest{op: blk.Flush}) == blk.OK && cuts == l.cuts.Load() {
		l.history.flushed(floors)
	}
}

// powerCut is told that the disk has lost its cache, and what it holds now.
func (l *load) powerCut(content []byte) {
	l.cuts.Add(1)
	mapping := l.user.mapping()
	lost := l.history.powerCut(content, mapping)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loss.excused = true
	if lost {
		l.loss.owed, l.loss.mapping = true, mapping
	}
}

// flushLast flushes if users of the disk do, so that a loss that no flush has met yet is
// judged, too.
func (l *load) flushLast() {
	if caches, _ := l.user.caches(); caches {
		l.flush()
	}
}

// verify reads everything.
func (l *load) verify() {
	for b := 0; b < l.blocks; b += 4 {
		l.read(b, 4)
	}
}

// oldest is how long the oldest request has waited.
func (l *load) oldest() (age time.Duration, op blk.Op) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for r, begin := range l.pending {
		if d := time.Since(begin); d > age {
			age, op = d, r.op
		}
	}
	return age, op
}

// probe writes and reads, and reports whether both were answered without an error.
func (l *load) probe() bool {
	block := l.claimAny()
	if block < 0 {
		return true
	}
	l.release(block, 1)
	before := l.errors.Load()
	l.write(block, 1, false)
	l.read(block, 1)
	return l.errors.Load() == before
}

func (l *load) claimAny() int {
	for b := range l.blocks {
		if l.claim(b, 1) == 1 {
			return b
		}
	}
	return -1
}

// failPending fails the requests that will not be answered any more.
func (l *load) failPending() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for r := range l.pending {
		select {
		case r.done <- blk.EIO:
		default:
		}
	}
}
