// Package tally counts what one goroutine at a time does, for others to read.
//
// On amd64 the stores of sync/atomic are locked instructions. They wait until
// every earlier store has reached the cache, a copy of payload for instance, and
// a request is counted in a dozen places. Here a counter is written by an
// ordinary store. The memory model of Go has a reader see one of the values that
// were written, since they are words, and the CPU shows stores to other CPUs in
// their order. Elsewhere, and for the race detector, sync/atomic is used: there a
// store costs little, or is to be seen.
package tally
