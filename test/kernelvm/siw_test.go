package kernelvm

import (
	"bufio"
	"regexp"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// The iwarp provider against the kernel's software iWARP.
func TestSIW_Provider(t *testing.T) {
	g := vm.Boot(t, vm.Config{})
	g.SIW(t, "siw0", "10.2.0.1/24", "fd00:2::1/64")
	t.Setenv("CGO_ENABLED", "1")
	t.Setenv("GOFLAGS", "-tags=ibverbs")
	passOn(t, g.GoTest(t, "test/kernelvm/siw", "-test.v", "-test.timeout=8m"))
}

var verdict = regexp.MustCompile(`^--- (PASS|SKIP): (\S+)`)

// passOn gives the tests that ran in the guest a place among ours, so that the
// requirements in their names count.
func passOn(t *testing.T, output string) {
	ran := 0
	for s := bufio.NewScanner(strings.NewReader(output)); s.Scan(); {
		m := verdict.FindStringSubmatch(s.Text())
		if m == nil {
			continue
		}
		ran++
		t.Run(m[2], func(t *testing.T) {
			if m[1] == "SKIP" {
				t.Fatal("was skipped in the guest, which has what it needs")
			}
		})
	}
	if ran == 0 {
		t.Errorf("no test ran in the guest:\n%s", output)
	}
}
