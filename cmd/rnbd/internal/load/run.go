package load

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// Target is a device and how much of it is used.
type Target struct {
	Name    string
	Device  Device
	Size    uint64   // the first bytes; 0: all
	Pattern *Pattern // nil: nothing is compared
}

func (t *Target) region() region {
	size := t.Device.Limits().Size
	if t.Size > 0 {
		size = min(size, t.Size)
	}
	return region{0, size}
}

// Used returns the size of the part of the device that the load uses, in bytes.
func (t *Target) Used() uint64 { return t.region().size }

// room returns the number of its largest I/Os that a part must have space
// for. With a pattern, no two I/Os under way overlap, so some space must stay
// free.
func (t *Target) room(w Workload) uint64 {
	if t.Pattern != nil {
		return 4 * uint64(w.Depth)
	}
	return 1
}

// Fits reports whether w can run on t.
func (t *Target) Fits(w Workload) error {
	l := t.Device.Limits()
	if w.Writes() && l.ReadOnly {
		return fmt.Errorf("%s: it is read-only here: %w", t.Name, syscall.EROFS)
	}
	if len(w.Blocks) == 1 && l.LogicalBlockSize > 0 && w.Blocks[0].Bytes%int(l.LogicalBlockSize) != 0 {
		return fmt.Errorf("%s: requests of %d bytes are no multiple of its blocks of %d: %w", t.Name, w.Blocks[0].Bytes, l.LogicalBlockSize, syscall.EINVAL)
	}
	if need := uint64(w.Jobs) * t.room(w) * uint64(w.largest()); t.region().size < need {
		return fmt.Errorf("%s: %d bytes are too few for %s, which needs %d: use fewer jobs, a smaller depth or smaller requests: %w", t.Name, t.region().size, w.Name, need, syscall.EINVAL)
	}
	return nil
}

// Result is the result of a run. By operation: read, write.
type Result struct {
	Workload Workload
	Elapsed  time.Duration
	CPU      time.Duration // of this process meanwhile
	Latency  [2]latency.Snapshot
	Bytes    [2]uint64
	Rates    [2][]float64 // requests per second, in each interval of 200 ms that was whole
}

// Requests is their number.
func (r *Result) Requests() uint64 { return r.Latency[0].Count() + r.Latency[1].Count() }

// OpOf is the operation at index i of a Result.
func OpOf(i int) blk.Op { return latency.OpAt(i) }

// Options bound the time of a run and name the receiver of its progress.
type Options struct {
	Time     time.Duration
	Requests uint64                                       // of each job; 0: any number
	Progress func(requests uint64, elapsed time.Duration) // nil: not reported
}

// interval is the time between two looks at a run's counters.
const interval = 200 * time.Millisecond

// Run makes the load of w on all targets at the same time. When ctx ends, Run
// ends with its result so far: that is no error.
func Run(ctx context.Context, w Workload, targets []*Target, o Options) (Result, error) {
	var stop atomic.Bool
	var opened sync.WaitGroup
	begin := make(chan struct{})
	var jobs []*job
	for _, t := range targets {
		for i := range w.Jobs {
			opened.Add(1)
			jobs = append(jobs, &job{target: t, w: &w, number: i, most: o.Requests, stop: &stop, opened: opened.Done, begin: begin})
		}
	}
	errs := make([]error, len(jobs))
	var wg sync.WaitGroup
	for i, j := range jobs {
		wg.Go(func() { errs[i] = j.guard(ctx) })
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	opened.Wait()
	start, cpu := time.Now(), cpuTime()
	close(begin)
	rates := watch(ctx, ended, start, jobs, o)
	stop.Store(true)
	<-ended
	r := sum(w, jobs)
	r.Elapsed, r.CPU, r.Rates = time.Since(start), cpuTime()-cpu, rates
	for _, err := range errs {
		if err != nil {
			return r, fmt.Errorf("%s: %w", w.Name, err)
		}
	}
	return r, nil
}

// guard ends the others when this one fails.
func (j *job) guard(ctx context.Context) error {
	err := j.run(ctx)
	if err == nil {
		return nil
	}
	j.stop.Store(true)
	return fmt.Errorf("%s: %w", j.target.Name, err)
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// watch returns when the time is over, ctx has ended or all jobs have. It returns
// the rates of the intervals.
func watch(ctx context.Context, ended <-chan struct{}, start time.Time, jobs []*job, o Options) (rates [2][]float64) {
	over := time.NewTimer(o.Time)
	defer over.Stop()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var before Result
	for {
		select {
		case <-over.C:
			return rates
		case <-ctx.Done():
			return rates
		case <-ended:
			return rates
		case <-tick.C:
			now := sum(Workload{}, jobs)
			now.Elapsed = time.Since(start)
			for i := range rates {
				n := now.Latency[i].Count() - before.Latency[i].Count()
				rates[i] = append(rates[i], float64(n)/(now.Elapsed-before.Elapsed).Seconds())
			}
			if before = now; o.Progress != nil {
				o.Progress(now.Requests(), now.Elapsed)
			}
		}
	}
}

func sum(w Workload, jobs []*job) Result {
	r := Result{Workload: w}
	for _, j := range jobs {
		for i := range r.Latency {
			r.Latency[i].Add(j.latency[i].Snapshot())
			r.Bytes[i] += j.bytes[i].Load()
		}
	}
	return r
}

// sweepBlock is the size of the requests of Fill and ReadBack.
const sweepBlock = 64 << 10

// Fill writes every byte of t once, in sequence.
func Fill(ctx context.Context, t *Target) error {
	_, err := t.sweep(ctx, blk.Write, func(uint64, uint64) bool { return true })
	if err != nil {
		return fmt.Errorf("fill %s: %w", t.Name, err)
	}
	return nil
}

// ReadBack reads everything that t's pattern was written to, compares it, and
// returns how many bytes that were.
func ReadBack(ctx context.Context, t *Target) (bytes uint64, err error) {
	bytes, err = t.sweep(ctx, blk.Read, t.Pattern.written)
	if err != nil {
		return bytes, fmt.Errorf("read back %s: %w", t.Name, err)
	}
	return bytes, nil
}

// sweep makes requests in sequence for all blocks that are wanted, one at a time.
func (t *Target) sweep(ctx context.Context, op blk.Op, wanted func(off, n uint64) bool) (bytes uint64, err error) {
	size := t.region().size
	w := Workload{Name: "sweep", Blocks: []Block{{sweepBlock, 1}}, Depth: 1, Jobs: 1}
	j := &job{target: t, w: &w, stop: new(atomic.Bool)}
	j.stop.Store(true) // no I/O follows another by itself
	if err := j.open(ctx); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, j.queue.Close()) }()
	for off := uint64(0); off < size && ctx.Err() == nil; off += uint64(j.slotSize) {
		n := min(uint64(j.slotSize), size-off)
		if !wanted(off, n) {
			continue
		}
		j.ios[0] = io{op: op, off: off, len: int(n)}
		j.queue.Submit(Request{Op: op, Off: off, Len: int(n)})
		j.queue.Wait(j.done[:1])
		if err := j.judge(&j.ios[0], j.done[0]); err != nil {
			return bytes, err
		}
		bytes += n
	}
	return bytes, ctx.Err()
}
