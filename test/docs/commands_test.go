package docs

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

var (
	flagWord = regexp.MustCompile(`^--([a-z][a-z-]*)`)
	helpFlag = regexp.MustCompile(`--([a-z][a-z-]*)`)

	commandWord = regexp.MustCompile(`^[a-z][a-z-]*$`)
)

// help of a command, by the words that name it.
type help struct {
	t     *testing.T
	bin   string
	known map[string]map[string]bool
}

func newHelp(t *testing.T) *help {
	t.Helper()
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	return &help{t: t, bin: filepath.Join(bin, "rnbd"), known: map[string]map[string]bool{}}
}

// flags are those of one command; nil: there is no such command.
func (h *help) flags(words []string) map[string]bool {
	key := strings.Join(words, " ")
	if f, ok := h.known[key]; ok {
		return f
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, h.bin, append(words[:len(words):len(words)], "--help")...).CombinedOutput()
	var flags map[string]bool
	if err == nil && bytes.Contains(out, []byte("Usage:\n")) {
		flags = map[string]bool{}
		for _, m := range helpFlag.FindAllStringSubmatch(string(out), -1) {
			flags[m[1]] = true
		}
	}
	h.known[key] = flags
	return flags
}

// command splits "rnbd server run --x y" into the words that name the command
// and the flags. ok: the line is one.
func command(line string) (words, flags []string, ok bool) {
	line = strings.TrimSpace(line)
	for _, lead := range []string{"ExecStart=", "$ ", "# ", "storage# ", "compute# "} {
		line = strings.TrimPrefix(line, lead)
	}
	f := strings.Fields(line)
	if len(f) == 0 || f[0] != "rnbd" && f[0] != "/usr/bin/rnbd" || len(f) > 1 && strings.HasPrefix(f[1], "[") { // a synopsis
		return nil, nil, false
	}
	for f = f[1:]; len(f) > 1 && flagWord.MatchString(f[0]); f = f[2:] { // --output json
		flags = append(flags, flagWord.FindStringSubmatch(f[0])[1])
	}
	for len(f) > 0 && commandWord.MatchString(f[0]) && len(words) < 3 {
		words = append(words, f[0])
		f = f[1:]
	}
	for _, w := range f {
		if m := flagWord.FindStringSubmatch(w); m != nil {
			flags = append(flags, m[1])
		}
	}
	return words, flags, true
}

// commandPages are the documents with commands for users.
var commandPages = []string{
	"README.md", "docs/use/install.md", "docs/use/operations.md", "docs/use/recipes.md", "docs/use/security.md", "docs/use/cli.md", "SECURITY.md", "ARCHITECTURE.md",
	"docs/use/examples/rnbd-server.service", "docs/use/examples/rnbd-client.service",
}

func TestCommandsAndFlagsExist(t *testing.T) {
	h := newHelp(t)
	any := map[string]bool{}
	for _, c := range []string{"", "server run", "client run", "close", "map", "unmap", "list", "device list", "recover", "top", "server upgrade"} {
		for f := range h.flags(strings.Fields(c)) {
			any[f] = true
		}
	}
	commands, flags := 0, 0
	for _, page := range commandPages {
		text := read(t, page)
		lines := code(text)
		if strings.HasSuffix(page, ".service") {
			lines = strings.Split(strings.ReplaceAll(text, "\\\n", " "), "\n")
		}
		for _, line := range lines {
			if m := flagWord.FindStringSubmatch(line); m != nil { // a flag on its own
				if flags++; !any[m[1]] {
					t.Errorf("%s: no command knows --%s", page, m[1])
				}
			}
			words, given, ok := command(line)
			if !ok {
				continue
			}
			commands++
			have := h.flags(words)
			for have == nil && len(words) > 0 { // the last words may be arguments
				words = words[:len(words)-1]
				have = h.flags(words)
			}
			if len(words) == 0 && line != "rnbd" {
				t.Errorf("%s: no such command: %s", page, line)
			}
			for _, f := range given {
				if flags++; !have[f] {
					t.Errorf("%s: rnbd %s does not know --%s", page, strings.Join(words, " "), f)
				}
			}
		}
	}
	if commands < 20 || flags < 30 {
		t.Errorf("only %d commands and %d flags were found", commands, flags)
	}
}

// Every YAML example of operations.md starts the daemon that its first line
// names. Settings of the example's machine are overridden. One with mappings is
// only checked: its servers are not of this machine.
func TestConfigExamplesAreAccepted(t *testing.T) {
	h := newHelp(t)
	examples := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```").FindAllStringSubmatch(read(t, "docs/use/operations.md"), -1)
	if len(examples) < 2 {
		t.Fatalf("%d examples in docs/use/operations.md", len(examples))
	}
	for _, m := range examples {
		kind := regexp.MustCompile(`/(server|client)(?:\.d/[a-z]+)?\.yaml`).FindStringSubmatch(m[1])
		if kind == nil {
			t.Errorf("an example does not say whose file it is:\n%s", m[1])
			continue
		}
		t.Run(kind[1], func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "config.yaml")
			if err := os.WriteFile(file, []byte(m[1]), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(h.bin, "config", "check", kind[1], file).CombinedOutput(); err != nil {
				t.Fatalf("rnbd config check: %v\n%s", err, out)
			}
			if strings.Contains(m[1], "mappings:") {
				return
			}
			args := []string{kind[1], "run", "--config", file, "--socket", filepath.Join(dir, "s"), "--plugin-dir", filepath.Dir(h.bin), "--log-format", "text"}
			if kind[1] == "server" {
				args = append(args, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--search-path", dir)
			} else {
				args = append(args, "--nbd-listen", "unix:"+filepath.Join(dir, "n"))
			}
			startsAndEnds(t, h.bin, args)
		})
	}
}

func startsAndEnds(t *testing.T, bin string, args []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var log lockedBuffer
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for !strings.Contains(log.String(), "is ready") {
		select {
		case err := <-done:
			t.Fatalf("rnbd %s: %v\n%s", strings.Join(args, " "), err, log.String())
		case <-time.After(10 * time.Millisecond):
		}
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("the end of rnbd %s: %v\n%s", strings.Join(args, " "), err, log.String())
	}
}

func TestUnitsAreValid(t *testing.T) {
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze here")
	}
	h := newHelp(t)
	dir := t.TempDir() // units name each other
	units := []string{"rnbd-server.service", "rnbd-server.socket", "rnbd-client.service", "rnbd-client.socket", "rnbd-client-nbd.socket"}
	for _, name := range units {
		text := strings.ReplaceAll(read(t, "docs/use/examples/"+name), "/usr/bin/rnbd", h.bin)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range units {
		file := filepath.Join(dir, name)
		out, err := exec.Command(verify, "verify", "--man=no", file).CombinedOutput()
		if err != nil || bytes.Contains(out, []byte(name)) {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}
