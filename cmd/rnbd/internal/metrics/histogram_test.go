package metrics

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// shown is the histogram of some values as Prometheus gets it.
func shown(t interface{ Fatal(...any) }, values ...int64) *dto.Histogram {
	var h latency.Histogram
	for _, v := range values {
		h.Record(v)
	}
	var m dto.Metric
	one := &histogram{desc: prometheus.NewDesc("x", "x", nil, nil), value: h.Snapshot()}
	if err := one.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.Histogram
}

// classicBucket returns the bounds of the classic bucket with the only value.
func classicBucket(h *dto.Histogram) (low, high float64) {
	for _, b := range h.Bucket {
		if b.GetCumulativeCount() > 0 {
			return low, b.GetUpperBound()
		}
		low = b.GetUpperBound()
	}
	return low, math.Inf(1)
}

// histogram_quantile answers with a place in the bucket that has the value. So
// both ends of that bucket have to be within 25 % of it.
func TestQuantilesAreWithinAQuarter(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		ns := int64(16_384 * math.Pow(60_000, random.Float64())) // up to 0.98 s
		h, v := shown(t, ns), float64(ns)/1e9
		low, high := classicBucket(h)
		if low > v || high < v || high-low > v/4 {
			t.Fatalf("%v s is between the classic bounds %v and %v", v, low, high)
		}
		if len(h.PositiveSpan) != 1 || len(h.PositiveDelta) != 1 || h.PositiveDelta[0] != 1 {
			t.Fatalf("native: spans %v, deltas %v", h.PositiveSpan, h.PositiveDelta)
		}
		end := math.Exp2(float64(h.PositiveSpan[0].GetOffset()) / 8)
		begin := end / math.Exp2(1.0/8)
		if begin < 0.75*v || end > 1.25*v {
			t.Fatalf("%v s is shown between the native bounds %v and %v", v, begin, end)
		}
	}
}

// The native histogram of many values has all of them, in order.
func TestNativeHistogramsAreComplete(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for n := range 200 {
		values := []int64{0, 1, 2, 3, 4, 5}[:min(n, 6)]
		for range n {
			values = append(values, int64(math.Pow(float64(200*time.Second), random.Float64())))
		}
		h := shown(t, values...)
		total, count := int64(h.GetZeroCount()), int64(0)
		deltas := h.PositiveDelta
		for i, span := range h.PositiveSpan {
			if i > 0 && span.GetOffset() < 1 {
				t.Fatalf("spans touch: %v", h.PositiveSpan)
			}
			for range span.GetLength() {
				count += deltas[0]
				deltas = deltas[1:]
				if count <= 0 {
					t.Fatalf("a bucket has %d values", count)
				}
				total += count
			}
		}
		if len(deltas) > 0 || total != int64(len(values)) || h.GetSampleCount() != uint64(len(values)) {
			t.Fatalf("%d of %d values, %d deltas are left", total, len(values), len(deltas))
		}
	}
}
