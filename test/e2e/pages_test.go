package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// runPage runs the blocks of commands of a page of docs, those that are marked as
// sh, in their order, in one shell in an empty folder. env is added to its
// environment.
func runPage(t *testing.T, page string, least int, tools []string, env ...string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(lab.Root(), "docs/use", page))
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```sh\n(.*?)^```").FindAllStringSubmatch(string(text), -1)
	if len(blocks) < least {
		t.Fatalf("%d blocks of commands", len(blocks))
	}
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	path := bin
	for _, tool := range tools {
		path += ":" + filepath.Dir(lab.Tool(t, tool))
	}
	var commands strings.Builder
	for _, b := range blocks {
		commands.WriteString(b[1])
	}
	for _, name := range withoutDefault(commands.String(), env) {
		t.Errorf("%s: $%s has no default, and a reader's environment does not have it", page, name)
	}
	script := "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n" + commands.String()
	ctx, cancel := context.WithTimeout(t.Context(), 3*enough)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", script)
	cmd.Dir = shortDir(t)
	t.Cleanup(func() { lab.UnmountBelow(cmd.Dir) }) // a page kills a daemon that has control files
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = enough
	cmd.Env = append(append(os.Environ(), "PATH="+path+":"+os.Getenv("PATH"), "RNBD_SOCKET="), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
		logs, _ := filepath.Glob(filepath.Join(cmd.Dir, "*.log"))
		for _, l := range logs {
			b, _ := os.ReadFile(l)
			t.Logf("%s:\n%s", filepath.Base(l), strings.TrimSpace(string(b)))
		}
	}
}

// withoutDefault returns the names of the variables in env, NAME=VALUE, for which
// script has no default.
func withoutDefault(script string, env []string) (names []string) {
	for _, e := range env {
		name, _, _ := strings.Cut(e, "=")
		if !strings.Contains(script, name+"=${"+name+":-") {
			names = append(names, name)
		}
	}
	return names
}

// TestTLSTutorial runs the commands of docs/use/security.md.
func TestTLSTutorial(t *testing.T) {
	runPage(t, "security.md", 5, []string{"openssl", "nbdinfo", "qemu-img"}, "PORT="+freePort(t), "PORT2="+freePort(t), "PORT3="+freePort(t),
		"ROCE="+lab.LoopbackAddr(25), "ROCE2="+lab.LoopbackAddr(26), "ROCE3="+lab.LoopbackAddr(27))
}

// TestRecipes runs the commands of docs/use/recipes.md.
func TestRecipes(t *testing.T) {
	runPage(t, "recipes.md", 5, []string{"nbdinfo", "nbdcopy"}, "PORT="+freePort(t), "PORT2="+freePort(t))
}
