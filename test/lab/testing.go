package lab

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// T is a lab of a test: its failures fail the test, and the daemons' logs are
// shown then.
type T struct {
	*Lab
	t testing.TB
}

// New opens a lab that ends with the test.
func New(t testing.TB) *T {
	t.Helper()
	l, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("where threads wait:\n%s", l.waits())
			logs, _ := filepath.Glob(filepath.Join(l.Dir, "*.log"))
			for _, name := range logs {
				b, _ := os.ReadFile(name)
				t.Logf("%s:\n%s", filepath.Base(name), lastLines(string(b), 60))
			}
		}
		if err := l.Close(); err != nil {
			t.Errorf("end of the lab: %v", err)
		}
	})
	return &T{l, t}
}

// Server runs a server, with two pumps whatever the machine has.
func (l *T) Server(o ServerOptions) *Server {
	l.t.Helper()
	o.Extra = append([]string{"--pumps", "2"}, o.Extra...)
	s, err := l.StartServer(o)
	if err != nil {
		l.t.Fatalf("server: %v", err)
	}
	return s
}

// Client runs a client, with two pumps whatever the machine has.
func (l *T) Client(o ClientOptions) *Client {
	l.t.Helper()
	o.Extra = append([]string{"--pumps", "2"}, o.Extra...)
	c, err := l.StartClient(o)
	if err != nil {
		l.t.Fatalf("client: %v", err)
	}
	return c
}

// Map maps path or fails the test.
func (l *T) Map(c *Client, path string, s *Server, with ...func(*controlpb.MapRequest)) *controlpb.ClientDevice {
	l.t.Helper()
	d, err := c.Map(path, s, with...)
	if err != nil {
		l.t.Fatalf("map: %v", err)
	}
	return d
}

// Image makes a sparse file of size bytes in a folder of its own and returns
// the folder, for a server's search path.
func (l *T) Image(name string, size int64) string {
	l.t.Helper()
	dir := filepath.Join(l.Dir, "images")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		l.t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		l.t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		l.t.Fatal(err)
	}
	return dir
}

// Tool finds a program that the test needs. Without it the test is skipped,
// with the reason; in CI it fails, since there the tools are installed.
func Tool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("%s is not installed, and CI must have it", name)
	}
	t.Skipf("%s is not installed", name)
	return ""
}
