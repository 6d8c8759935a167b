// Command gotest runs go test in several modules, keeps the results as JSON for
// the conformance table, and prints the failures.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// event is a line of go test -json (go doc test2json).
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
	Elapsed float64
}

type totals struct{ passed, failed, skipped int }

var (
	out     = flag.String("out", "", "folder for the results")
	race    = flag.Bool("race", false, "with the race detector")
	procs   = flag.String("p", "", "go test -p")
	run     = flag.String("run", "", "go test -run")
	skip    = flag.String("skip", "", "go test -skip")
	timeout = flag.String("timeout", "15m", "go test -timeout")
)

func main() {
	flag.Parse()
	var sum totals
	ok := true
	for _, dir := range flag.Args() {
		if err := test(dir, &sum); err != nil {
			fmt.Printf("FAIL  %s: %v\n", dir, err)
			ok = false
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", sum.passed, sum.failed, sum.skipped)
	if !ok || sum.failed > 0 {
		os.Exit(1)
	}
}

func test(dir string, sum *totals) error {
	args := []string{"test", "-json", "-count=1", "-timeout", *timeout}
	if *race {
		args = append(args, "-race")
	}
	if *procs != "" {
		args = append(args, "-p", *procs)
	}
	if *run != "" {
		args = append(args, "-run", *run)
	}
	if *skip != "" {
		args = append(args, "-skip", *skip)
	}
	cmd := exec.Command("go", append(args, "./...")...)
	cmd.Dir = dir
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	save, err := create(dir)
	if err != nil {
		return err
	}
	defer save.Close()
	if err := cmd.Start(); err != nil {
		return err
	}
	read(io.TeeReader(pipe, save), sum)
	return cmd.Wait()
}

func create(dir string) (io.WriteCloser, error) {
	if *out == "" {
		return os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return nil, err
	}
	return os.Create(filepath.Join(*out, strings.ReplaceAll(dir, "/", "_")+".json"))
}

// read counts tests and prints the output of those that failed.
func read(r io.Reader, sum *totals) {
	output := map[string][]string{}
	scan := bufio.NewScanner(r)
	scan.Buffer(nil, 1<<24)
	for scan.Scan() {
		var e event
		if json.Unmarshal(scan.Bytes(), &e) != nil {
			fmt.Println(scan.Text()) // a build failure, say
			continue
		}
		key := e.Package + "." + e.Test
		switch e.Action {
		case "output", "build-output":
			output[key] = append(output[key], e.Output)
		case "pass", "fail", "skip":
			report(e, output[key], sum)
			delete(output, key)
		}
	}
}

func report(e event, output []string, sum *totals) {
	switch {
	case e.Test == "" && e.Action == "pass":
		fmt.Printf("ok    %s  %s\n", e.Package, time.Duration(e.Elapsed*1e9).Round(time.Millisecond))
	case e.Test == "" && e.Action == "fail":
		fmt.Printf("FAIL  %s\n%s", e.Package, strings.Join(output, ""))
	case e.Test == "":
	case e.Action == "pass":
		sum.passed++
	case e.Action == "skip":
		sum.skipped++
		fmt.Printf("skip  %s.%s: %s\n", e.Package, e.Test, reason(output))
	case e.Action == "fail":
		sum.failed++
		fmt.Printf("--- FAIL: %s.%s\n%s", e.Package, e.Test, strings.Join(output, ""))
	}
}

// reason finds the words of t.Skip.
func reason(output []string) string {
	for _, l := range output {
		if t := strings.TrimSpace(l); t != "" && !strings.HasPrefix(t, "===") && !strings.HasPrefix(t, "---") {
			return t
		}
	}
	return "no reason given"
}
