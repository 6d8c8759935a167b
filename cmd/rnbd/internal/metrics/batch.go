package metrics

import (
	"math/bits"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

const (
	// maxNames sessions, and as many devices, are told apart.
	maxNames = 100
	// other is the name of the rest; no session can have it.
	other = "_other"
)

// bounded returns a function that leaves the first names as they are and calls
// the others "_other".
func bounded(names []string) func(string) string {
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) <= maxNames {
		return func(name string) string { return name }
	}
	names = names[:maxNames]
	return func(name string) string {
		if _, ok := slices.BinarySearch(names, name); ok {
			return name
		}
		return other
	}
}

// metric is a family of series.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// batch is one scrape. Values with the same labels are added up.
type batch struct {
	sums       map[string]*sum
	histograms map[string]*histogram
}

type sum struct {
	metric
	labels []string
	value  float64
}

type histogram struct {
	desc   *prometheus.Desc
	labels []string
	value  latency.Snapshot
}

func newBatch() *batch { return &batch{map[string]*sum{}, map[string]*histogram{}} }

func key(desc *prometheus.Desc, labels []string) string {
	return desc.String() + "\xff" + strings.Join(labels, "\xff")
}

func (b *batch) add(m metric, value float64, labels ...string) {
	labels = valid(labels)
	k := key(m.desc, labels)
	s := b.sums[k]
	if s == nil {
		s = &sum{metric: m, labels: labels}
		b.sums[k] = s
	}
	s.value += value
}

func (b *batch) addHistogram(desc *prometheus.Desc, value latency.Snapshot, labels ...string) {
	labels = valid(labels)
	k := key(desc, labels)
	h := b.histograms[k]
	if h == nil {
		h = &histogram{desc: desc, labels: labels}
		b.histograms[k] = h
	}
	h.value.Add(value)
}

// valid makes UTF-8 of names that peers have chosen.
func valid(labels []string) []string {
	out := make([]string, len(labels))
	for i, l := range labels {
		out[i] = strings.ToValidUTF8(l, "\uFFFD")
	}
	return out
}

func (b *batch) send(ch chan<- prometheus.Metric) {
	for _, s := range b.sums {
		ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.value, s.labels...)
	}
	for _, h := range b.histograms {
		ch <- prometheus.MustNewConstHistogram(h.desc, h.value.Count(), float64(h.value.Sum)/1e9, cumulative(&h.value), h.labels...)
	}
}

// The buckets shown are powers of four, from 2^10 ns (1 us) to 2^36 ns (69 s):
// each is made of whole buckets of the daemon's.
const (
	firstBound = 10
	lastBound  = 36
)

// cumulative counts the values below each bound, in seconds.
func cumulative(s *latency.Snapshot) map[float64]uint64 {
	out := map[float64]uint64{}
	for b := firstBound; b <= lastBound; b += 2 {
		n := uint64(0)
		for _, bucket := range s.Buckets {
			if bits.Len64(bucket.Upper-1) <= b { // Upper is at most 1<<b
				n += bucket.Count
			}
		}
		out[float64(uint64(1)<<b)/1e9] = n
	}
	return out
}
