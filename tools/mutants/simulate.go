package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// simulateAll prints a line of a table for each mutant and returns how many no
// schedule has found from at least one of the seeds.
func (r *runner) simulateAll(mutants []mutant, most int) (missed int) {
	fmt.Println("| mutant | what goes wrong | schedules until found | median | as |")
	fmt.Println("|---|---|---|---|---|")
	for i := range mutants {
		m := &mutants[i]
		found, as, err := r.countSchedules(m, most)
		if err != nil {
			fmt.Printf("%s: %v\n", m.name, err)
			missed++
			continue
		}
		words := make([]string, len(found))
		for i, n := range found {
			words[i] = seedCount(n, most)
		}
		slices.Sort(found)
		median := seedCount(found[len(found)/2], most)
		fmt.Printf("| %s | %s | %s | %s | %s |\n", m.name, m.breaks, strings.Join(words, ", "), median, as)
		if found[len(found)-1] > most {
			missed++
		}
	}
	return missed
}

func seedCount(n, most int) string {
	if n > most {
		return fmt.Sprintf("> %d", most)
	}
	return strconv.Itoa(n)
}

// countSchedules returns, by seed, the number of schedules that it took to find m,
// more than most if none did, and the name of the first judge.
func (r *runner) countSchedules(m *mutant, most int) (found []int, as string, err error) {
	overlay, err := r.writeOverlay(m)
	if err != nil {
		return nil, "", err
	}
	dir := filepath.Dir(overlay)
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "sim")
	build := exec.Command("go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", program, ".")
	build.Dir = filepath.Join(r.root, m.pkg)
	if out, err := build.CombinedOutput(); err != nil {
		return nil, "", fmt.Errorf("%w\n%s", err, out)
	}
	for from := range strings.SplitSeq(*seeds, ",") {
		cmd := exec.Command(program, "-test.v", "-test.timeout=0", "-test.run=^"+m.run+"$")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "SIM_FIRST=1", "SIM_N="+strconv.Itoa(most), "SIM_FROM="+from)
		out, err := cmd.CombinedOutput()
		n, judge := firstFound(string(out))
		switch {
		case n > 0:
			found = append(found, n)
			if as == "" {
				as = judge
			}
		case err == nil:
			found = append(found, most+1)
		default:
			return nil, "", fmt.Errorf("%w\n%s", err, out)
		}
		if *verbose {
			fmt.Fprintf(os.Stderr, "%s from %s: %d %s\n", m.name, from, found[len(found)-1], judge)
		}
	}
	return found, as, nil
}

// foundLine is the simulator's line about the first schedule that fails: the
// number of schedules, its seed, and the judge.
var foundLine = regexp.MustCompile(`found after (\d+) schedules, by seed (\d+): (?:[0-9.msh]+: )?(\w+)`)

func firstFound(out string) (n int, judge string) {
	if f := foundLine.FindStringSubmatch(out); f != nil {
		n, _ = strconv.Atoi(f[1])
		judge = f[3]
	}
	return n, judge
}
