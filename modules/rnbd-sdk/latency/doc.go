// Package latency counts how long requests take, in histograms of fixed size.
//
// A Histogram has one writer at a time, the thread that runs the requests, and
// any number of readers. Recording is two stores of package tally: no lock, no
// locked instruction, no allocation. Readers take a Snapshot.
// Snapshots can be added and have quantiles. In Ops, the first request of an
// operation allocates its histogram.
//
// A bucket of Histogram is a quarter of a power of two: a value is known to within
// 25 % of itself, from a nanosecond to 2^37 ns (137 s). A bucket of Fine is a 32nd.
package latency
