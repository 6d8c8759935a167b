package plugintest

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugincheck"
)

// RunChecks runs the checks of `rnbd plugin test`, each as a test of its own: on a backend
// in this process, or on a program. Checks that need a process are left out for a backend.
func RunChecks(t *testing.T, o plugincheck.Options) {
	r := plugincheck.New(o)
	t.Logf("plugintest: seed %d", r.Seed())
	for _, c := range plugincheck.Checks() {
		t.Run(c.ID, func(t *testing.T) {
			switch result := r.Run(t.Context(), c); result.Outcome {
			case plugincheck.Failed:
				t.Errorf("%s: %s", c.Title, result.Reason)
			case plugincheck.Skipped:
				t.Skip(result.Reason)
			}
		})
	}
}
