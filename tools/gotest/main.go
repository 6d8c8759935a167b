// Command gotest runs go test over packages of the workspace, side by side. It prints
// failures as they come and a line of progress every ten seconds; at the end it names
// the tests that were left out and why, and fails when the run took longer than its
// budget or ran no test. The results are kept as JSON for the conformance table.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

var (
	out     = flag.String("out", "", "file for the results, in the form of go test -json")
	race    = flag.Bool("race", false, "with the race detector")
	short   = flag.Bool("short", false, "go test -short")
	procs   = flag.String("p", "", "go test -p: how many packages at once")
	run     = flag.String("run", "", "go test -run")
	skip    = flag.String("skip", "", "go test -skip")
	tags    = flag.String("tags", "", "further build tags")
	timeout = flag.String("timeout", "15m", "go test -timeout")
	budget  = flag.Duration("budget", 0, "longest time of the run on a machine without other load; 0: any")
	needs   = flag.String("needs", "", "programs that tests use: those not installed are named first")
	isolate = flag.Bool("isolate", false, "each package with a loopback interface and a /run of its own, where root may make them")
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == isolated {
		execIsolated(os.Args[2:])
	}
	flag.Parse()
	if err := runTests(flag.Args()); err != nil {
		fmt.Println("FAIL ", err)
		os.Exit(1)
	}
}

// runTests runs the tests of packages, which are patterns as go test takes them.
func runTests(packages []string) error {
	if missing := missingPrograms(strings.Fields(*needs)); len(missing) > 0 {
		fmt.Println("not installed, so their tests are left out:", strings.Join(missing, " "))
	}
	r, err := newReport(packages)
	if err != nil {
		return err
	}
	save, err := createResults()
	if err != nil {
		return err
	}
	defer save.Close()
	load := startLoadMeter()
	runErr := r.run(exec.Command("go", testArgs(packages)...), save)
	took := load.stopMeter()
	r.printEnd(took)
	switch {
	case r.failed > 0 || runErr != nil:
		return fmt.Errorf("go test: %v", runErr)
	case r.passed == 0:
		return errors.New("no test was run")
	case *budget > 0 && took.alone > *budget:
		r.printSlowest()
		return fmt.Errorf("the tests passed, but took %s of their own on %d CPUs, and their budget is %s", roundSeconds(took.alone), took.cpus, *budget)
	}
	return nil
}

func testArgs(packages []string) []string {
	args := []string{"test", "-json", "-count=1", "-timeout", *timeout}
	if *race {
		args = append(args, "-race")
	}
	if *short {
		args = append(args, "-short")
	}
	for _, f := range [][2]string{{"-p", *procs}, {"-run", *run}, {"-skip", *skip}, {"-tags", *tags}, {"-exec", isolationCommand()}} {
		if f[1] != "" {
			args = append(args, f[0], f[1])
		}
	}
	return append(args, packages...)
}

func createResults() (*os.File, error) {
	if *out == "" {
		return os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	}
	if err := os.MkdirAll(filepath.Dir(*out), 0o755); err != nil {
		return nil, err
	}
	return os.Create(*out)
}

// missingPrograms returns those programs that are neither in the path nor in /usr/sbin.
func missingPrograms(names []string) (missing []string) {
	for _, name := range names {
		if _, err := exec.LookPath(name); err == nil {
			continue
		}
		if _, err := exec.LookPath("/usr/sbin/" + name); err != nil {
			missing = append(missing, name)
		}
	}
	return missing
}

func roundSeconds(d time.Duration) time.Duration { return d.Round(time.Second) }
