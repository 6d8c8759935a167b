package latency

import (
	"math"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/tally"
)

// scale is how fine buckets are: a power of two has 1<<scale of them. Below
// 1<<scale each value has a bucket; then come those of the powers of two, then
// one for the rest.
type scale int

const (
	coarse scale = 2
	fine   scale = 5

	topBits       = 37 // values of that many bits and less have a bucket of their own kind
	coarseBuckets = int((topBits-coarse+1)<<coarse + 1)
	fineBuckets   = int((topBits-fine+1)<<fine + 1)
)

// Histogram counts durations. The zero value is empty.
type Histogram struct {
	sum    tally.Count // ns
	counts [coarseBuckets]tally.Count
}

// Record counts a duration in nanoseconds; one below zero is counted as zero.
// One goroutine at a time.
func (h *Histogram) Record(ns int64) {
	v := uint64(max(ns, 0))
	h.sum.Add(v)
	h.counts[coarse.bucketOf(v, coarseBuckets)].Add(1)
}

// Fine is a Histogram with eight times as many buckets, and as much more memory:
// for measurements. The zero value is empty.
type Fine struct {
	sum    tally.Count // ns
	counts [fineBuckets]tally.Count
}

// Record is that of Histogram.
func (f *Fine) Record(ns int64) {
	v := uint64(max(ns, 0))
	f.sum.Add(v)
	f.counts[fine.bucketOf(v, fineBuckets)].Add(1)
}

// bucketOf finds the bucket of v among n: by its highest bit, and the bits of
// the scale below.
func (s scale) bucketOf(v uint64, n int) int {
	if v < 1<<s {
		return int(v)
	}
	shift := bits.Len64(v) - 1 - int(s)
	return min(shift<<s+int(v>>shift), n-1)
}

// upperOf is the first value above bucket i of n.
func (s scale) upperOf(i, n int) uint64 {
	switch {
	case i < 1<<s:
		return uint64(i) + 1
	case i >= n-1:
		return math.MaxUint64
	}
	shift := i>>s - 1
	return uint64(i&(1<<s-1)+1<<s+1) << shift
}

// Snapshot returns the counts so far.
func (h *Histogram) Snapshot() Snapshot { return coarse.snapshot(&h.sum, h.counts[:]) }

// Snapshot returns the counts so far.
func (f *Fine) Snapshot() Snapshot { return fine.snapshot(&f.sum, f.counts[:]) }

func (s scale) snapshot(sum *tally.Count, counts []tally.Count) Snapshot {
	out := Snapshot{Sum: sum.Load()}
	for i := range counts {
		if n := counts[i].Load(); n > 0 {
			out.Buckets = append(out.Buckets, Bucket{Upper: s.upperOf(i, len(counts)), Count: n})
		}
	}
	return out
}

// Snapshot is a histogram at rest.
type Snapshot struct {
	Sum     uint64   // ns
	Buckets []Bucket // those that are not empty, in order
}

// Bucket has the durations below Upper that no earlier one has.
type Bucket struct {
	Upper uint64 // ns; math.MaxUint64: no limit
	Count uint64
}

// Count is the number of durations.
func (s *Snapshot) Count() (n uint64) {
	for _, b := range s.Buckets {
		n += b.Count
	}
	return n
}

// Add adds the counts of t, whatever its buckets.
func (s *Snapshot) Add(t Snapshot) {
	s.Sum += t.Sum
	for _, b := range t.Buckets {
		i, found := slices.BinarySearchFunc(s.Buckets, b.Upper, func(b Bucket, upper uint64) int {
			switch {
			case b.Upper < upper:
				return -1
			case b.Upper > upper:
				return 1
			}
			return 0
		})
		if found {
			s.Buckets[i].Count += b.Count
		} else {
			s.Buckets = slices.Insert(s.Buckets, i, b)
		}
	}
}

// Since returns the durations that s has and the earlier snapshot before does not.
// Where a bucket has fallen, the histogram began again at 0, and all of s is new. The
// result may share memory with s.
func (s Snapshot) Since(before Snapshot) Snapshot {
	out := Snapshot{Sum: s.Sum - min(before.Sum, s.Sum)}
	k := 0
	for _, b := range s.Buckets {
		old := uint64(0)
		if k < len(before.Buckets) && before.Buckets[k].Upper < b.Upper {
			return s
		}
		if k < len(before.Buckets) && before.Buckets[k].Upper == b.Upper {
			old = before.Buckets[k].Count
			k++
		}
		switch {
		case b.Count < old:
			return s
		case b.Count > old:
			out.Buckets = append(out.Buckets, Bucket{Upper: b.Upper, Count: b.Count - old})
		}
	}
	if k < len(before.Buckets) {
		return s
	}
	return out
}

// Quantile is the duration that a share of q of the requests, 0 to 1, did not
// exceed: the longest of its bucket. 0 when nothing was counted.
func (s *Snapshot) Quantile(q float64) time.Duration {
	rank := uint64(math.Ceil(q * float64(s.Count())))
	var seen uint64
	for _, b := range s.Buckets {
		if seen += b.Count; seen >= max(rank, 1) {
			return time.Duration(min(max(b.Upper, 1)-1, math.MaxInt64))
		}
	}
	return 0
}

// Mean is the average; 0 when nothing was counted.
func (s *Snapshot) Mean() time.Duration {
	if n := s.Count(); n > 0 {
		return time.Duration(s.Sum / n)
	}
	return 0
}

// Ops are the histograms of one stage, by operation. The zero value is empty,
// and small: an operation has a histogram from its first request on.
type Ops [len(ops)]Lazy

// Lazy is a histogram that takes memory when something is counted.
type Lazy struct{ h atomic.Pointer[Histogram] }

// Record is that of the histogram.
func (l *Lazy) Record(ns int64) {
	h := l.h.Load()
	if h == nil {
		h = new(Histogram)
		l.h.Store(h)
	}
	h.Record(ns)
}

// Snapshot is that of the histogram.
func (l *Lazy) Snapshot() Snapshot {
	if h := l.h.Load(); h != nil {
		return h.Snapshot()
	}
	return Snapshot{}
}

// ops are the operations that are told apart.
var ops = [...]blk.Op{blk.Read, blk.Write, blk.Flush, blk.Discard, blk.WriteZeroes}

// OpAt is the operation at index i of Ops.
func OpAt(i int) blk.Op { return ops[i] }

// Record counts a request. A secure erase is a discard; other numbers are not
// counted.
func (o *Ops) Record(op blk.Op, ns int64) {
	if i := IndexOf(op); i >= 0 {
		o[i].Record(ns)
	}
}

// IndexOf is the index of op in Ops, -1 if it has none.
func IndexOf(op blk.Op) int {
	switch op {
	case blk.Read:
		return 0
	case blk.Write:
		return 1
	case blk.Flush:
		return 2
	case blk.Discard, blk.SecureErase:
		return 3
	case blk.WriteZeroes:
		return 4
	}
	return -1
}

// Snapshots are those of an Ops.
type Snapshots [len(ops)]Snapshot

// Add adds the counts of o.
func (s *Snapshots) Add(o *Ops) {
	for i := range o {
		s[i].Add(o[i].Snapshot())
	}
}

var start = time.Now()

// Now is a clock for durations, in nanoseconds, above 0. It is one look at the system's
// clock: take one for a batch of requests.
func Now() int64 { return int64(time.Since(start) + longAgo) }

// longAgo keeps Now above 0 under testing/synctest, too: its time begins in
// 2000.
const longAgo = 100 * 365 * 24 * time.Hour
