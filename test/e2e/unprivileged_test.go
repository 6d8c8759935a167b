package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

func needRoot(t *testing.T, why string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skipf("needs root: %s", why)
	}
}

// copyFiles makes programs readable for everybody.
func copyFiles(t *testing.T, from, to string) {
	t.Helper()
	entries, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(from, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, e.Name()), b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDemoAsNobody runs the demonstration without any privilege, with no more
// than 8 MiB that may be locked, with and without io_uring.
func TestDemoAsNobody(t *testing.T) {
	needRoot(t, "to become nobody")
	lab.Tool(t, "setpriv")
	lab.Tool(t, "prlimit")
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	open, err := os.MkdirTemp("", "e2e-nobody-") // short, and reachable
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(open) })
	programs, home := filepath.Join(open, "bin"), filepath.Join(open, "home")
	for _, dir := range []string{programs, home} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(open, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(home, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	copyFiles(t, bin, programs)
	demo := filepath.Join(programs, "demo")
	if out, err := exec.Command("go", "build", "-o", demo, "../demo").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	for _, c := range []struct{ name, env string }{
		{"with what the kernel offers", "RNBD_IO_ENGINE=auto"},
		{"with threads instead of io_uring", "RNBD_IO_ENGINE=threads"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out := run(t, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs",
				"prlimit", "--memlock=8388608:8388608", "env", "-i", "PATH="+os.Getenv("PATH"), "HOME="+home, "TMPDIR="+home,
				"RNBD_BIN="+programs, c.env, demo)
			if !strings.Contains(out, "demo: ok") {
				t.Errorf("the demo says:\n%s", out)
			}
			if rest, _ := filepath.Glob(filepath.Join(home, "*")); len(rest) > 0 {
				t.Errorf("left behind: %v", rest)
			}
		})
	}
}

// TestRefusedIOURingCostsOneLogLine runs the server under a system-call filter
// that refuses io_uring.
func TestRefusedIOURingCostsOneLogLine(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, rigOptions{size: 64 << 20, server: lab.ServerOptions{Prefix: []string{self, withoutURing}}})
	fioVerify(t, r.unixURI(), 64<<20)
	var lines []string
	for line := range strings.Lines(r.server.Log()) {
		if strings.Contains(line, "io_uring") {
			lines = append(lines, line)
		}
	}
	if len(lines) != 1 || !strings.Contains(lines[0], "level=WARN") || !strings.Contains(lines[0], "threads") {
		t.Errorf("want one warning about io_uring, got %q", lines)
	}
	if err := r.server.KillPlugin("fileio"); err != nil {
		t.Fatal(err)
	}
	fioVerify(t, r.unixURI(), 64<<20)
}
