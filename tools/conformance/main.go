// Command conformance prints, for every numbered requirement of the protocol
// documents, the tests that prove it. A test proves a requirement when its name
// carries the number, as in TestR050_ImmLayout or "R-050 shift by depth".
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
)

var (
	results = flag.String("results", "", "folder with the JSON results of go test")
	strict  = flag.Bool("strict", false, "fail when a requirement is open")

	// Numbers have three digits, or two behind the prefixes of IPoIB and bonding.
	inText = regexp.MustCompile(`^(?:- |\| )\**([A-Z]-\d{3}|(?:IP|BO|W)-\d{2})\**[ |]+(.*)$`)
	inName = regexp.MustCompile(`(?:^|[^A-Za-z])(?:Test|Fuzz|Example)?(?:([RICE])-?(\d{3})|(IP|BO|W)-?(\d{2}))(\d?)`)
)

type requirement struct {
	id, text       string
	passed, failed []string
}

func main() {
	flag.Parse()
	reqs := map[string]*requirement{}
	for _, doc := range flag.Args() {
		if err := readDoc(doc, reqs); err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			os.Exit(1)
		}
	}
	files, _ := filepath.Glob(filepath.Join(*results, "*.json"))
	more, _ := filepath.Glob(filepath.Join(*results, "*", "*.json")) // of further runs
	for _, f := range append(files, more...) {
		if err := readResults(f, reqs); err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			os.Exit(1)
		}
	}
	if !printTable(reqs) {
		os.Exit(1)
	}
}

func readDoc(path string, reqs map[string]*requirement) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		if m := inText.FindStringSubmatch(scan.Text()); m != nil {
			reqs[m[1]] = &requirement{id: m[1], text: strings.Trim(m[2], " |")}
		}
	}
	return scan.Err()
}

func readResults(path string, reqs map[string]*requirement) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	scan.Buffer(nil, 1<<24)
	for scan.Scan() {
		var e struct{ Action, Package, Test string }
		if json.Unmarshal(scan.Bytes(), &e) != nil || e.Test == "" {
			continue
		}
		for _, id := range idsIn(e.Test) {
			if r := reqs[id]; r != nil {
				r.addTest(e.Action, filepath.Base(e.Package)+"."+e.Test)
			}
		}
	}
	return scan.Err()
}

// idsIn finds the numbers in the last part of a test's name, so that a
// subtest proves its own requirement and its parent's name that of the parent.
func idsIn(name string) (ids []string) {
	last := name[strings.LastIndex(name, "/")+1:]
	for _, m := range inName.FindAllStringSubmatch(last, -1) {
		if m[3] == "" || m[5] == "" { // else a longer number
			ids = append(ids, m[1]+m[3]+"-"+m[2]+m[4])
		}
	}
	return ids
}

func (r *requirement) addTest(action, test string) {
	switch action {
	case "pass":
		r.passed = append(r.passed, test)
	case "fail":
		r.failed = append(r.failed, test)
	}
}

func printTable(reqs map[string]*requirement) (good bool) {
	var ids []string
	for id := range reqs {
		ids = append(ids, id)
	}
	sort.Strings(ids)
	open, failed := 0, 0
	for _, id := range ids {
		r := reqs[id]
		verdict, tests := "proven", r.passed
		switch {
		case len(r.failed) > 0:
			verdict, tests = "FAILED", r.failed
			failed++
		case len(r.passed) == 0:
			verdict = "open"
			open++
		}
		fmt.Printf("%s  %-6s  %-60.60s  %s\n", id, verdict, r.text, testSummary(tests))
	}
	fmt.Printf("%d requirements: %d proven, %d failed, %d open\n", len(ids), len(ids)-open-failed, failed, open)
	return failed == 0 && (open == 0 || !*strict)
}

func testSummary(tests []string) string {
	switch len(tests) {
	case 0:
		return ""
	case 1:
		return tests[0]
	}
	return fmt.Sprintf("%s (+%d)", tests[0], len(tests)-1)
}
