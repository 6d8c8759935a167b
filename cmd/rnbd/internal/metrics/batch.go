package metrics

import (
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
	servers    map[string]string // names of the servers of sessions
	infos      int               // number of series of rnbd_device_info
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

func newBatch() *batch {
	return &batch{sums: map[string]*sum{}, histograms: map[string]*histogram{}, servers: map[string]string{}}
}

func key(desc *prometheus.Desc, labels []string) string {
	return desc.String() + "\xff" + strings.Join(labels, "\xff")
}

func (b *batch) add(m metric, value float64, labels ...string) { b.of(m, labels).value += value }

// set sets a value, whatever it was.
func (b *batch) set(m metric, value float64, labels ...string) { b.of(m, labels).value = value }

// atLeast raises a value.
func (b *batch) atLeast(m metric, value float64, labels ...string) {
	s := b.of(m, labels)
	s.value = max(s.value, value)
}

// of returns the series with those labels.
func (b *batch) of(m metric, labels []string) *sum {
	labels = valid(labels)
	k := key(m.desc, labels)
	s := b.sums[k]
	if s == nil {
		s = &sum{metric: m, labels: labels}
		b.sums[k] = s
	}
	return s
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
		ch <- h
	}
}
