//go:build ipoib_debug_data

package dev

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// DataTrace reports whether the trace of the data path is part of this build.
// The build tag ipoib_debug_data adds it, as an option of Linux's configuration
// does there.
const DataTrace = true

// traceData logs a frame that is sent, or received, at a Trace.Data above 0. peer
// is the other end's link-layer address.
func (i *Interface) traceData(event string, peer wire.Address, frame wire.Frame) {
	if t := i.cfg.Trace; t != nil && t.Data.Load() > 0 {
		kind := ""
		if frame.Valid() {
			kind = fmt.Sprintf("0x%04x", frame.Type())
		}
		i.cfg.Logger.Info("IPoIB frame "+event, "name", i.Name(), "peer", peer, "bytes", len(frame), "type", kind)
	}
}
