package cli

import (
	"bytes"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestInterruptedMapIsTakenBack ends a map that waits for a silent server.
func TestInterruptedMapIsTakenBack(t *testing.T) {
	l := lab.New(t)
	c := l.Client(lab.ClientOptions{})
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	rnbd := filepath.Join(l.Bin, "rnbd")
	cmd := exec.Command(rnbd, "map", "disk.img", "from", silent.Addr().String(), "--socket", c.Socket)
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	conn, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	var end *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &end) || end.ExitCode() != 130 {
		t.Errorf("end %v, want exit code 130", err)
	}
	if !strings.Contains(said.String(), "interrupted: the daemon takes the mapping back") {
		t.Errorf("it says %q", said.String())
	}
	for limit := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		out, err := exec.Command(rnbd, "client", "list", "all", "csv", "noheaders", "--socket", c.Socket).CombinedOutput()
		if err == nil && len(bytes.TrimSpace(out)) == 0 {
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("something of the mapping is left: %s %v", out, err)
		}
	}
}

// TestSocketOfAnotherUserIsNotPermitted runs rnbd as a user without access to
// the daemon.
func TestSocketOfAnotherUserIsNotPermitted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	l := lab.New(t)
	c := l.Client(lab.ClientOptions{})
	// The other user must reach the program, and the folder of the socket.
	open := t.TempDir()
	copyFile(t, filepath.Join(l.Bin, "rnbd"), filepath.Join(open, "rnbd"))
	for dir := open; dir != "/"; dir = filepath.Dir(dir) {
		if st, err := os.Stat(dir); err == nil && st.Mode()&0o011 != 0o011 {
			if err := os.Chmod(dir, st.Mode()|0o055); err != nil {
				t.Fatal(err)
			}
		}
	}
	const nobody = 65534
	cmd := exec.Command(filepath.Join(open, "rnbd"), "list", "--socket", c.Socket)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	var end *exec.ExitError
	if !errors.As(err, &end) || end.ExitCode() != 6 {
		t.Errorf("end %v, want exit code 6", err)
	}
	if !strings.Contains(string(out), "not permitted") || !strings.Contains(string(out), "run it as root") {
		t.Errorf("it says %q", out)
	}
}

// TestTakenAddressNamesItsHolder starts a server where another listens.
func TestTakenAddressNamesItsHolder(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Dir, Plugins: []string{"fileio"}})
	out, err := exec.Command(filepath.Join(l.Bin, "rnbd"), "server", "run", "--search-path", l.Dir, "--sys", "off",
		"--socket", filepath.Join(l.Dir, "second.sock"), "--listen", s.Addrs[0]).CombinedOutput()
	var end *exec.ExitError
	if !errors.As(err, &end) || end.ExitCode() != 4 {
		t.Errorf("end %v, want exit code 4", err)
	}
	_, said, _ := strings.Cut(string(out), "rnbd: ")
	if strings.Count(said, "listen on") != 1 || !strings.Contains(said, "process ") || !strings.Contains(said, "(rnbd) does") {
		t.Errorf("it says %q", said)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, b, 0o755); err != nil {
		t.Fatal(err)
	}
}
