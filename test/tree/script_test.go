package tree

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
)

func TestMain(m *testing.M) { os.Exit(lab.Run(m)) }

func mayMount(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("there is no /dev/fuse")
	}
	lab.Tool(t, "bash")
}

// TestScripts runs testdata/*.txtar, each with daemons and a tree of its own,
// in $sys:
//
//	server [FLAG...]             runs a server on two addresses, 127.0.0.1 and 127.0.0.2, port $port
//	client [FLAG...]             runs a client
//	again server|client          runs it again after sigkill or halt
//	sigkill server|client           ends it by SIGKILL
//	halt server|client           ends it in order
//	image NAME SIZE              makes an image that the server exports
//	sh LINE                      runs LINE in bash, in the folder $sys; ! sh: it must fail
//	eventually LINE              runs LINE in bash until it succeeds
//	logged server|client WORD    the daemon's log has WORD in it
func TestScripts(t *testing.T) {
	mayMount(t)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			l, err := lab.Open()
			if err != nil {
				return err
			}
			s := &stage{lab: l, sys: filepath.Join(l.Dir, "sys"), images: filepath.Join(l.Dir, "images")}
			e.Values[stage{}] = s
			e.Defer(func() {
				if err := l.Close(); err != nil {
					t.Errorf("end of the lab: %v", err)
				}
			})
			e.Setenv("sys", s.sys)
			e.Setenv("images", s.images)
			e.Setenv("LC_ALL", "C")
			return os.Mkdir(s.images, 0o755)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"server": startServer, "client": startClient, "again": again, "sigkill": sigkill, "halt": halt,
			"image": image, "sh": shell, "eventually": eventually, "logged": logged,
		},
	})
}

// stage is the environment of a script.
type stage struct {
	lab         *lab.Lab
	sys, images string
	server      *lab.Server
	client      *lab.Client
}

func on(ts *testscript.TestScript) *stage { return ts.Value(stage{}).(*stage) }

func startServer(ts *testscript.TestScript, _ bool, args []string) {
	s := on(ts)
	var err error
	s.server, err = s.lab.StartServer(lab.ServerOptions{SearchPath: s.images, Plugins: []string{"fileio"}, Extra: args, Sys: s.sys})
	ts.Check(err)
	_, port, _ := strings.Cut(s.server.Addrs[0], ":")
	ts.Setenv("port", port)
}

func startClient(ts *testscript.TestScript, _ bool, args []string) {
	s := on(ts)
	var err error
	s.client, err = s.lab.StartClient(lab.ClientOptions{Extra: args, Sys: s.sys})
	ts.Check(err)
}

// daemon is the common part of both for scripts.
type daemon interface {
	Start() error
	Stop() error
	Kill() error
	Log() string
}

func (s *stage) daemon(name string) daemon {
	if name == "server" {
		return s.server
	}
	return s.client
}

func again(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(on(ts).daemon(args[0]).Start())
}
func sigkill(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(on(ts).daemon(args[0]).Kill())
}
func halt(ts *testscript.TestScript, _ bool, args []string) { ts.Check(on(ts).daemon(args[0]).Stop()) }

func logged(ts *testscript.TestScript, neg bool, args []string) {
	log := func() string { return on(ts).daemon(args[0]).Log() }
	if !sdktest.Holds(10*time.Second, func() bool { return strings.Contains(log(), args[1]) != neg }) { // a daemon waits for no reader of its log
		ts.Fatalf("the log of the %s:\n%s", args[0], log())
	}
}

func image(ts *testscript.TestScript, _ bool, args []string) {
	size, err := strconv.ParseInt(args[1], 10, 64)
	ts.Check(err)
	name := filepath.Join(on(ts).images, args[0])
	ts.Check(os.WriteFile(name, nil, 0o644))
	ts.Check(os.Truncate(name, size))
}

// line is run in the folder $sys.
func line(ts *testscript.TestScript, args []string) error {
	return ts.Exec("bash", "-c", `cd "$sys" && `+strings.Join(args, " "))
}

func shell(ts *testscript.TestScript, neg bool, args []string) {
	err := line(ts, args)
	if neg && err == nil {
		ts.Fatalf("it succeeded")
	}
	if !neg {
		ts.Check(err)
	}
}

func eventually(ts *testscript.TestScript, _ bool, args []string) {
	var err error
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err = line(ts, args); err == nil {
			return
		}
	}
	ts.Fatalf("it never succeeded: %v", err)
}
