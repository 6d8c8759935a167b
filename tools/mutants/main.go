// Command mutants breaks the tree on purpose, one line at a time, and looks
// whether the tests notice. mutants.txt lists the changes, each with the tests
// that must fail; a change that they let pass is a survivor, and fails the run.
//
// Nothing is written to the tree: the compiler sees a changed file through go
// build's -overlay. It is run from the root of the repository.
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"
)

var (
	list      = flag.String("list", "tools/mutants/mutants.txt", "the list")
	only      = flag.String("only", "", "mutants whose name matches this")
	parallel  = flag.Int("j", 2, "mutants tried at once")
	limit     = flag.Duration("limit", time.Minute, "what one go test may take; a mutant that hangs is caught")
	schedules = flag.Int("schedules", 0, "look for so many schedules of the simulator that find a mutant")
	seeds     = flag.String("seeds", "1,1000001,2000001", "where each of those searches begins: what it takes differs from seed to seed")
	verbose   = flag.Bool("v", false, "print which test caught a mutant, and the output of those that do not build")
)

func main() {
	flag.Parse()
	mutants, err := readList(*list)
	if err == nil {
		mutants, err = matchingMutants(mutants, *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
	r := runner{root: ".", limit: *limit}
	if *schedules > 0 {
		if missed := r.simulateAll(mutants, *schedules); missed > 0 {
			fmt.Printf("%d of %d mutants were not found by %d schedules\n", missed, len(mutants), *schedules)
			os.Exit(1)
		}
		return
	}
	if err := r.baseline(mutants); err != nil {
		fmt.Fprintln(os.Stderr, "mutants: the tests must pass on the tree as it is:", err)
		os.Exit(1)
	}
	if bad := r.tryAll(mutants, *parallel); bad > 0 {
		fmt.Printf("%d of %d mutants were not caught: write the test that is missing, or mend the list\n", bad, len(mutants))
		os.Exit(1)
	}
	fmt.Printf("all %d mutants were caught\n", len(mutants))
}

// matchingMutants keeps the mutants with a name that matches.
func matchingMutants(all []mutant, pattern string) (chosen []mutant, err error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		if re.MatchString(m.name) {
			chosen = append(chosen, m)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no mutant matches %q", pattern)
	}
	return chosen, nil
}

// tryAll tries the mutants, n at once, prints a line for each and returns how many
// were not caught.
func (r *runner) tryAll(mutants []mutant, n int) (bad int) {
	var mu sync.Mutex // guards bad and the output
	var wg sync.WaitGroup
	work := make(chan *mutant)
	for range n {
		wg.Go(func() {
			for m := range work {
				start := time.Now()
				res := r.tryMutant(m)
				mu.Lock()
				if res.verdict != caught {
					bad++
				}
				printResult(m, res, time.Since(start))
				mu.Unlock()
			}
		})
	}
	for i := range mutants {
		work <- &mutants[i]
	}
	close(work)
	wg.Wait()
	return bad
}

func printResult(m *mutant, res mutantResult, took time.Duration) {
	how := ""
	if res.verdict == caught && strings.Contains(res.detail, "test timed out after") {
		how = " (by the time limit: is the machine busy?)"
	}
	fmt.Printf("%-16s %-34s %5.1fs  %s%s\n", res.verdict, m.name, took.Seconds(), m.breaks, how)
	if res.verdict != caught || *verbose {
		fmt.Println(res.detail)
	}
}
