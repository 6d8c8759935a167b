package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestRun runs this program on modules with good and bad tests, as make does.
func TestRun(t *testing.T) {
	program := filepath.Join(t.TempDir(), "gotest")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const pass = "package p\nimport \"testing\"\nfunc TestGood(t *testing.T) {}\nfunc TestLacks(t *testing.T) { t.Skip(\"fio is not installed\") }\n"
	for name, test := range map[string]struct {
		source string
		args   []string
		want   []string
		fails  bool
	}{
		"passes": {source: pass, args: []string{"-needs", "ls no-such-program"}, want: []string{
			"not installed, so their tests are left out: no-such-program", "ok    example.com/p", "left out: fio is not installed: p.TestLacks", "1 passed, 0 failed, 1 skipped"}},
		"does not compile":  {source: "package p\nvar x int = \"a\"\n", want: []string{"cannot use \"a\"", "[build failed]"}, fails: true},
		"runs no test":      {source: pass, args: []string{"-run", "Nothing"}, want: []string{"0 passed, 0 failed", "no test was run"}, fails: true},
		"runs only skipped": {source: pass, args: []string{"-run", "Lacks"}, want: []string{"no test was run"}, fails: true},
		"fails": {source: "package p\nimport \"testing\"\nfunc TestBad(t *testing.T) { t.Error(\"why\") }\n",
			want: []string{"--- FAIL: example.com/p.TestBad", "why", "0 passed, 1 failed"}, fails: true},
		"ends in the middle": {source: "package p\nimport (\"os\"; \"testing\")\nfunc TestExit(t *testing.T) { os.Exit(3) }\n", want: []string{"ended with example.com/p.TestExit"}, fails: true},
		"takes too long": {source: "package p\nimport (\"testing\"; \"time\")\nfunc TestSlow(t *testing.T) { time.Sleep(50*time.Millisecond) }\n",
			args: []string{"-budget", "1ns"}, want: []string{"1 passed", "slow ", "their budget is 1ns"}, fails: true},
		"runs a part": {source: "package p\nimport (\"fmt\"; \"testing\")\nfunc TestCore(t *testing.T) {}\n" +
			"func TestMain(m *testing.M) { fmt.Println(\"part of the tests: 1 of 2\"); m.Run() }\n", want: []string{"part of p 1 of 2"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			writeModule(t, dir, test.source)
			cmd := exec.Command(program, append(test.args, "./...")...)
			cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=")
			out, err := cmd.CombinedOutput()
			if (err != nil) != test.fails {
				t.Errorf("error %v\n%s", err, out)
			}
			for _, want := range test.want {
				if !strings.Contains(string(out), want) {
					t.Errorf("%q is not in the output:\n%s", want, out)
				}
			}
		})
	}
}

func writeModule(t *testing.T, dir, test string) {
	t.Helper()
	for name, text := range map[string]string{"go.mod": "module example.com/p\n\ngo 1.26\n", "p_test.go": test} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
