package verbs

// CounterSource is a Device that counts what it does.
type CounterSource interface {
	// Counters returns all counters, also those that are 0, by any goroutine.
	// They never fall.
	Counters() []Counter
}

// Counter is something that a device counts.
type Counter struct {
	Name   string // of the device's choice, in lower case with underscores
	Reason string // where a name is counted by reasons; else empty
	Bytes  bool   // counts bytes; else events
	Value  uint64
}

// CounterPlacedByCopy counts payload that was copied to its place. Devices that
// never copy have none.
const CounterPlacedByCopy = "placed_by_copy"

// PlacedByCopy is the payload in bytes that devices have copied to its place.
func PlacedByCopy(devices map[string]Device) (sum uint64) {
	for _, d := range devices {
		source, ok := d.(CounterSource)
		if !ok {
			continue
		}
		for _, c := range source.Counters() {
			if c.Name == CounterPlacedByCopy {
				sum += c.Value
			}
		}
	}
	return sum
}
