package plugincheck

import (
	"os"
	"testing"
	"time"
)

// TestProgram judges the program that RNBD_TEST_PROGRAM names.
func TestProgram(t *testing.T) {
	exe := os.Getenv("RNBD_TEST_PROGRAM")
	if exe == "" {
		t.Skip("RNBD_TEST_PROGRAM names no program")
	}
	r := New(Options{Executable: exe, Config: map[string]string{}})
	for _, c := range Checks() {
		if only := os.Getenv("ONLY"); only != "" && only != c.ID && c.ID != "start-handshake" {
			continue
		}
		res := r.Run(t.Context(), c)
		t.Logf("%-26s %-8s %6d ms  %s", c.ID, res.Outcome, res.Took/time.Millisecond, res.Reason)
	}
}
