package faults

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// TestAClientRestartsUnderVerifiedLoads stops and kills a client daemon again and
// again while fio writes and verifies all of its devices. The daemon's configuration
// has the mappings, and its NBD socket outlives it, as with a service manager. fio's
// requests go through QEMU, which connects again and repeats those without an answer:
// none fails, and nothing is lost. The long form has 100 restarts and 50 devices.
func TestAClientRestartsUnderVerifiedLoads(t *testing.T) {
	restarts, n := pick(2, 100), pick(4, 50)
	l := lab.New(t)
	dir := ""
	for i := range n {
		dir = l.Image(fmt.Sprintf("d%d.img", i), 4<<20)
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Held: true, Extra: []string{"--config-dir", keepAll(t, l, s, n)}})
	awaitOpen(t, c, n)
	var uris []string
	for i, socket := 0, proxyByQEMU(t, l, c, n); i < n; i++ {
		uris = append(uris, fmt.Sprintf("nbd+unix:///d%d?socket=%s", i, socket))
	}

	var pauses []time.Duration
	requests := int64(0)
	for len(pauses) < restarts {
		f := startFio(t, time.Duration(pick(3, 60))*time.Second, "4m", "200k", uris...)
		for f.running() && len(pauses) < restarts {
			end := c.Stop
			if len(pauses)%2 == 1 {
				end = c.Kill
			}
			time.Sleep(500 * time.Millisecond)
			at := time.Now()
			if err := end(); err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			awaitOpen(t, c, n)
			pauses = append(pauses, time.Since(at))
			if len(pauses)%10 == 0 {
				t.Logf("%s: %d restarts", time.Now().Format(time.TimeOnly), len(pauses))
			}
		}
		requests += f.wait().Requests
	}
	t.Logf("%d restarts with %d devices: all were open again after %s; %d requests, none failed", len(pauses), n, figures(pauses), requests)
}

// proxyByQEMU runs a server of NBD that has the exports of c, and waits for c when it
// is away. It returns its socket.
func proxyByQEMU(t *testing.T, l *lab.T, c *lab.Client, n int) string {
	t.Helper()
	socket := filepath.Join(l.Dir, "qemu.sock")
	args := []string{"--nbd-server", "addr.type=unix,addr.path=" + socket + ",max-connections=0"}
	for i := range n {
		args = append(args,
			"--blockdev", fmt.Sprintf("driver=nbd,node-name=n%d,server.type=unix,server.path=%s,export=d%d,reconnect-delay=120", i, c.NBD, i),
			"--export", fmt.Sprintf("type=nbd,id=e%d,node-name=n%d,name=d%d,writable=on", i, i, i))
	}
	cmd := exec.Command(lab.Tool(t, "qemu-storage-daemon"), args...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("qemu-storage-daemon: %s", out.String())
		}
	})
	eventually(t, enough, "QEMU has all exports", func() bool {
		list, err := nbdclient.List(t.Context(), "unix", socket)
		return err == nil && len(list) == n
	})
	return socket
}
