package faults

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// A client hands over to another process while a load runs: no request fails with
// loss=fail, and each NBD client has one connection all along.
func TestClientUpgradeUnderLoad(t *testing.T) {
	for name, o := range map[string]struct {
		tcp    string
		lab    lab.ClientOptions
		listen []string
		paths  []string
	}{
		"unix":                           {},
		"rocev2":                         {listen: []string{"rocev2://" + lab.LoopbackAddr(3) + ":4791"}, paths: []string{lab.LoopbackAddr(4) + "@" + lab.LoopbackAddr(3) + ":4791%rocev2"}},
		"tcp":                            {tcp: freePort(t)},
		"sockets of the service manager": {lab: lab.ClientOptions{Held: true}},
	} {
		t.Run(name, func(t *testing.T) {
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 16<<20), Plugins: []string{"fileio"}, Listen: o.listen})
			if o.tcp != "" {
				o.lab.Extra = []string{"--nbd-listen", "tcp:" + o.tcp}
			}
			c := l.Client(o.lab)
			if o.paths == nil {
				o.paths = bound(t, s)
			}
			d := l.Map(c, "disk.img", s, withLoss("fail"), func(r *controlpb.MapRequest) { r.Paths = o.paths })
			load := startLoad(t, c, d.Name, loadOptions{tcp: o.tcp})
			load.awaitProgress(100)
			idle := mustDial(t, c, d.Name)
			var pauses, told []time.Duration
			for range pick(2, 60) {
				at := time.Now()
				told = append(told, mustUpgradeClient(t, c))
				load.awaitProgress(200)
				pauses = append(pauses, load.longest(at))
			}
			load.stop()
			t.Logf("pause of users: %s; as told: %s", figures(pauses), figures(told))
			for _, p := range pauses {
				if p > enough {
					t.Errorf("a request waited for %v", p)
				}
			}
			if load.dials != 1 {
				t.Errorf("%d connections of the load, want one", load.dials)
			}
			if _, err := idle.ReadAt(make([]byte, 4096), 0); err != nil {
				t.Errorf("a connection without requests: %v", err)
			}
			if _, err := mustDial(t, c, d.Name).ReadAt(make([]byte, 4096), 0); err != nil {
				t.Errorf("a new connection: %v", err)
			}
			if err := c.Unmap(d.Name, true); err != nil {
				t.Error(err)
			}
		})
	}
}

