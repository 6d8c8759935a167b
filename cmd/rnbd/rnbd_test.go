package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-server"
)

func TestExitCodeFollowsTheErrno(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want int
	}{
		{"nothing wrong", nil, 0},
		{"no errno", errors.New("bad luck"), 1},
		{"wrong command line", usageError{errors.New("x")}, 2},
		{"wrong value", fmt.Errorf("x: %w", syscall.EINVAL), 2},
		{"wrong command line beats its errno", usageError{syscall.ENOENT}, 2},
		{"no such device", fmt.Errorf("x: %w", syscall.ENOENT), 3},
		{"no such session", fmt.Errorf("x: %w", syscall.ENXIO), 3},
		{"a file where only block devices are served", fmt.Errorf("x: %w", syscall.ENOTBLK), 3},
		{"mapped already", fmt.Errorf("x: %w", syscall.EEXIST), 4},
		{"port taken", fmt.Errorf("x: %w", syscall.EADDRINUSE), 4},
		{"in use", fmt.Errorf("x: %w", syscall.EBUSY), 5},
		{"not permitted", fmt.Errorf("x: %w", syscall.EPERM), 6},
		{"read-only", fmt.Errorf("x: %w", syscall.EROFS), 6},
		{"a file that may not be executed", fmt.Errorf("x: %w", fs.ErrPermission), 6},
		{"no daemon", fmt.Errorf("%w: %w", errNoDaemon, syscall.ENOENT), 7},
		{"nobody listens", fmt.Errorf("x: %w", syscall.ECONNREFUSED), 7},
		{"no permission on the daemon's socket", noDaemonError{fmt.Errorf("x: %w", syscall.EACCES)}, 6},
		{"interrupted", fmt.Errorf("x: %w", interruptedError{"nothing was changed"}), 130},
		{"address of another host", fmt.Errorf("x: %w", syscall.EADDRNOTAVAIL), 2},
		{"deadline", fmt.Errorf("x: %w", context.DeadlineExceeded), 8},
		{"timed out", fmt.Errorf("x: %w", syscall.ETIMEDOUT), 8},
		{"two causes, the first in the table", errors.Join(syscall.EIO, syscall.EBUSY), 5},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := exitCode(c.err); got != c.want {
				t.Errorf("exit code %d, want %d", got, c.want)
			}
		})
	}
}

func TestEveryExitCodeIsListed(t *testing.T) {
	out, err := command(t, "exit-codes")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != exitTimeout+2 {
		t.Fatalf("%d lines for %d codes:\n%s", len(lines), exitTimeout+2, out)
	}
	for i, line := range lines {
		code := i
		if i > exitTimeout {
			code = exitInterrupted
		}
		if !strings.HasPrefix(line, fmt.Sprintf("%d  ", code)) {
			t.Errorf("line %d is %q", code, line)
		}
	}
}

// command runs a command line in this process.
func command(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	root := newRoot()
	root.SetOut(&out)
	root.SetErr(&out)
	err := execute(t.Context(), root, args)
	return out.String(), err
}

func TestWrongCommandLinesAreUsageErrors(t *testing.T) {
	none := "--socket=" + filepath.Join(t.TempDir(), "none.sock")
	for _, args := range [][]string{
		{"frobnicate"}, {"client", "frobnicate"}, {"client", "device", "frobnicate"}, {"--frobnicate"}, {""}, {"client", ""},
		{"client", "device", "map"}, {"client", "device", "map", "a"}, {"client", "device", "map", "a", "from"}, {"map", "a", "at", "b"},
		{"client", "device", "unmap"}, {"client", "device", "unmap", "a", "b"}, {"server", "access", "list", "a"},
		{"client", "close", "a"}, {"server", "map", "a", "from", "b"}, {"session", "unmap", "a"},
		{"path", "delete", "s", "x", "y"}, {"path", "add", "s"}, {"resize", "rnbd0"}, {"resize", "rnbd0", "big"}, {"resize", "rnbd0", "10G", "K"},
		{"device", "list", "--timeout", "soon"}, {"list", "--timeout", "0"}, {"list", "--timeout", "-1s"}, {"map", "a", "192.0.2.1"}, {"map", "a", "form", "b"}, {"resize", "rnbd0", "0"}, {"device", "list", "--output", "toml"}, {"device", "list", "--unit", "kilo"},
		{"device", "list", "--output"}, {"device", "unmap", "rnbd0", "--output", "toml"},
		{"version", "--output="}, {"version", "x"}, {"server", "device", "close"}, {"c"}, {"re", "rnbd0"}, {"version", "\x00\xff"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			_, err := command(t, append(args, none)...)
			if got := exitCode(err); got != exitUsage {
				t.Errorf("exit code %d, want %d: %v", got, exitUsage, err)
			}
		})
	}
}

