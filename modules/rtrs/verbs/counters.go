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
