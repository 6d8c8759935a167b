// Command fuzzall runs every fuzz target of the given modules for a while,
// one after the other.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

var (
	duration = flag.String("time", "5m", "how long each target runs")
	only     = flag.String("only", "", "targets whose name contains this")
	workers  = flag.String("parallel", "", "go test -parallel")
)

func main() {
	flag.Parse()
	failed := 0
	for _, mod := range flag.Args() {
		for _, pkg := range listPackages(mod) {
			for _, target := range listTargets(mod, pkg) {
				if strings.Contains(target, *only) && !runTarget(mod, pkg, target) {
					failed++
				}
			}
		}
	}
	if failed > 0 {
		fmt.Printf("%d targets found something; the inputs are in testdata/fuzz\n", failed)
		os.Exit(1)
	}
}

func listPackages(mod string) []string { return goLines(mod, "list", "./...") }

func listTargets(mod, pkg string) (out []string) {
	for _, l := range goLines(mod, "test", "-list", "^Fuzz", pkg) {
		if strings.HasPrefix(l, "Fuzz") {
			out = append(out, l)
		}
	}
	return out
}

func goLines(mod string, args ...string) []string {
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Stderr = mod, os.Stderr
	b, err := cmd.Output()
	if err != nil {
		fmt.Fprintf(os.Stderr, "fuzzall: %s: go %s: %v\n", mod, strings.Join(args, " "), err)
		os.Exit(1)
	}
	return strings.Fields(string(b))
}

func runTarget(mod, pkg, target string) bool {
	// Minimising is bounded: for targets with a live server behind them it takes for ever.
	args := []string{"test", "-run", "^$", "-fuzz", "^" + target + "$", "-fuzztime", *duration, "-fuzzminimizetime", "5x"}
	if *workers != "" {
		args = append(args, "-parallel", *workers)
	}
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Dir = mod
	b, err := cmd.CombinedOutput()
	out := strings.Split(strings.TrimSpace(string(b)), "\n")
	if err != nil {
		fmt.Printf("FAIL  %s %s\n%s\n", pkg, target, b)
		return false
	}
	last := ""
	for _, l := range out {
		if strings.HasPrefix(l, "fuzz: elapsed") {
			last = l
		}
	}
	fmt.Printf("ok    %s %s  %s\n", pkg, target, last)
	return true
}