func TestFlagErrorsNameNoFunction(t *testing.T) {
	_, err := command(t, "bench", "rnbd0", "--requests", "x")
	if exitCode(err) != exitUsage || strings.Contains(err.Error(), "strconv") || !strings.Contains(err.Error(), `invalid argument "x" for "--requests" flag`) {
		t.Errorf("a word in the place of a number: %v", err)
	}
}

func TestVersionIsAFlagToo(t *testing.T) {
	flag, err := command(t, "--version")
	word, _ := command(t, "version")
	if err != nil || flag != word {
		t.Errorf("--version: %q, %v; version: %q", flag, err, word)
	}
}

func TestGroupsPrintHelp(t *testing.T) {
	for _, args := range [][]string{{}, {"client"}, {"server", "device"}, {"--help"}, {"dev"}, {"help"}, {"help", "cl", "dev", "map"}, {"map", "help"}, {"map", "a", "help"}} {
		out, err := command(t, args...)
		if err != nil || !strings.Contains(out, "Usage:") {
			t.Errorf("rnbd %v: %v\n%s", args, err, out)
		}
	}
}

func TestServerIsSafeByDefault(t *testing.T) {
	f := newServerRun().Flags()
	listen, err := f.GetStringArray("listen")
	if err != nil || len(listen) != 1 || listen[0] != "127.0.0.1:1234" {
		t.Errorf("it listens on %v, %v", listen, err)
	}
	if path, err := f.GetString("search-path"); err != nil || path != "" {
		t.Errorf("its search path is %q, %v", path, err)
	}
	if on, err := f.GetBool("always-invalidate"); err != nil || !on {
		t.Errorf("always-invalidate is %t, %v", on, err)
	}
}

// readServer reads a configuration as the server does, with flags before it.
func readServer(t *testing.T, text string, flags ...string) (*serverOptions, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "server.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, o := serverRun()
	if err := cmd.ParseFlags(append(flags, "--config", path, "--config-dir", configNone)); err != nil {
		t.Fatal(err)
	}
	return o, o.load(cmd)
}

func TestConfigurationFillsWhatFlagsLeave(t *testing.T) {
	o, err := readServer(t, `
pumps: 3
spin: 50us
listen: ["127.0.0.5:1", "127.0.0.5:2"]
search-path: /srv
always-invalidate: false
crash-window: 5m
`, "--pumps", "1", "--crash-window", "2s")
	if err != nil {
		t.Fatal(err)
	}
	if o.Pumps != 1 || o.CrashWindow != 2*time.Second {
		t.Errorf("the file has won over flags: %+v", o)
	}
	if o.Spin != 50*time.Microsecond || o.SearchPath != "/srv" || o.AlwaysInvalidate || strings.Join(o.Listen, " ") != "127.0.0.5:1 127.0.0.5:2" {
		t.Errorf("the file is not heard: %+v", o)
	}
}

func TestListsOfFlagsReplaceThoseOfTheFile(t *testing.T) {
	o, err := readServer(t, "listen: [\"127.0.0.5:1\", \"127.0.0.5:2\"]\n", "--listen", "127.0.0.6:1", "--listen", "127.0.0.6:2")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(o.Listen, " "); got != "127.0.0.6:1 127.0.0.6:2" {
		t.Errorf("it listens on %s", got)
	}
}

func TestAFlagWithItsDefaultWinsToo(t *testing.T) {
	o, err := readServer(t, "always-invalidate: false\nlisten: []\n", "--always-invalidate", "--listen", "127.0.0.1:1234")
	if err != nil || !o.AlwaysInvalidate || len(o.Listen) != 1 {
		t.Errorf("%v, %+v", err, o)
	}
}

func TestAnEmptyConfigurationChangesNothing(t *testing.T) {
	for _, text := range []string{"", "\n", "# nothing\n", "---\n"} {
		o, err := readServer(t, text)
		if err != nil || o.Pumps != server.DefaultConfig().Pumps || len(o.Listen) != 1 || !o.AlwaysInvalidate {
			t.Errorf("%q: %v, %+v", text, err, o)
		}
	}
}

