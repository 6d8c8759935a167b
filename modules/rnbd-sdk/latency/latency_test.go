package latency

import (
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

func TestBucketsCoverAllValuesInOrder(t *testing.T) {
	for s, n := range map[scale]int{coarse: coarseBuckets, fine: fineBuckets} {
		last := uint64(0) // first value of the bucket
		for i := range n {
			if got := s.bucketOf(last, n); got != i {
				t.Fatalf("scale %d: %d is in bucket %d, want %d", s, last, got, i)
			}
			upper := s.upperOf(i, n)
			if upper <= last {
				t.Fatalf("scale %d: bucket %d ends at %d, begins at %d", s, i, upper, last)
			}
			if got := s.bucketOf(upper-1, n); got != i {
				t.Fatalf("scale %d: %d is in bucket %d, want %d", s, upper-1, got, i)
			}
			last = upper
		}
		if last != math.MaxUint64 {
			t.Errorf("scale %d: the last bucket ends at %d", s, last)
		}
		if limit := s.upperOf(n-2, n); limit < 100e9 {
			t.Errorf("scale %d: the last bucket with a limit ends at %v", s, time.Duration(limit))
		}
	}
}

func TestABucketIsAQuarterOfItsValueOrA32nd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := rapid.Uint64Range(0, 100e9).Draw(t, "ns")
		for s, n := range map[scale]int{coarse: coarseBuckets, fine: fineBuckets} {
			if upper := s.upperOf(s.bucketOf(v, n), n); v >= upper || upper-v > max(v>>s, 1) {
				t.Fatalf("scale %d: %d is in a bucket that ends at %d", s, v, upper)
			}
		}
	})
}

func TestFineQuantiles(t *testing.T) {
	var f Fine
	for i := range int64(1000) {
		f.Record((i + 1) * 1000)
	}
	s := f.Snapshot()
	for q, want := range map[float64]time.Duration{0.5: 500e3, 0.99: 990e3} {
		if got := s.Quantile(q); got < want || got > want+want/32 {
			t.Errorf("quantile %g is %v, want %v or a 32nd more", q, got, want)
		}
	}
	if s.Count() != 1000 || s.Mean() != 500500 {
		t.Errorf("%d values, mean %v", s.Count(), s.Mean())
	}
}

// Quantiles are those of the values themselves, up to the width of a bucket;
// count and sum are exact, in one histogram and in the sum of several.
func TestSnapshotsAgreeWithTheValues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Int64Range(0, 100e9), 1, 200).Draw(t, "ns")
		parts := make([]Histogram, rapid.IntRange(1, 4).Draw(t, "parts"))
		var sum uint64
		for i, v := range values {
			parts[i%len(parts)].Record(v)
			sum += uint64(v)
		}
		var s Snapshot
		for i := range parts {
			s.Add(parts[i].Snapshot())
		}
		if s.Count() != uint64(len(values)) || s.Sum != sum || s.Mean() != time.Duration(sum/uint64(len(values))) {
			t.Fatalf("%d values, sum %d: %+v", len(values), sum, s)
		}
		if !slices.IsSortedFunc(s.Buckets, func(a, b Bucket) int { return int(a.Upper>>1) - int(b.Upper>>1) }) {
			t.Fatalf("out of order: %v", s.Buckets)
		}
		slices.Sort(values)
		q := rapid.Float64Range(0, 1).Draw(t, "q")
		rank := max(int(math.Ceil(q*float64(len(values)))), 1)
		exact := values[rank-1]
		if got := int64(s.Quantile(q)); got < exact || got-exact > exact/4 {
			t.Fatalf("quantile %v is %d, exactly %d", q, got, exact)
		}
	})
}

func TestEmptySnapshot(t *testing.T) {
	var h Histogram
	s := h.Snapshot()
	if s.Count() != 0 || s.Quantile(0.5) != 0 || s.Mean() != 0 || s.Buckets != nil {
		t.Errorf("%+v", s)
	}
}

func TestExtremeDurations(t *testing.T) {
	var h Histogram
	h.Record(-5) // clocks of two CPUs
	h.Record(math.MaxInt64)
	s := h.Snapshot()
	if want := []Bucket{{1, 1}, {math.MaxUint64, 1}}; !slices.Equal(s.Buckets, want) || s.Sum != math.MaxInt64 {
		t.Errorf("%+v, want %v", s, want)
	}
	if s.Quantile(1) != math.MaxInt64 {
		t.Errorf("longest %v", s.Quantile(1))
	}
}

func TestOperations(t *testing.T) {
	want := map[blk.Op]string{blk.Read: "read", blk.Write: "write", blk.Flush: "flush",
		blk.Discard: "discard", blk.SecureErase: "discard", blk.WriteZeroes: "write-zeroes"}
	for op := range blk.Op(32) {
		var o Ops
		o.Record(op, 1)
		var s Snapshots
		s.Add(&o)
		var got string
		for i := range s {
			if s[i].Count() == 1 {
				got += OpAt(i).String()
			}
		}
		if got != want[op] {
			t.Errorf("operation %d is counted as %q, want %q", op, got, want[op])
		}
	}
}

func TestRecordAllocatesNothing(t *testing.T) {
	var o Ops
	ns := int64(0)
	if n := testing.AllocsPerRun(1000, func() { ns += 12345; o.Record(blk.Write, ns) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestNowGoesOn(t *testing.T) {
	a := Now()
	time.Sleep(time.Millisecond)
	if b := Now(); b < a+int64(time.Millisecond) {
		t.Errorf("%d, then %d", a, b)
	}
}

func BenchmarkRecord(b *testing.B) {
	var o Ops
	for i := range b.N {
		o.Record(blk.Write, int64(i&0xffff)*100)
	}
}

func BenchmarkNow(b *testing.B) {
	for range b.N {
		Now()
	}
}

// Devices that nobody uses are many: their histograms are not made.
func TestOpsWithoutRequestsAreSmall(t *testing.T) {
	var o Ops
	var s Snapshots
	if s.Add(&o); s[IndexOf(blk.Read)].Count() != 0 {
		t.Errorf("an empty one has counted %+v", s)
	}
	if size := reflect.TypeFor[Ops]().Size(); size > 64 {
		t.Errorf("%d bytes", size)
	}
	o.Record(blk.Read, 5)
	if s.Add(&o); s[IndexOf(blk.Read)].Count() != 1 || o[IndexOf(blk.Write)].h.Load() != nil {
		t.Error("a read is not counted, or made the histogram of writes")
	}
}

// TestSince has counts that grew, and those of a histogram that began again.
func TestSince(t *testing.T) {
	h := func(counts ...uint64) (s Snapshot) {
		for i, n := range counts {
			if n > 0 {
				s.Buckets = append(s.Buckets, Bucket{Upper: 1 << i, Count: n})
			}
		}
		return s
	}
	for _, test := range []struct{ before, now, want Snapshot }{
		{h(), h(1, 2), h(1, 2)},
		{h(1, 2), h(1, 2), h()},
		{h(1, 0, 2), h(1, 5, 4), h(0, 5, 2)},
		{h(9, 1), h(3, 2), h(3, 2)},          // fewer than before
		{h(0, 1, 0), h(5, 0, 3), h(5, 0, 3)}, // a bucket has gone
		{h(1, 0, 4), h(2, 1), h(2, 1)},
	} {
		got := test.now.Since(test.before)
		for q := 0.1; q <= 1; q += 0.1 {
			if got.Count() != test.want.Count() || got.Quantile(q) != test.want.Quantile(q) {
				t.Errorf("%v since %v is %v, want %v", test.now, test.before, got, test.want)
			}
		}
	}
}
