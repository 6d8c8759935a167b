package selfstats

import (
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// ask sends the signal to this process and returns the report.
func ask(t *testing.T, path string) string {
	t.Helper()
	if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) { // each look allocates
		if b, err := os.ReadFile(path); err == nil {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			return string(b)
		}
	}
	t.Fatal("no report")
	return ""
}

func value(t *testing.T, report, name string) float64 {
	t.Helper()
	for line := range strings.Lines(report) {
		if k, v, _ := strings.Cut(strings.TrimSpace(line), " "); k == name {
			f, err := strconv.ParseFloat(v, 64)
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			return f
		}
	}
	t.Fatalf("the report has no %s", name)
	return 0
}

var sink [][]byte

func TestReportCountsAllocations(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(FileEnv, filepath.Join(dir, "stats"))
	Start(slog.Default())
	path := filepath.Join(dir, "stats."+strconv.Itoa(os.Getpid()))

	const objects = 5000
	first := ask(t, path)
	for range objects {
		sink = append(sink, make([]byte, 48))
	}
	second := ask(t, path)
	runtime.KeepAlive(sink)
	const name = "/gc/heap/allocs:objects"
	if grown := value(t, second, name) - value(t, first, name); grown < objects || grown > objects+2000 {
		t.Errorf("%d objects more are reported as %v", objects, grown)
	}
	for line := range strings.Lines(first) {
		if !regexp.MustCompile(`^/\S+ \S+\n$`).MatchString(line) {
			t.Errorf("line %q is not a name and a value", line)
		}
	}
	if rest, _ := filepath.Glob(filepath.Join(dir, "*")); len(rest) > 0 {
		t.Errorf("left behind: %v", rest)
	}
}

func TestReportDoesNotFollowALink(t *testing.T) {
	dir := t.TempDir()
	victim, link := filepath.Join(dir, "victim"), filepath.Join(dir, "link")
	if err := os.WriteFile(victim, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, link); err != nil {
		t.Fatal(err)
	}
	if err := write(link); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "mine" {
		t.Errorf("the target of the link holds %.40q, %v", b, err)
	}
}

func TestReportThatCannotBeWrittenIsAnError(t *testing.T) {
	if err := write(filepath.Join(t.TempDir(), "none", "stats")); err == nil {
		t.Error("no error")
	}
}
