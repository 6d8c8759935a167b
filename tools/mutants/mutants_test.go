package main

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
)

const root = "../.."

// TestListFitsTheTree keeps the list from rotting: every line is there, once,
// and every pattern names a test.
func TestListFitsTheTree(t *testing.T) {
	mutants, err := readList("mutants.txt")
	if err != nil {
		t.Fatal(err)
	}
	if len(mutants) < 30 {
		t.Errorf("only %d mutants", len(mutants))
	}
	simulated, err := readList("simulator.txt")
	if err != nil {
		t.Fatal(err)
	}
	r := runner{root: root}
	for _, m := range append(mutants, simulated...) {
		if _, err := r.mutatedFiles(&m); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
		for _, alternative := range strings.Split(m.run, "|") {
			if !hasTest(t, m.pkg, alternative) {
				t.Errorf("%s: no test of %s matches %s", m.name, m.pkg, alternative)
			}
		}
	}
}

var testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)

func hasTest(t *testing.T, pkg, run string) bool {
	top, _, _ := strings.Cut(run, "/")
	re, err := regexp.Compile(top)
	if err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(root, pkg, "*_test.go"))
	for _, f := range files {
		src, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range testFunc.FindAllSubmatch(src, -1) {
			if re.Match(m[1]) {
				return true
			}
		}
	}
	return false
}

func TestParseList(t *testing.T) {
	got, err := parseList(strings.NewReader(`# comment

one: breaks this: and that
	file  a/b.go
	in    func f(
	-     return x - 1
	+     return x
	test  TestA|TestB
two: removes a line
	file  a/c.go
	-     stop()
	test  d TestC/sub case
three: changes two lines
	file  a/d.go
	-     x
	file  a/e.go
	-     y
	+     z
	test  TestD
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []mutant{
		{"one", "breaks this: and that", []lineEdit{{"a/b.go", "func f(", "return x - 1", "return x"}}, "a", "TestA|TestB"},
		{"two", "removes a line", []lineEdit{{"a/c.go", "", "stop()", ""}}, "d", "TestC/sub case"},
		{"three", "changes two lines", []lineEdit{{"a/d.go", "", "x", ""}, {"a/e.go", "", "y", "z"}}, "a", "TestD"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	for _, bad := range []string{
		"\tfile x\n", "no colon\n", "a: b\n\t- y\n", "a: b\n\tfile x\n\t- y\n", "a: b\n\twhat x\n",
		"a: b\n\tfile f\n\t- x\n\ttest T\na: b\n\tfile f\n\t- x\n\ttest T\n",
	} {
		if _, err := parseList(strings.NewReader(bad)); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestApply(t *testing.T) {
	const src = "func f() {\n\ta()\n\n\tb()\n}\n\nfunc g() {\n\ta()\n}\n"
	for _, c := range []struct{ name, in, old, new, want, err string }{
		{"line is replaced", "", "b()", "c()", "func f() {\n\ta()\n\n\tc()\n}\n\nfunc g() {\n\ta()\n}\n", ""},
		{"line is removed", "", "b()", "", "func f() {\n\ta()\n\n\t\n}\n\nfunc g() {\n\ta()\n}\n", ""},
		{"line of one function", "func g", "a()", "c()", "func f() {\n\ta()\n\n\tb()\n}\n\nfunc g() {\n\tc()\n}\n", ""},
		{"part of a line is not enough", "", "b", "c", "", "no line"},
		{"line is there twice", "", "a()", "c()", "", "both"},
		{"line is in another function", "func g", "b()", "c()", "", "no line"},
		{"function is not there", "func h", "a()", "c()", "", "begins with"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := lineEdit{file: "x.go", in: c.in, old: c.old, new: c.new}
			got, err := e.applyTo(src)
			if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

// TestVerdicts tries mutants of a module made for it.
func TestVerdicts(t *testing.T) {
	r := runner{root: t.TempDir(), limit: 3 * time.Second}
	for name, text := range map[string]string{
		"go.mod": "module example.org/m\n\ngo 1.26\n",
		"m.go":   "package m\n\nfunc Sum(a, b int) int {\n\treturn a + b\n}\n\nfunc Spare() int {\n\treturn 1\n}\n",
		"m_test.go": "package m\n\nimport \"testing\"\n\nfunc TestSum(t *testing.T) {\n\tif Sum(2, 1) != 3 {\n\t\tt.Fatal()\n\t}\n}\n\n" +
			"func TestBroken(t *testing.T) { t.Fatal() }\n",
	} {
		if err := os.WriteFile(filepath.Join(r.root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("GOWORK", "off")
	for _, c := range []struct {
		want          mutantVerdict
		old, new, run string
	}{
		{caught, "return a + b", "return a - b", "TestSum"},
		{caught, "return a + b", "select {}", "TestSum"}, // hangs
		{survived, "return 1", "return 2", "TestSum"},
		{notBuilt, "return a + b", "return", "TestSum"},
		{notFound, "return a * b", "return a", "TestSum"},
		{noTest, "return a + b", "return a - b", "TestNone"},
	} {
		m := mutant{edits: []lineEdit{{file: "m.go", old: c.old, new: c.new}}, pkg: ".", run: c.run}
		if got := r.tryMutant(&m); got.verdict != c.want {
			t.Errorf("%q -> %q: %s, want %s\n%s", c.old, c.new, got.verdict, c.want, got.detail)
		}
	}
	if err := r.baseline([]mutant{{pkg: ".", run: "TestSum"}}); err != nil {
		t.Error(err)
	}
	if err := r.baseline([]mutant{{pkg: ".", run: "TestBroken"}}); err == nil {
		t.Error("a test that fails without any mutant was taken")
	}
}

func TestFirstFound(t *testing.T) {
	for out, want := range map[string]string{
		"    sim_test.go:1: found after 12 schedules, by seed 1000012: 14.2s: liveness: a read waits\n": "12 liveness",
		"    sim_test.go:1: found after 3 schedules, by seed 3: crash: its process ended\n":             "3 crash",
		"--- PASS: TestSchedules\n": "0 ",
	} {
		n, judge := firstFound(out)
		if got := fmt.Sprint(n, " ", judge); got != want {
			t.Errorf("%q: %q, want %q", out, got, want)
		}
	}
}
