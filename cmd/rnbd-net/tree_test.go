package main

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/ipoib/dev"
)

// TestIP30_LevelOfTheDataPath: the file data_debug_level is there if the build has
// the trace.
func TestIP30_LevelOfTheDataPath(t *testing.T) {
	trace := &dev.Trace{}
	f := moduleParameters(trace).Lookup("data_debug_level")
	if (f != nil) != dev.DataTrace {
		t.Errorf("the file is there: %t, want %t", f != nil, dev.DataTrace)
	}
}
