package verbs

import (
	"iter"
	"maps"
	"slices"
)

// CounterSource is a Device with counters.
type CounterSource interface {
	// Counters returns all counters, including those that are 0. Values never
	// decrease. It may be called from any goroutine.
	Counters() []Counter
}

// Counter is one counter of a device.
type Counter struct {
	Name   string // of the device's choice, in lower case with underscores
	Reason string // distinguishes counters of one name; empty: there is only one
	Bytes  bool   // Value is in bytes; else it is a number of events
	Value  uint64
}

// Counters yields the counters of those devices that have any, each with the name
// of the device's fabric.
func Counters(devices ...Device) iter.Seq2[string, Counter] {
	return func(yield func(string, Counter) bool) {
		for _, d := range devices {
			source, ok := d.(CounterSource)
			if !ok {
				continue
			}
			for _, c := range source.Counters() {
				if !yield(d.Info().Fabric, c) {
					return
				}
			}
		}
	}
}

// CounterPlacedByCopy is the counter of payload, in bytes, that was copied to its
// place. Devices that never copy have none.
const CounterPlacedByCopy = "placed_by_copy"

// PlacedByCopy returns the sum of CounterPlacedByCopy over devices.
func PlacedByCopy(devices map[string]Device) (sum uint64) {
	for _, c := range Counters(slices.Collect(maps.Values(devices))...) {
		if c.Name == CounterPlacedByCopy {
			sum += c.Value
		}
	}
	return sum
}
