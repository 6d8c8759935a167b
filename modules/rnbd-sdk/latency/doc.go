// Package latency counts how long requests take, in histograms of fixed size.
//
// A Histogram has one writer at a time, the thread that runs the requests, and
// any number of readers. Recording is two stores into memory that nobody else
// writes: no lock, no locked instruction, no allocation. Readers take a
// Snapshot, which they may add to others and ask for quantiles. In Ops, the first
// request of an operation allocates its histogram.
//
// A bucket is a quarter of a power of two: a value is known to within 25 %
// of itself, from a nanosecond to 2^37 ns (137 s).
package latency