func TestWrongConfigurationsNameFileLineAndKey(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"unknown key", "pumps: 1\nfrobnicate: 1\n", `line 2, column 1: unknown key "frobnicate"`},
		{"misspelt key", "serach-path: /srv\n", `line 1, column 1: unknown key "serach-path"; did you mean "search-path"?`},
		{"two unknown keys", "a: 1\nb: 2\n", "line 2, column 1: unknown key"},
		{"word for a number", "pumps: many\n", "line 1, column 8: pumps:"},
		{"number for a duration", "spin: [1]\n", "line 1, column 7: spin:"},
		{"key twice", "pumps: 1\npumps: 2\n", `line 2, column 1: key "pumps" stands in line 1 already`},
		{"a list", "- pumps\n", "line 1, column 1: a list"},
		{"no YAML", "pumps: {\n", "line"},
		{"tabs", "pumps:\n\t- 1\n", "line 2"},
		{"the key of the configuration itself", "config: other.yaml\n", `line 1, column 1: unknown key "config"`},
		{"a key of the client", "mappings: []\n", `line 1, column 1: unknown key "mappings"`},
		{"a second document", "pumps: 1\n---\npumps: 2\n", "more than one document"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := readServer(t, c.text)
			if exitCode(err) != exitUsage {
				t.Fatalf("error %v, want one of usage", err)
			}
			if s := err.Error(); !strings.Contains(s, c.want) || !strings.Contains(s, "server.yaml") || strings.Contains(s, "\n") || strings.Contains(s, "main.") {
				t.Errorf("it says %q, want %q", s, c.want)
			}
		})
	}
}

func TestPluginsAreNamedByUsers(t *testing.T) {
	sum := strings.Repeat("ab", 32)
	for _, c := range []struct {
		in, name, path string
		pinned, bad    bool
	}{
		{in: "a=/x/y", name: "a", path: "/x/y"},
		{in: "a=/x,y=z", name: "a", path: "/x,y=z"},
		{in: "a=/x/y,sha256=" + sum, name: "a", path: "/x/y", pinned: true},
		{in: "a=/x/y,sha256=" + strings.ToUpper(sum), name: "a", path: "/x/y", pinned: true},
		{in: "a=/x/y,sha256=abcd", bad: true},
		{in: "a=/x/y,sha256=", bad: true},
		{in: "a=,sha256=" + sum, bad: true},
		{in: "/x/y", bad: true}, {in: "=/x/y", bad: true}, {in: "a=", bad: true}, {in: "", bad: true},
	} {
		p, err := parsePlugin(c.in)
		if c.bad {
			if exitCode(err) != exitUsage {
				t.Errorf("%q gives %v, want an error of usage", c.in, err)
			}
			continue
		}
		if err != nil || p.name != c.name || p.path != c.path || (len(p.sha256) == 32) != c.pinned {
			t.Errorf("%q is %+v, %v", c.in, p, err)
		}
	}
}

