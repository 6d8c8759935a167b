package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/explain"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
)

// has reports whether an entry of kind is found by word.
func explains(kind, word string) bool {
	for _, e := range explain.Find(word) {
		if e.Kind == kind {
			return true
		}
	}
	return false
}

// inSource returns the matches of the pattern's groups in a source file.
func inSource(t *testing.T, file, pattern string) (all []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../modules", file))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1) {
		all = append(all, m[1:]...)
	}
	if len(all) == 0 {
		t.Fatalf("%s has nothing like %s", file, pattern)
	}
	return all
}

func TestEveryErrnoIsExplained(t *testing.T) {
	for _, name := range inSource(t, "rnbd-sdk/blk/errno.go", `Errno = Errno\(syscall\.(E\w+)\)`) {
		if !explains(explain.Errno, name) {
			t.Errorf("errno %s of package blk is not explained", name)
		}
	}
	for _, row := range exitTable {
		for _, e := range row.errnos {
			if name := unix.ErrnoName(e); name != "EALREADY" && !explains(explain.Errno, name) {
				t.Errorf("errno %s of exit code %d is not explained", name, row.code)
			}
		}
	}
}

func TestEveryExitCodeIsExplained(t *testing.T) {
	for _, line := range strings.Split(strings.TrimSpace(exitCodes()), "\n") {
		code, _, _ := strings.Cut(line, " ")
		if !explains(explain.ExitCode, code) {
			t.Errorf("exit code %s is not explained", code)
		}
	}
	for _, e := range explain.All() {
		if e.Kind == explain.ExitCode && !strings.Contains("\n"+exitCodes(), "\n"+e.Name+"  ") {
			t.Errorf("exit code %s is explained, and does not exist", e.Name)
		}
	}
}

func TestEveryStateIsExplained(t *testing.T) {
	words := func(file, pattern string) (all []string) {
		for _, list := range inSource(t, file, pattern) {
			for _, w := range strings.Split(list, ",") {
				if w = strings.Trim(w, " \t\n\""); w != "" {
					all = append(all, w[strings.LastIndex(w, `"`)+1:])
				}
			}
		}
		return all
	}
	for _, c := range []struct{ kind, file, pattern string }{
		{explain.Path, "rtrs/clt_state.go", `(?s)pathStateNames = \[\.\.\.\]string\{(.*?)\}`},
		{explain.ClientDevice, "rnbd-client/device_state.go", `func \(s State\) String\(\) string \{ return \[\.\.\.\]string\{(.*?)\}`},
		{explain.ServerDevice, "rnbd-server/devstate.go", `return "(open|recovering|stuck[^"]*|failed[^"]*)"`},
		{explain.Plugin, "rnbd-sdk/plugin/supervise/state.go", `return "(running|restarting[^"]*|failed[^"]*)"`},
		{explain.Session, "rnbd-client/api.go", `State: "((?:dis)?connected)"`},
		{explain.Session, "rnbd-server/control.go", `State: "((?:dis)?connected)"`},
	} {
		for _, state := range words(c.file, c.pattern) {
			state = strings.TrimSuffix(strings.TrimSpace(state), ":")
			if !explains(c.kind, state) {
				t.Errorf("the %s %q of %s is not explained", c.kind, state, c.file)
			}
		}
	}
}

func TestExplain(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"EREMCHG"}, "errno 78"},
		{[]string{"eremchg"}, "errno 78"},
		{[]string{"-5", "--"}, ""},
		{[]string{"7"}, "cannot be reached"},
		{[]string{"closed"}, "rnbd remap"},
		{[]string{"no space left on device"}, "ENOSPC"},
		{[]string{"failed: does not open again: open x: no such file"}, "comes back by itself"},
		{[]string{"failed:", "plugin", "state", "lost"}, "keeps nothing over a crash"},
		{[]string{"EIO", "connected"}, "path state"},
	} {
		out, err := command(t, append([]string{"explain"}, c.args...)...)
		if c.want == "" {
			if exitCode(err) != exitUsage {
				t.Errorf("explain %q: %v", c.args, err)
			}
			continue
		}
		if err != nil || !strings.Contains(out, c.want) {
			t.Errorf("explain %q has no %q: %v\n%s", c.args, c.want, err, out)
		}
	}
	if _, err := command(t, "explain", "EREMCHH"); exitCode(err) != exitNotFound || !strings.Contains(err.Error(), "EREMCHG") {
		t.Errorf("a word that means nothing: %v", err)
	}
	out, err := command(t, "explain", "EIO", "-o", "json")
	var list []struct {
		Name, Meaning string
		Number        int
	}
	if err != nil || json.Unmarshal([]byte(out), &list) != nil || len(list) != 1 || list[0].Number != 5 || list[0].Meaning == "" {
		t.Errorf("json: %v %s", err, out)
	}
}

// TestEachConditionIsExplained looks up the kinds of conditions.
func TestEachConditionIsExplained(t *testing.T) {
	for _, kind := range control.ConditionKinds {
		found := explain.Find(kind)
		if len(found) != 1 || found[0].Kind != explain.Condition || found[0].Do == "" {
			t.Errorf("%s: %+v", kind, found)
		}
		if conditionChecks[kind] == "" {
			t.Errorf("%s has no check of doctor", kind)
		}
	}
}