// freePort returns an address of this host where nothing listens.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// fio and nbdcopy, over libnbd, go on through upgrades. libnbd does not connect again.
func TestClientUpgradeUnderLibnbd(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("disk.img", 8<<20)
	l.Image("copy.img", 64<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	d, e := l.Map(c, "disk.img", s, withLoss("fail")), l.Map(c, "copy.img", s, withLoss("fail"))
	f := startFio(t, time.Duration(pick(6, 120))*time.Second, "8m", "20m", c.URI(d.Name))
	copying := exec.Command(lab.Tool(t, "nbdcopy"), "--no-extents", "--connections=1", "--requests=4", "--request-size=262144", c.URI(e.Name), "null:")
	var pauses []time.Duration
	copies := make(chan error, 1)
	go func() {
		var err error
		for err == nil && f.running() {
			again := *copying
			var out []byte
			if out, err = again.CombinedOutput(); err != nil {
				err = fmt.Errorf("nbdcopy: %w: %s", err, out)
			}
		}
		copies <- err
	}()
	time.Sleep(time.Second)
	for f.running() {
		pauses = append(pauses, mustUpgradeClient(t, c))
		time.Sleep(300 * time.Millisecond)
	}
	r := f.wait()
	if err := <-copies; err != nil {
		t.Errorf("%v\n%s", err, c.Log())
	}
	t.Logf("%d requests of fio, the longest took %v; upgrades: %s", r.Requests, r.Longest, figures(pauses))
}

// A next process that fails, at whatever moment, changes nothing: the running one goes
// on, or takes its devices and connections back, and no request fails.
func TestClientUpgradeThatFails(t *testing.T) {
	testUpgradesThatFail(t, nil, nil, map[string]string{
		"exits":                     "exit status 3",
		"refuses":                   "it does not like the configuration",
		"is never ready":            "is not ready: context deadline exceeded",
		"dies after the hand-over":  "exit status 4",
		"hangs after the hand-over": "does not serve: context deadline exceeded",
		"dies when it begins":       "signal: killed",
		"dies when it could serve":  "signal: killed",
		"serves too late":           "does not serve: context deadline exceeded",
	})
}

// A fabric with an address that no two processes have is opened again.
func TestClientUpgradeThatFails_RoCEv2(t *testing.T) {
	testUpgradesThatFail(t, []string{"rocev2://" + lab.LoopbackAddr(3) + ":4791"}, []string{lab.LoopbackAddr(4) + "@" + lab.LoopbackAddr(3) + ":4791%rocev2"},
		map[string]string{"dies when it could serve": "signal: killed"})
}

// testUpgradesThatFail tries next processes with those behaviours and errors.
func testUpgradesThatFail(t *testing.T, listen, paths []string, behaviours map[string]string) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 16<<20), Plugins: []string{"fileio"}, Listen: listen})
	c := l.Client(lab.ClientOptions{Env: []string{nextProcess + "=yes", realProgram + "=" + filepath.Join(l.Bin, "rnbd")}})
	if paths == nil {
		paths = bound(t, s)
	}
	d := l.Map(c, "disk.img", s, withLoss("fail"), func(r *controlpb.MapRequest) { r.Paths = paths })
	load := startLoad(t, c, d.Name, loadOptions{})
	load.awaitProgress(100)
	before := c.PID()
	for behaviour, want := range behaviours {
		ctx, cancel := context.WithTimeout(t.Context(), 2*enough)
		_, err := c.API.Upgrade(ctx, &controlpb.UpgradeRequest{Binary: actor(t, l, behaviour), ReadyUs: (3 * time.Second).Microseconds()})
		cancel()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("one that %s: error %v, want one with %q", behaviour, err, want)
		}
		load.awaitProgress(200)
		if gone, _ := c.Exited(); gone || c.PID() != before {
			t.Fatalf("one that %s: the running process has ended\n%s", behaviour, c.Log())
		}
		mustAnswerClient(t, c)
		mustDial(t, c, d.Name).Close()
	}
	mustUpgradeClient(t, c) // and the next one may succeed
	load.awaitProgress(200)
	load.stop()
	if load.dials != 1 {
		t.Errorf("%d connections, want one\n%s", load.dials, c.Log())
	}
}

