//go:build ipoib_debug_data

package dev

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// TestIP30_DataTrace: at level 1 each frame has a log line, at level 0 none has.
func TestIP30_DataTrace(t *testing.T) {
	a, b := hosts(t, 4200)
	var log buffer
	trace := &Trace{}
	ia := a.open(Config{Trace: trace, Logger: slog.New(slog.NewTextHandler(&log, nil))}, "192.168.50.1/24")
	ib := b.open(Config{}, "192.168.50.2/24")
	lines := func() string { return string(log.bytes()) }
	a.ping("192.168.50.2")
	if s := lines(); strings.Contains(s, "IPoIB frame") {
		t.Errorf("level 0: %s", s)
	}
	trace.Data.Store(1)
	a.ping("192.168.50.2")
	for _, event := range []string{"sent", "received"} {
		want := fmt.Sprintf(`msg="IPoIB frame %s" name=%s peer=%s bytes=`, event, ia.Name(), ib.Address())
		if s := lines(); !strings.Contains(s, want) {
			t.Errorf("no line with %s in\n%s", want, s)
		}
	}
	trace.Data.Store(0)
	a.ping("192.168.50.2") // what was under way at the change is logged before it ends
	before := len(lines())
	a.ping("192.168.50.2")
	if s := lines()[before:]; strings.Contains(s, "IPoIB frame") {
		t.Errorf("level 0 again: %s", s)
	}
}
