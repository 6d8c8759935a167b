package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestFilesAreRefusedByDefault is about a server without a search path.
func TestFilesAreRefusedByDefault(t *testing.T) {
	l := lab.New(t)
	s, c := l.Server(lab.ServerOptions{}), l.Client(lab.ClientOptions{})
	for name, reason := range map[string]string{
		"etc/shadow": "--search-path", "/etc/shadow": "--search-path", "proc/self/mem": "--search-path",
		"etc": "neither a block device nor a regular file", "dev/null": "neither a block device nor a regular file",
	} {
		rnbd(t, "client", "--socket", c.Socket, "device", "map", name, "from", s.Addrs[0]).
			want(t, exitNotFound, name, "block device required", reason)
	}
	if got := sessionsOf(t, c); len(got) != 0 {
		t.Errorf("sessions left by mappings that failed: %v", got)
	}
}

func TestServerListensWhereToldAndNowhereElse(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{})
	_, port, err := net.SplitHostPort(s.Addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := net.Dial("tcp", net.JoinHostPort("127.0.0.2", port)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a connection to another address than the one to listen on gives %v", err)
	}
}

// TestServerListensOnLoopbackByDefault starts one with no setting at all, in a
// network of its own that has another address too.
func TestServerListensOnLoopbackByDefault(t *testing.T) {
	needRoot(t, "to make a network namespace")
	lab.Tool(t, "unshare")
	lab.Tool(t, "ip")
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	dir := shortDir(t)
	socket := filepath.Join(dir, "server.sock")
	cmd := exec.Command("unshare", "--net", "sh", "-ec", `ip link set lo up; ip addr add 192.0.2.1/32 dev lo; exec "$@"`, "sh",
		filepath.Join(bin, "rnbd"), "server", "run", "--socket", socket)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Errorf("the server: %v\n%s", err, said.String())
		}
	}()
	eventually(t, "the server is ready", func() bool {
		_, err := os.Lstat(socket)
		return err == nil && rnbd(t, "server", "show", "--socket", socket).code == 0
	})
	rnbd(t, "server", "show", "--socket", socket).want(t, 0, "iwarp://127.0.0.1:1234")
	dials := inNetworkOf(t, cmd.Process.Pid, func() (errs [2]error) {
		for i, host := range []string{"127.0.0.1", "192.0.2.1"} {
			c, err := net.Dial("tcp", host+":1234")
			if errs[i] = err; err == nil {
				c.Close()
			}
		}
		return errs
	})
	if dials[0] != nil {
		t.Errorf("a connection from the same machine: %v", dials[0])
	}
	if !errors.Is(dials[1], syscall.ECONNREFUSED) {
		t.Errorf("a connection to the address that others see gives %v", dials[1])
	}
}

// inNetworkOf runs f in the network namespace of a process, on a thread that
// is thrown away.
func inNetworkOf(t *testing.T, pid int, f func() [2]error) [2]error {
	t.Helper()
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	type answer struct {
		errs [2]error
		err  error
	}
	done := make(chan answer)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends here
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- answer{err: err}
			return
		}
		done <- answer{errs: f()}
	}()
	a := <-done
	if a.err != nil {
		t.Fatalf("enter the network of process %d: %v", pid, a.err)
	}
	return a.errs
}