// A configuration that the next process refuses changes nothing, and one that it takes
// holds from then on.
func TestClientUpgradeToAnotherConfiguration(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	file := filepath.Join(l.Dir, "client.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wanted := fmt.Sprintf("mappings:\n  - device: disk.img\n    server: [%q]\n", bound(t, s)[0]) // without a name
	write("slots: 64\n" + wanted)
	c := l.Client(lab.ClientOptions{Extra: []string{"--config", file}})
	awaitOpen(t, c, 1)
	n := mustDial(t, c, "rnbd0")
	write("slats: 32\n")
	if _, err := c.Upgrade(""); err == nil || !strings.Contains(err.Error(), "slats") {
		t.Errorf("error %v", err)
	}
	mustAnswerClient(t, c)
	write("slots: 32\nloss: queue:1s\n" + wanted)
	mustUpgradeClient(t, c)
	awaitOpen(t, c, 1)
	if _, err := n.ReadAt(make([]byte, 512), 0); err != nil {
		t.Error(err)
	}
	if d, err := c.Device("rnbd0"); err != nil || d.Loss != "fail" {
		t.Errorf("a mapping takes the default of the new process: %q, %v", d.GetLoss(), err)
	}
	changes, err := c.API.Reload(t.Context(), &controlpb.ReloadRequest{DryRun: true})
	if err != nil || len(changes.Changes) > 0 || strings.Contains(c.Log(), "is tried again") {
		t.Errorf("the mapping is wanted once more: %v, %v\n%s", changes, err, c.Log())
	}
	if err := c.Stop(); err != nil { // as a process like any other
		t.Error(err)
	}
	if _, err := os.Stat(c.NBD); err == nil {
		t.Error("the socket is left")
	}
}

// A device that cannot be opened at once keeps the client where it is.
func TestClientUpgradeWithoutAServer(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, "disk.img", s, withLoss("queue:forever"))
	n := mustDial(t, c, d.Name)
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, enough, "the device is closed", func() bool {
		d, err := c.Device(d.Name)
		return err == nil && d.State == "closed"
	})
	if _, err := c.Upgrade(""); err == nil || !strings.Contains(err.Error(), "has no server now") {
		t.Errorf("error %v", err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := n.ReadAt(make([]byte, 512), 0); err != nil {
		t.Error(err)
	}
	mustUpgradeClient(t, c)
	if _, err := n.ReadAt(make([]byte, 512), 0); err != nil {
		t.Error(err)
	}
}

// realProgram names the environment variable with the path of rnbd. standIn is that of
// a helper of actAsNextProcess.
const (
	realProgram = "RNBD_TEST_REAL"
	standIn     = "RNBD_TEST_STAND_IN"
)

// becomeReal makes this process rnbd, whose lines go through another process, which
// does what behaviour says.
func becomeReal(behaviour string) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	helper := exec.Command(exe)
	helper.Env = append(os.Environ(), standIn+"="+behaviour)
	helper.ExtraFiles = []*os.File{os.NewFile(3, "pair"), os.NewFile(uintptr(fds[0]), "real")}
	if err := helper.Start(); err != nil {
		panic(err)
	}
	if err := unix.Dup2(fds[1], 3); err != nil {
		panic(err)
	}
	path := os.Getenv(realProgram)
	panic(unix.Exec(path, append([]string{path}, os.Args[1:]...), os.Environ()))
}

// standBetween passes lines on, between the running process and the parent of this one.
func standBetween(behaviour string) {
	running, next := os.NewFile(3, "pair"), os.NewFile(4, "real")
	end := func() {
		unix.Kill(os.Getppid(), unix.SIGKILL)
		os.Exit(0)
	}
	go func() {
		lines := bufio.NewScanner(running)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			fmt.Fprintln(next, lines.Text())
			if strings.HasPrefix(lines.Text(), "go ") && behaviour == "dies when it begins" {
				time.Sleep(10 * time.Millisecond)
				end()
			}
		}
		os.Exit(0)
	}()
	lines := bufio.NewScanner(next)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "serving") {
			switch behaviour {
			case "dies when it could serve":
				end()
			case "serves too late":
				time.Sleep(time.Hour) // the running process ends the real one, and so this one
			}
		}
		fmt.Fprintln(running, lines.Text())
	}
	os.Exit(0)
}

// mustUpgradeClient upgrades c to another process of its own binary, and returns the
// pause that it reports.
func mustUpgradeClient(t *testing.T, c *lab.Client) time.Duration {
	t.Helper()
	before := c.PID()
	r, err := c.Upgrade("")
	if err != nil {
		t.Fatalf("upgrade: %v\n%s", err, c.Log())
	}
	if c.PID() == before || r.Closed > 0 {
		t.Fatalf("process %d before and %d now, %d connections closed\n%s", before, c.PID(), r.Closed, c.Log())
	}
	return time.Duration(r.PauseUs) * time.Microsecond
}

// mustAnswerClient asks c on a new control connection.
func mustAnswerClient(t *testing.T, c *lab.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	api, conn, err := control.DialClient(ctx, c.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := api.Info(ctx, &controlpb.InfoRequest{}); err != nil {
		t.Fatal(err)
	}
}
