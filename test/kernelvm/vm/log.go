package vm

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// bad are words of a kernel that has found itself in error.
var bad = regexp.MustCompile(`WARNING:|BUG:|BUG |Oops|RIP: |Call Trace|general protection|invalid opcode|unable to handle|` +
	`circular locking|inconsistent lock|suspicious RCU|blocked for more than|soft lockup|rcu.*stall|refcount_t|` +
	`UBSAN|KASAN|KFENCE: |use-after-free|Kernel panic|AGENT FAILED|scheduling while atomic|list_(add|del) corruption`)

// harmless are lines that look like it. KFENCE greets at boot.
var harmless = regexp.MustCompile(`kfence: initialized`)

// KernelLog returns the text of the guest's console so far.
func (g *Guest) KernelLog() string {
	b, _ := os.ReadFile(g.consolePath())
	return strings.ReplaceAll(string(b), "\r", "")
}

// Splats returns the lines of a log with complaints of the kernel about itself.
func Splats(log string) (lines []string) {
	for l := range strings.Lines(log) {
		if bad.MatchString(l) && !harmless.MatchString(l) {
			lines = append(lines, strings.TrimSpace(l))
		}
	}
	return lines
}

// CheckKernelLog fails the test if the kernel has ever warned of itself.
func (g *Guest) CheckKernelLog(t testing.TB) {
	t.Helper()
	g.check(t, 0)
}

func (g *Guest) check(t testing.TB, from int) {
	t.Helper()
	log := g.KernelLog()
	log = log[min(from, len(log)):]
	if lines := Splats(log); len(lines) > 0 {
		t.Errorf("the guest's kernel: %s\nits log:\n%s", strings.Join(lines, "\n"), tail(log, 120))
	}
}

// Watch checks the kernel's log of the time from now to the end of the test.
// The test's own cleanups, registered later, come before.
func (g *Guest) Watch(t testing.TB) {
	from := len(g.KernelLog())
	t.Cleanup(func() {
		g.check(t, from)
		if t.Failed() {
			log := g.KernelLog()
			t.Logf("kernel log of the guest:\n%s", tail(log[min(from, len(log)):], 60))
		}
	})
}

func tail(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