func TestPluginsAreFoundInTheFolder(t *testing.T) {
	dir := t.TempDir()
	if _, err := findPlugins(nil, dir, "io-", "blockio", "fileio"); exitCode(err) != exitUsage || !strings.Contains(err.Error(), dir) {
		t.Errorf("an empty folder gives %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "io-fileio"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	found, err := findPlugins(nil, dir, "io-", "blockio", "fileio")
	if err != nil || len(found) != 1 || found[0].name != "fileio" {
		t.Errorf("found %v, %v", found, err)
	}
	for _, c := range []struct {
		named []string
		want  string // paths
	}{
		{[]string{"a=/b"}, dir + "/io-fileio /b"},
		{[]string{"fileio=/b"}, "/b"},
		{[]string{"a=/b", "fileio=none"}, "/b"},
	} {
		files, err := findPlugins(c.named, dir, "io-", "blockio", "fileio")
		var paths []string
		for _, f := range files {
			paths = append(paths, f.path)
		}
		if got := strings.Join(paths, " "); err != nil || got != c.want {
			t.Errorf("%v named: found %s, %v; want %s", c.named, got, err, c.want)
		}
	}
	if _, err := findPlugins([]string{"fileio=none"}, dir, "io-", "fileio"); exitCode(err) != exitUsage {
		t.Errorf("no plugin at all gives %v", err)
	}
	if _, err := findPlugins([]string{"a=/b", "a=/c"}, dir, "io-"); exitCode(err) != exitUsage {
		t.Errorf("a name twice gives %v", err)
	}
}

func TestSettingsGoToTheirPlugin(t *testing.T) {
	files := []pluginFile{{name: "a"}, {name: "b"}}
	if err := giveSettings(files, []string{"a:k=v", "a:url=http://x:1/?q=1", "a:empty="}); err != nil {
		t.Fatal(err)
	}
	if s := files[0].settings; s["k"] != "v" || s["url"] != "http://x:1/?q=1" || len(s) != 3 || len(files[1].settings) != 0 {
		t.Errorf("settings are %v and %v", s, files[1].settings)
	}
	for _, bad := range []string{"", "a", "a:", "a:k", "a:=v", ":k=v", "c:k=v"} {
		if err := giveSettings(files, []string{bad}); exitCode(err) != exitUsage {
			t.Errorf("%q gives %v", bad, err)
		}
	}
}

func TestErrorsArePrintedWithAHint(t *testing.T) {
	err := fmt.Errorf("unmap rnbd0: %w", syscall.EBUSY)
	var text, js bytes.Buffer
	printError(&text, err, "table")
	if want := "rnbd: unmap rnbd0: device or resource busy\nhint: disconnect its users first, or use --force\n"; text.String() != want {
		t.Errorf("text is %q", text.String())
	}
	printError(&js, err, "json")
	if want := `{"causes":["unmap rnbd0","device or resource busy"],"code":5,"errno":16,"error":"unmap rnbd0: device or resource busy","hint":"disconnect its users first, or use --force"}` + "\n"; js.String() != want {
		t.Errorf("JSON is %q", js.String())
	}
}

func TestErrorsHaveTheFormatOfTheOutput(t *testing.T) {
	for line, want := range map[string]string{
		"list": "table", "list json": "json", "list -o yaml": "yaml", "list -oxml": "xml", "list -o=json": "json", "list --output yaml": "yaml",
		"list --output=xml": "xml", "server run --log-format json": "table", "list -o csv": "csv", "list --output=toml": "table", "list -v json": "table",
	} {
		if got := errorFormat(strings.Fields(line)); got != want {
			t.Errorf("rnbd %s: %s, want %s", line, got, want)
		}
	}
	var y bytes.Buffer
	printError(&y, fmt.Errorf("unmap rnbd0: %w", syscall.EBUSY), "yaml")
	if want := "error: 'unmap rnbd0: device or resource busy'\ncauses:\n  - unmap rnbd0\n  - device or resource busy\ncode: 5\nerrno: 16\nhint: disconnect its users first, or use --force\n"; y.String() != want {
		t.Errorf("YAML is %q", y.String())
	}
}

func TestAddressesNameTheirFabric(t *testing.T) {
	for in, want := range map[string][2]string{
		"127.0.0.1:1":         {defaultFabric, "127.0.0.1:1"},
		"iwarp://127.0.0.1:1": {"iwarp", "127.0.0.1:1"},
		"x://[::1]:1":         {"x", "[::1]:1"},
	} {
		if fabric, rest := cutFabric(in); fabric != want[0] || rest != want[1] {
			t.Errorf("%s is %s and %s", in, fabric, rest)
		}
	}
}

func TestLimitsOfTheServer(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		ok   bool
	}{
		{"none", nil, true},
		{"some", []string{"sessions=7", "chunk-memory=1099511627776", "opens=0"}, true},
		{"an unknown name", []string{"session=7"}, false},
		{"no number", []string{"sessions"}, false},
		{"a number below zero", []string{"sessions=-1"}, false},
	} {
		cfg := server.DefaultConfig()
		err := setLimits(&cfg, tt.args)
		var usage usageError
		if (err == nil) != tt.ok || !tt.ok && !errors.As(err, &usage) {
			t.Errorf("%s: %v", tt.name, err)
		}
		if tt.name == "some" && (cfg.Limits.Sessions != 7 || cfg.Limits.ChunkMemory != 1<<40 || cfg.Opens != 0 || cfg.SessionDevices != 1024) {
			t.Errorf("%s: %+v", tt.name, cfg.Limits)
		}
	}
}
