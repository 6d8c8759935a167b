package plugincheck

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// Options say which plugin is judged, and how. Executable or Backend is set.
type Options struct {
	Executable string            // the program
	Backend    plugin.Backend    // runs in this process in place of a program; it has several lives, one after the other
	HeapRing   bool              // the race detector sees the rings; only with Backend
	Config     map[string]string // settings of the plugin; {dir} in a value stands for a folder with the file "disk"
	// Disk is the name of a disk for the checks, whose contents are lost: a path for a
	// plugin with paths as names. Empty: the kit makes files; with names of the plugin's own "disk".
	Disk     string
	Seed     uint64       // of random patterns; 0: the time
	Span     int          // bytes of a disk that are used, half at each end; 0: 2 MiB
	Quick    bool         // fewer rounds of the checks that repeat
	Launcher []string     // program and arguments that confine the plugin (package confine); nil: checks of that are left out
	Logger   *slog.Logger // gets the plugin's log; nil: nothing does
	TempDir  string       // for the kit's files; empty: the system's
}

func (o Options) withDefaults() Options {
	if o.Seed == 0 {
		o.Seed = uint64(time.Now().UnixNano())
	}
	if o.Span == 0 {
		o.Span = 2 << 20
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Check is one of the things that a plugin must do.
type Check struct {
	ID    string // stable: group, dash, subject
	Title string // what the plugin must do
	// Needs are checks whose failure makes this one meaningless.
	Needs []string

	run func(*T)
}

// Outcome is the end of a check.
type Outcome string

const (
	Passed  Outcome = "passed"
	Failed  Outcome = "failed"
	Skipped Outcome = "skipped"
)

// Result is the outcome of a check.
type Result struct {
	Check   Check
	Outcome Outcome
	Reason  string // why it failed or was left out
	Took    time.Duration
}

// Checks returns all checks in the order in which they run.
func Checks() []Check {
	return slices.Concat(startChecks, describeChecks, ringChecks, dataChecks, refusalChecks, queueChecks, zeroChecks, openChecks,
		extentChecks, fenceChecks, mediumChecks, controlChecks, leakChecks, endChecks)
}

// Runner judges one plugin. It runs one check at a time.
type Runner struct {
	o      Options
	failed map[string]bool
	info   plugin.Info
}

// New returns a runner.
func New(o Options) *Runner { return &Runner{o: o.withDefaults(), failed: map[string]bool{}} }

// Seed returns the seed of the random patterns.
func (r *Runner) Seed() uint64 { return r.o.Seed }

// Info returns the plugin's description of itself, once the first check has passed.
func (r *Runner) Info() plugin.Info { return r.info }

// checkTime bounds a check.
const checkTime = time.Minute

// Run runs one check. It returns when everything that the check has started has ended.
func (r *Runner) Run(ctx context.Context, c Check) Result {
	start := time.Now()
	result := Result{Check: c, Outcome: Passed}
	if i := slices.IndexFunc(c.Needs, func(id string) bool { return r.failed[id] }); i >= 0 {
		result.Outcome, result.Reason = Skipped, "it builds on "+c.Needs[i]+", which has not passed"
		r.failed[c.ID] = true
		return result
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	t := &T{Runner: r, ctx: ctx, check: c, random: newRandom(r.o.Seed)}
	result.Outcome, result.Reason = t.judge()
	result.Took = time.Since(start)
	r.failed[c.ID] = result.Outcome == Failed
	return result
}

// T is one run of a check.
type T struct {
	*Runner
	ctx      context.Context
	check    Check
	random   *random
	cleanups []func()
	failure  string // the first one of Errorf
}

// stop is the panic that ends a check.
type stop struct {
	outcome Outcome
	reason  string
}

// judge runs the check and its clean-up.
func (t *T) judge() (outcome Outcome, reason string) {
	defer func() {
		if outcome == Passed && t.failure != "" {
			outcome, reason = Failed, t.failure
		}
	}()
	defer t.cleanUp()
	defer func() {
		switch s := recover().(type) {
		case nil:
		case stop:
			outcome, reason = s.outcome, s.reason
			if t.failure != "" {
				outcome, reason = Failed, t.failure
			}
		default:
			panic(s)
		}
	}()
	t.check.run(t)
	return Passed, ""
}

func (t *T) cleanUp() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}

// Cleanup has f called at the end of the check; the last one first.
func (t *T) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

// Fatalf ends the check as failed. Only the goroutine of the check may call it.
func (t *T) Fatalf(format string, args ...any) {
	panic(stop{Failed, fmt.Sprintf(format, args...)})
}

// Errorf fails the check and goes on.
func (t *T) Errorf(format string, args ...any) {
	if t.failure == "" {
		t.failure = fmt.Sprintf(format, args...)
	}
}

// Skipf ends the check as left out.
func (t *T) Skipf(format string, args ...any) {
	panic(stop{Skipped, fmt.Sprintf(format, args...)})
}

// must ends the check as failed if there is an error.
func (t *T) must(what string, err error) {
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// rounds is n, or fewer where the caller wants a quick run.
func (t *T) rounds(n int) int {
	if t.o.Quick {
		return max(n/10, 1)
	}
	return n
}

// tempDir makes a folder that lasts as long as the check.
func (t *T) tempDir() string {
	dir, err := os.MkdirTemp(t.o.TempDir, "rnbd-plugin-test-")
	t.must("make a temporary folder", err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// random makes patterns that a seed brings back.
type random struct {
	*rand.Rand
	src *rand.ChaCha8
}

func newRandom(seed uint64) *random {
	var key [32]byte
	for i := range 8 {
		key[i] = byte(seed >> (8 * i))
	}
	src := rand.NewChaCha8(key)
	return &random{rand.New(src), src}
}

func (r *random) fill(b []byte) { _, _ = r.src.Read(b) }

// bytes returns n bytes, none of which is zero: they differ from an empty disk in each place.
func (r *random) bytes(n int) []byte {
	b := make([]byte, n)
	r.fill(b)
	for i := range b {
		b[i] |= 1
	}
	return b
}
