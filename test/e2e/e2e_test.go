package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// enough is longer than anything takes that goes well.
const enough = 60 * time.Second

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == withoutURing {
		execWithoutURing(os.Args[2:])
	}
	if plugin.StartedByHost() {
		plugin.ServeIO(hostile{})
	}
	os.Exit(lab.Run(m, core...))
}

// core are the tests of make test: each front end and fabric that needs no driver, data
// verified by fio and others, the end of each process, and how commands answer.
var core = []string{
	"TestNbdinfoSeesTheDevice",
	"TestNbdcopyThereAndBack",
	"TestQemuIoWritesUnalignedRanges",
	"TestFioVerifiesMixedSizesAndJobs",
	"TestPathsOfTwoFabricsInOneSession",
	"TestTLSCarriesDataAndIsShown",
	"TestNBDByTLS",
	"TestNothingIsLeftOfAKilledDaemon",
	"TestPluginDoesNotOutliveAKilledDaemon",
	"TestSignalEndsADaemonInOrder",
	"TestMapAndUnmapAnswerInExitCodes",
	"TestCommandsWithoutADaemonSayHowToStartOne",
}

// long reports whether the long forms are asked for.
func long() bool { return os.Getenv("RNBD_LONG") != "" }

// rig is a server, a client and one mapped file of the server's.
type rig struct {
	*lab.T
	t      *testing.T
	server *lab.Server
	client *lab.Client
	device *controlpb.ClientDevice
	image  string
	tcp    string // address:port of the NBD front end
}

type rigOptions struct {
	size   int64
	server lab.ServerOptions
	client lab.ClientOptions
}

func newRig(t *testing.T, o rigOptions) *rig {
	t.Helper()
	r := &rig{T: lab.New(t), t: t}
	o.server.SearchPath = r.Image("disk.img", o.size)
	r.image = filepath.Join(o.server.SearchPath, "disk.img")
	if o.server.Plugins == nil {
		o.server.Plugins = []string{"fileio"}
	}
	r.server = r.Server(o.server)
	o.client.Extra = append(o.client.Extra, "--nbd-listen", "tcp:127.0.0.1:0")
	r.client = r.Client(o.client)
	r.tcp = tcpOf(t, r.client)
	r.device = r.Map(r.client, "disk.img", r.server)
	return r
}

// tcpOf finds the port that the front end got.
func tcpOf(t *testing.T, c *lab.Client) string {
	t.Helper()
	info, err := c.API.Info(context.Background(), &controlpb.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range info.Listen {
		if addr, ok := strings.CutPrefix(l, "tcp:"); ok {
			return addr
		}
	}
	t.Fatalf("the client listens on %q, not on TCP", info.Listen)
	return ""
}

func (r *rig) unixURI() string { return r.client.URI(r.device.Name) }
func (r *rig) tcpURI() string  { return "nbd://" + r.tcp + "/" + r.device.Name }

// pids of the four processes of the data path, by role.
func (r *rig) pids() map[string]int {
	r.t.Helper()
	io, err := r.server.Plugin("fileio")
	if err != nil {
		r.t.Fatal(err)
	}
	nbd, err := r.client.Plugin("nbd")
	if err != nil {
		r.t.Fatal(err)
	}
	return map[string]int{
		"server": r.server.PID(), "io-fileio": int(io.Pid), "client": r.client.PID(), "frontend-nbd": int(nbd.Pid),
	}
}

// dial connects a client of the test to the device.
func (r *rig) dial() *nbdclient.Client {
	r.t.Helper()
	return dialNBD(r.t, r.client, r.device.Name)
}

func dialNBD(t *testing.T, c *lab.Client, device string) *nbdclient.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), enough)
	defer cancel()
	n, err := nbdclient.Dial(ctx, "unix", c.NBD, nbdclient.Options{Export: device})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// result is the output and the end of a program.
type result struct {
	out, err string
	code     int
}

// try runs a program to its end, or ends it after the limit.
func try(t *testing.T, limit time.Duration, argv ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Dir = t.TempDir() // some leave files behind
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", argv[0], err)
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// run runs a program that must succeed and returns its output.
func run(t *testing.T, argv ...string) string {
	t.Helper()
	argv[0] = lab.Tool(t, argv[0])
	r := try(t, 5*enough, argv...)
	if r.code != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", strings.Join(argv, " "), r.code, r.out, r.err)
	}
	return r.out
}

// eventually waits until a condition holds.
var eventually = sdktest.Eventually

// alive reports whether a process runs; one that nobody has waited for does not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := bytes.Cut(b, []byte(") "))
	return len(state) > 0 && state[0] != 'Z'
}

// sumOf is the SHA-256 of a file.
func sumOf(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// randomFile makes a file that no two blocks of are the same.
func randomFile(t *testing.T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "random")
	src, err := os.Open("/dev/urandom")
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.CopyN(f, src, size); err != nil {
		t.Fatal(err)
	}
	return path
}

func sessionsOf(t *testing.T, c *lab.Client) []*controlpb.Session {
	t.Helper()
	l, err := c.API.ListSessions(context.Background(), &controlpb.ListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return l.Sessions
}
