package pluginkit

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// result is a line of `rnbd plugin test -o json`.
type result struct{ Check, Outcome, Reason string }

// judge runs the kit on a program.
func judge(t *testing.T, program string, args ...string) []result {
	t.Helper()
	return judgeAs(t, nil, program, args...)
}

// judgeAs is judge with more environment.
func judgeAs(t *testing.T, env []string, program string, args ...string) []result {
	t.Helper()
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), filepath.Join(bin, "rnbd"), append([]string{"plugin", "test", program, "-o", "json"}, args...)...)
	c.Env = append(os.Environ(), env...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	var results []result
	if jerr := json.Unmarshal(out, &results); jerr != nil {
		t.Fatalf("%v: %v: %s", c.Args, err, stderr.String())
	}
	failed := slices.ContainsFunc(results, func(r result) bool { return r.Outcome == "failed" })
	if failed != (err != nil) {
		t.Errorf("exit: %v; a check has failed: %v", err, failed)
	}
	return results
}

// TestRightPluginsPass also bounds what is left out: a kit that leaves out everything passes
// anything.
func TestRightPluginsPass(t *testing.T) {
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	for name, most := range map[string]int{"io-memory": 32, "io-fileio": 4, "io-blockio": 14} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := []string{"--junit", filepath.Join(t.TempDir(), "junit.xml")}
			if testing.Short() {
				args = append(args, "--quick")
			}
			results := judge(t, filepath.Join(bin, name), args...)
			left := 0
			for _, r := range results {
				switch r.Outcome {
				case "failed":
					t.Errorf("%s: %s", r.Check, r.Reason)
				case "skipped":
					left++
					t.Logf("left out %s: %s", r.Check, r.Reason)
				}
			}
			if mayMount() && left > most {
				t.Errorf("%d checks are left out, want at most %d", left, most)
			}
			var suite struct {
				Tests int `xml:"tests,attr"`
			}
			text, err := os.ReadFile(args[1])
			if err == nil {
				err = xml.Unmarshal(text, &suite)
			}
			if err != nil || suite.Tests != len(results) {
				t.Errorf("JUnit file: %d tests, want %d: %v", suite.Tests, len(results), err)
			}
		})
	}
}

// mayMount reports whether this host lets the kit have media and loop devices.
func mayMount() bool {
	for _, f := range []string{"/dev/fuse", "/dev/loop-control"} {
		if _, err := os.Stat(f); err != nil {
			return false
		}
	}
	return os.Geteuid() == 0
}
