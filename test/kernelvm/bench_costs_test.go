package kernelvm

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// perIO is what a request takes of the guest's kernel: switches from one task
// to another, and system calls of each program.
type perIO struct {
	Switches float64
	Calls    map[string]float64 `json:",omitempty"`
}

func (c perIO) String() string {
	s := fmt.Sprintf("%.1f switches", c.Switches)
	for _, program := range slices.Sorted(maps.Keys(c.Calls)) {
		s += fmt.Sprintf(", %.1f calls of %s", c.Calls[program], program)
	}
	return s + " per request"
}

// The kernel counts the system calls of every program at a tracepoint. It is on
// from the start: to turn one on changes code that the other CPU may be running,
// which parallel emulation does not stand.
const (
	countCalls  = "trace_event=raw_syscalls:sys_enter"
	callEvents  = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/"
	callCounter = "hist:keys=common_pid.execname"
)

// withoutTraces leaves the tracepoint on, and records nothing at it.
func (b *peerBench) withoutTraces() {
	b.t.Helper()
	if !strings.Contains(b.g.ReadFile(b.t, "/proc/mounts"), " /sys/kernel/tracing ") {
		b.g.Run(b.t, "mount", "-t", "tracefs", "tracefs", "/sys/kernel/tracing")
	}
	b.g.WriteFile(b.t, "/sys/kernel/tracing/tracing_on", "0")
}

// costs lets every pair do every work once more, and counts.
func (b *peerBench) costs(secs int) map[string]map[string]perIO {
	b.t.Helper()
	b.g.WriteFile(b.t, callEvents+"trigger", callCounter)
	all := map[string]map[string]perIO{}
	for _, w := range benchWorks() {
		all[w.name] = map[string]perIO{}
		for _, p := range b.pairs {
			all[w.name][p.name] = b.cost(p, w, secs)
		}
	}
	return all
}

func (b *peerBench) cost(p benchPair, w benchWork, secs int) perIO {
	b.t.Helper()
	before, calls := b.switches(), b.calls()
	_, n := b.run(p, w, secs)
	c := perIO{Switches: (b.switches() - before) / n, Calls: map[string]float64{}}
	for program, k := range b.calls() {
		if k = (k - calls[program]) / n; k >= 0.05 {
			c.Calls[program] = k
		}
	}
	return c
}

// switches between tasks since the guest was started.
func (b *peerBench) switches() float64 {
	b.t.Helper()
	_, after, _ := strings.Cut(b.g.ReadFile(b.t, "/proc/stat"), "\nctxt ")
	number, _, _ := strings.Cut(after, "\n")
	n, err := strconv.ParseFloat(number, 64)
	if err != nil {
		b.t.Fatalf("switches of /proc/stat: %v", err)
	}
	return n
}

var histogramLine = regexp.MustCompile(`common_pid: (\S+)\s*\[\s*\d+\] } hitcount:\s*(\d+)`)

// calls are the system calls until now, by program.
func (b *peerBench) calls() map[string]float64 {
	b.t.Helper()
	all := map[string]float64{}
	for _, m := range histogramLine.FindAllStringSubmatch(b.g.ReadFile(b.t, callEvents+"hist"), -1) {
		n, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			b.t.Fatalf("system calls: %v", err)
		}
		all[m[1]] += n
	}
	return all
}
