package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// testEvent is a line of go test -json (go doc test2json).
type testEvent struct {
	Action     string
	Package    string
	ImportPath string // of build-output and build-fail
	Test       string
	Output     string
	Elapsed    float64
}

// runReport counts the tests of a run and prints what a reader should know early.
type runReport struct {
	passed, failed, skipped int

	packages int // with tests
	begin    time.Time

	mu       sync.Mutex
	done     int
	running  map[string]time.Time // top-level tests, by package and name
	output   map[string][]string  // of tests and packages that run
	leftOut  map[string][]string  // top-level tests by the reason of their skip
	deferred []string             // lines of packages that run a part of their tests
	slowest  []testEvent          // packages that have ended
}

func newReport(packages []string) (*runReport, error) {
	r := &runReport{begin: time.Now(), running: map[string]time.Time{}, output: map[string][]string{}, leftOut: map[string][]string{}}
	list := exec.Command("go", append([]string{"list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}"}, packages...)...)
	list.Stderr = os.Stderr
	names, err := list.Output()
	r.packages = len(strings.Fields(string(names)))
	return r, err
}

const progressInterval = 10 * time.Second

// run runs go test, reads its events and copies them to save.
func (r *runReport) run(cmd *exec.Cmd, save io.Writer) error {
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	ticker := time.NewTicker(progressInterval)
	defer ticker.Stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.readEvents(io.TeeReader(pipe, save))
	}()
	for {
		select {
		case <-ticker.C:
			r.printProgress()
		case <-done:
			return cmd.Wait()
		}
	}
}

func (r *runReport) readEvents(events io.Reader) {
	scan := bufio.NewScanner(events)
	scan.Buffer(nil, 1<<24)
	for scan.Scan() {
		var e testEvent
		if json.Unmarshal(scan.Bytes(), &e) != nil {
			fmt.Println(scan.Text())
			continue
		}
		r.mu.Lock()
		r.addEvent(e)
		r.mu.Unlock()
	}
}

// addEvent counts one event. The caller holds r.mu.
func (r *runReport) addEvent(e testEvent) {
	name := e.Package + "." + e.Test
	switch e.Action {
	case "run", "cont":
		if !strings.Contains(e.Test, "/") {
			r.running[name] = time.Now()
		}
	case "pause": // until the tests have ended that are not parallel
		delete(r.running, name)
	case "output":
		r.output[name] = append(r.output[name], e.Output)
		if strings.HasPrefix(e.Output, partOfTests) {
			r.deferred = append(r.deferred, lastElement(e.Package)+strings.TrimPrefix(e.Output, partOfTests))
		}
	case "build-output":
		fmt.Print(e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			r.addPackage(e, r.output[name])
		} else {
			r.addTest(e, r.output[name])
		}
		delete(r.output, name)
		delete(r.running, name)
	}
}

// partOfTests begins the line that a package prints when -short has it run a part of
// its tests (package lab).
const partOfTests = "part of the tests:"

func (r *runReport) addPackage(e testEvent, output []string) {
	if e.Action == "skip" { // it has no tests
		return
	}
	r.done++
	r.slowest = append(r.slowest, e)
	if e.Action == "pass" {
		fmt.Printf("ok    %s  %s\n", e.Package, time.Duration(e.Elapsed*1e9).Round(time.Millisecond))
		return
	}
	fmt.Printf("FAIL  %s\n%s", e.Package, strings.Join(output, ""))
	for _, name := range slices.Sorted(maps.Keys(r.output)) { // it ended in the middle of them
		if strings.HasPrefix(name, e.Package+".Test") {
			fmt.Printf("      ended with %s\n%s", name, strings.Join(r.output[name], ""))
			delete(r.output, name)
			delete(r.running, name)
		}
	}
}

func (r *runReport) addTest(e testEvent, output []string) {
	switch e.Action {
	case "pass":
		r.passed++
	case "skip":
		r.skipped++
		if strings.Contains(e.Test, "/") { // mostly a case of a suite that does not apply to its subject
			return
		}
		why := skipReason(output)
		r.leftOut[why] = append(r.leftOut[why], lastElement(e.Package)+"."+e.Test)
	case "fail":
		r.failed++
		fmt.Printf("--- FAIL: %s.%s\n%s", e.Package, e.Test, strings.Join(output, ""))
	}
}

// skipReason returns the message of t.Skip.
func skipReason(output []string) string {
	for _, line := range output {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "===") || strings.HasPrefix(line, "---") {
			continue
		}
		if _, message, ok := strings.Cut(line, ".go:"); ok { // FILE.go:LINE: message
			_, line, _ = strings.Cut(message, ": ")
		}
		return line
	}
	return "no reason given"
}

func lastElement(path string) string { return path[strings.LastIndex(path, "/")+1:] }

// runLabel names a run by its results, since two may share a terminal.
func runLabel() string {
	if *out == "" {
		return ""
	}
	return strings.TrimSuffix(filepath.Base(*out), ".json") + " "
}

// printProgress prints a line with the counts and the tests that run the longest.
func (r *runReport) printProgress() {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := slices.SortedFunc(maps.Keys(r.running), func(a, b string) int { return r.running[a].Compare(r.running[b]) })
	var longest []string
	for _, name := range names[:min(3, len(names))] {
		longest = append(longest, fmt.Sprintf("%s (%s)", lastElement(name), roundSeconds(time.Since(r.running[name]))))
	}
	what := "compiling"
	if len(longest) > 0 {
		what = strings.Join(longest, ", ")
	}
	fmt.Printf("%s%6s  %d of %d packages, %d tests passed, %d failed; now %s\n", runLabel(), roundSeconds(time.Since(r.begin)), r.done, r.packages, r.passed, r.failed, what)
}

const mostNamed = 4 // tests that a line names

// printEnd prints what was left out, and the line of counts.
func (r *runReport) printEnd(took runUsage) {
	for _, why := range slices.Sorted(maps.Keys(r.leftOut)) {
		names := r.leftOut[why]
		more := ""
		if len(names) > mostNamed {
			names, more = names[:mostNamed], fmt.Sprintf(" and %d more", len(names)-mostNamed)
		}
		fmt.Printf("left out: %s: %s%s\n", why, strings.Join(names, ", "), more)
	}
	for _, line := range r.deferred {
		fmt.Print("part of ", line)
	}
	if missing := missingPrograms(strings.Fields(*needs)); len(missing) > 0 {
		fmt.Println("not installed, so their tests were left out:", strings.Join(missing, " "))
	}
	fmt.Printf("%d passed, %d failed, %d skipped in %s, of which %s without other load; %s of CPU\n",
		r.passed, r.failed, r.skipped, roundSeconds(took.wall), roundSeconds(took.alone), roundSeconds(took.cpu))
}

const mostSlow = 8 // packages that a run beyond its budget names

func (r *runReport) printSlowest() {
	slices.SortFunc(r.slowest, func(a, b testEvent) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
	for _, e := range r.slowest[:min(mostSlow, len(r.slowest))] {
		fmt.Printf("slow  %6.1fs  %s\n", e.Elapsed, e.Package)
	}
}
