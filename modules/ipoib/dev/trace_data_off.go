//go:build !ipoib_debug_data

package dev

import "github.com/rnbd-go/rnbd/modules/ipoib/wire"

// DataTrace reports whether the trace of the data path is part of this build.
// See trace_data_on.go.
const DataTrace = false

// traceData does nothing. The compiler removes its calls.
func (i *Interface) traceData(string, wire.Address, wire.Frame) {}
