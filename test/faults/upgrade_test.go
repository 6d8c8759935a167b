package faults

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// A server hands over to another process while a load runs: no request fails, with
// either loss policy, and each waits for a moment only.
func TestServerUpgradeUnderLoad(t *testing.T) {
	roce := func(n byte) string { return "rocev2://" + lab.LoopbackAddr(n) + ":4791" }
	for name, o := range map[string]struct {
		loss   string
		listen []string
		paths  []string
	}{
		"iwarp, loss=fail":      {loss: "fail"},
		"iwarp, loss=queue":     {loss: "queue:60s"},
		"rocev2, loss=fail":     {loss: "fail", listen: []string{roce(1)}, paths: []string{lab.LoopbackAddr(2) + "@" + lab.LoopbackAddr(1) + ":4791%rocev2"}},
		"two paths, loss=queue": {loss: "queue:60s", listen: []string{"127.0.0.1:0", "127.0.0.2:0"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 16<<20), Plugins: []string{"fileio"}, Listen: o.listen})
			if o.paths == nil {
				o.paths = bound(t, s)
			}
			c := l.Client(lab.ClientOptions{})
			d := l.Map(c, "disk.img", s, withLoss(o.loss), func(r *controlpb.MapRequest) { r.Paths = o.paths })
			load := startLoad(t, c, d.Name, loadOptions{})
			load.awaitProgress(100)
			var pauses []time.Duration
			for range pick(2, 60) {
				at := time.Now()
				mustUpgrade(t, s)
				load.awaitProgress(200)
				pauses = append(pauses, load.longest(at))
			}
			load.stop()
			t.Logf("pause of users: %s", figures(pauses))
			for _, p := range pauses {
				if p > enough {
					t.Errorf("a request waited for %v", p)
				}
			}
		})
	}
}

// bound returns the addresses that s listens on, for paths.
func bound(t *testing.T, s *lab.Server) (all []string) {
	t.Helper()
	info, err := s.API.Info(t.Context(), &controlpb.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range info.Listen {
		_, addr, _ := strings.Cut(l, "://")
		all = append(all, addr)
	}
	return all
}

// mustUpgrade upgrades s to another process of its own binary.
func mustUpgrade(t *testing.T, s *lab.Server) {
	t.Helper()
	before := s.PID()
	if _, err := s.Upgrade(""); err != nil {
		t.Fatalf("upgrade: %v\n%s", err, s.Log())
	}
	if s.PID() == before {
		t.Fatal("the process is the same")
	}
}

// mustAnswer asks s on a new control connection.
func mustAnswer(t *testing.T, s *lab.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	api, conn, err := control.DialServer(ctx, s.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := api.Info(ctx, &controlpb.InfoRequest{}); err != nil {
		t.Fatal(err)
	}
}

// nextProcess names the environment variable with which this program acts as the next
// process of a server. Its name is what it does.
const nextProcess = "RNBD_TEST_NEXT_PROCESS"

// actAsNextProcess speaks as docs/extend/abi/handover-v1.md says, and then does what
// behaviour says.
func actAsNextProcess(behaviour string) {
	pair := os.NewFile(3, "pair")
	lines := bufio.NewReader(pair)
	switch behaviour {
	case "exits":
		os.Exit(3)
	case "refuses":
		fmt.Fprintf(pair, "failed %q\n", "it does not like the configuration")
		os.Exit(1)
	case "is never ready":
		lines.ReadString('\n') // until the other end is closed
		os.Exit(0)
	case "dies when it begins", "dies when it could serve", "serves too late":
		becomeReal(behaviour)
	}
	fmt.Fprintf(pair, "ready 9.9\n")
	lines.ReadString('\n') // go, or what a client leaves
	if behaviour == "dies after the hand-over" {
		os.Exit(4)
	}
	io.Copy(io.Discard, lines) // hangs after the hand-over
}

// A next process that fails, at whatever moment, changes nothing: the running one
// goes on, or takes over again, and no request fails.
func TestServerUpgradeThatFails(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 16<<20), Plugins: []string{"fileio"}, Env: []string{nextProcess + "=yes"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, "disk.img", s, withLoss("fail"))
	load := startLoad(t, c, d.Name, loadOptions{})
	load.awaitProgress(100)
	before := s.PID()
	for behaviour, want := range map[string]string{
		"exits":                     "exit status 3",
		"refuses":                   "it does not like the configuration",
		"is never ready":            "is not ready: context deadline exceeded",
		"dies after the hand-over":  "exit status 4",
		"hangs after the hand-over": "does not serve: context deadline exceeded",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*enough)
		_, err := s.API.Upgrade(ctx, &controlpb.UpgradeRequest{Binary: actor(t, l, behaviour), ReadyUs: time.Second.Microseconds()})
		cancel()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("one that %s: error %v, want one with %q", behaviour, err, want)
		}
		load.awaitProgress(200)
		if gone, _ := s.Exited(); gone || s.PID() != before {
			t.Fatalf("one that %s: the running process has ended\n%s", behaviour, s.Log())
		}
		mustAnswer(t, s)
	}
	mustUpgrade(t, s) // and the next one may succeed
	load.awaitProgress(200)
	load.stop()
}

// A signal that ends the running process in the middle of an upgrade leaves one
// process that serves, or none.
func TestServerUpgradeThatASignalMeets(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	begin := time.Now()
	mustUpgrade(t, s)
	whole := time.Since(begin)
	met := map[bool]int{}
	for i := range pick(4, 80) {
		upgraded := make(chan error, 1)
		pid := s.PID()
		go func() {
			_, err := s.Upgrade("")
			upgraded <- err
		}()
		at := whole * time.Duration(2+i%4) / 4 // the hand-over is in the second half
		time.Sleep(at)
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
		err := <-upgraded
		met[err == nil]++
		t.Logf("signal after %v of %v, %v after the begin: %v", at, whole, time.Since(begin), err)
		if err != nil {
			eventually(t, 2*enough, "the process has ended", func() bool { gone, _ := s.Exited(); return gone })
			if err := s.Start(); err != nil { // at the same sockets
				t.Fatalf("a signal after %v: %v\n%s", at, err, s.Log())
			}
		}
		mustAnswer(t, s)
	}
	t.Logf("%d upgrades came to their end, %d did not", met[true], met[false])
}

// actor is a link to this program, whose name says how it behaves.
func actor(t *testing.T, l *lab.T, behaviour string) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(l.Dir, behaviour)
	if err := os.Symlink(exe, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// What is installed in the place of the running program may be no program at all.
func TestServerUpgradeToSomethingElse(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	text := filepath.Join(l.Dir, "text")
	if err := os.WriteFile(text, []byte("no program"), 0o755); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		text:            "exec format error",
		text + ".gone":  "no such file",
		"relative/path": "absolute path",
		"/bin/true":     "exit status 0",
	} {
		_, err := s.API.Upgrade(t.Context(), &controlpb.UpgradeRequest{Binary: path, ReadyUs: (10 * time.Second).Microseconds()})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	if _, err := s.API.Info(t.Context(), &controlpb.InfoRequest{}); err != nil {
		t.Error(err)
	}
}
