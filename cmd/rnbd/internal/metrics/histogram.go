package metrics

import (
	"math"
	"math/bits"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// A histogram is shown twice: with classic buckets, and as a native histogram
// to a Prometheus that asks for those. Both let histogram_quantile find a
// quantile to within 25 % of itself; classic buckets do from fineFirst to
// fineLast, and have coarse bounds elsewhere, since each bound is a series.

// Bounds of classic buckets are bounds of the daemon's: quarters of a power of
// two from 2^14 ns (16 us) to 2^30 ns (1.07 s), and powers of four from 2^10 ns
// (1 us) to 2^36 ns (69 s) around them.
const (
	firstBound = 10
	fineFirst  = 14
	fineLast   = 30
	lastBound  = 36
)

// bounds are the upper bounds of the classic buckets, in ns.
var bounds = func() (all []uint64) {
	for b := firstBound; b < fineFirst; b += 2 {
		all = append(all, 1<<b)
	}
	for b := fineFirst; b < fineLast; b++ {
		for quarter := uint64(4); quarter < 8; quarter++ {
			all = append(all, quarter<<(b-2))
		}
	}
	for b := fineLast; b <= lastBound; b += 2 {
		all = append(all, 1<<b)
	}
	return all
}()

// schema is that of the native histogram: a power of two has 1<<schema buckets,
// twice as many as the daemon has. A value is shown in the bucket that has the
// middle of its own.
const schema = 3

func (h *histogram) Desc() *prometheus.Desc { return h.desc }

// Write is called by the registry.
func (h *histogram) Write(out *dto.Metric) error {
	out.Label = prometheus.MakeLabelPairs(h.desc, h.labels)
	out.Histogram = &dto.Histogram{
		SampleCount: proto.Uint64(h.value.Count()), SampleSum: proto.Float64(float64(h.value.Sum) / 1e9),
		Bucket: classic(&h.value),
	}
	native(out.Histogram, &h.value)
	return nil
}

// classic counts the values below each bound.
func classic(s *latency.Snapshot) (out []*dto.Bucket) {
	n, next := uint64(0), 0
	for _, bound := range bounds {
		for ; next < len(s.Buckets) && s.Buckets[next].Upper <= bound; next++ {
			n += s.Buckets[next].Count
		}
		out = append(out, &dto.Bucket{UpperBound: proto.Float64(float64(bound) / 1e9), CumulativeCount: proto.Uint64(n)})
	}
	return out
}

// native fills the native histogram of d.
func native(d *dto.Histogram, s *latency.Snapshot) {
	var zero uint64
	counts := map[int]int64{}
	var indices []int
	for _, b := range s.Buckets {
		if b.Upper <= 1 {
			zero += b.Count
			continue
		}
		i := nativeIndex(b.Upper)
		counts[i] += int64(b.Count)
		indices = append(indices, i)
	}
	d.Schema, d.ZeroThreshold, d.ZeroCount = proto.Int32(schema), proto.Float64(0.9e-9), proto.Uint64(zero)
	last, before := 0, int64(0)
	for _, i := range slices.Compact(indices) { // snapshots are in order
		if len(d.PositiveSpan) == 0 || i != last {
			d.PositiveSpan = append(d.PositiveSpan, &dto.BucketSpan{Offset: proto.Int32(int32(i - last)), Length: proto.Uint32(0)})
		}
		span := d.PositiveSpan[len(d.PositiveSpan)-1]
		span.Length = proto.Uint32(span.GetLength() + 1)
		d.PositiveDelta = append(d.PositiveDelta, counts[i]-before)
		last, before = i+1, counts[i]
	}
}

// nativeIndex is the index of the native bucket for the daemon's bucket that
// ends before upper. Native bucket i ends at 2^(i/8) s.
func nativeIndex(upper uint64) int {
	if upper == math.MaxUint64 {
		upper = 1 << 38
	}
	middle := float64(upper) - float64(uint64(1)<<bits.Len64(upper-1))/16 // a bucket is a quarter of the power below
	return int(math.Ceil(math.Log2(middle/1e9) * (1 << schema)))
}
