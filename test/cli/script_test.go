package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

var update = flag.Bool("update", false, "write what commands print into the scripts")

func TestMain(m *testing.M) { os.Exit(lab.Run(m)) }

// TestScripts runs testdata/*.txtar, each with daemons of its own:
//
//	server [FLAG...]         runs a server on two addresses, $server and $server2
//	client [FLAG...]         runs a client
//	image NAME SIZE          makes an image that the server exports
//	halt server|client       ends it
//	follow client            the lab ends the process that has taken over
//	hangup server|client     sends it SIGHUP
//	rnbd ARG...              must succeed
//	exits CODE ARG...        rnbd must end with that code
//	as UID GID CODE ARG...   likewise, as another user with one more group
//	feed FILE ARG...         rnbd, with FILE as standard input
//	fails CODE FILE ARG...   likewise, and it must end with that code
//	ports FILE               puts the server's port in the place of PORT
//	eventually WORD ARG...   rnbd, until it prints WORD
//	reconnects NAME ARG...   rnbd, and waits until a path of session NAME is back
//	paths N NAME ARG...      rnbd, which connects N paths of session NAME, each once
//
// The output of rnbd has 127.0.0.1:11111, 127.0.0.2:22222 and the lab's folder
// (LAB) in the place of the values of this run.
func TestScripts(t *testing.T) {
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Condition: func(cond string) (bool, error) {
			if cond == "root" {
				return os.Geteuid() == 0, nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Dir:                 "testdata",
		UpdateScripts:       *update,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			l, err := lab.Open()
			if err != nil {
				return err
			}
			s := &stage{lab: l, bin: filepath.Join(bin, "rnbd"), run: filepath.Join(l.Dir, "run")}
			e.Values[stage{}] = s
			e.Defer(func() {
				if err := l.Close(); err != nil {
					t.Errorf("end of the lab: %v", err)
				}
			})
			e.Setenv("lab", l.Dir)
			e.Setenv("RNBD_SOCKET", s.run)
			e.Setenv("PATH", bin+":"+e.Getenv("PATH"))
			if err := os.Mkdir(filepath.Join(l.Dir, "images"), 0o755); err != nil {
				return err
			}
			return os.Mkdir(s.run, 0o755)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"server": startServer, "client": startClient, "halt": halt, "follow": follow, "image": image,
			"rnbd":       func(ts *testscript.TestScript, neg bool, args []string) { expect(ts, neg, "", 0, args) },
			"exits":      exits,
			"as":         asUser,
			"feed":       func(ts *testscript.TestScript, neg bool, args []string) { expect(ts, neg, args[0], 0, args[1:]) },
			"fails":      fails,
			"ports":      ports,
			"hangup":     hangup,
			"eventually": eventually, "reconnects": reconnects, "paths": paths,
		},
	})
}

// stage is the environment of a script: its lab and the daemons in it.
type stage struct {
	lab    *lab.Lab
	bin    string
	run    string // folder of client.sock and server.sock
	server *lab.Server
	client *lab.Client
}

func on(ts *testscript.TestScript) *stage { return ts.Value(stage{}).(*stage) }

func startServer(ts *testscript.TestScript, _ bool, args []string) {
	s := on(ts)
	var err error
	s.server, err = s.lab.StartServer(lab.ServerOptions{
		SearchPath: filepath.Join(s.lab.Dir, "images"), Addrs: []string{"127.0.0.1", "127.0.0.2"}, Plugins: []string{"fileio"}, Extra: args,
	})
	ts.Check(err)
	ts.Check(os.Symlink(s.server.Socket, filepath.Join(s.run, "server.sock")))
	ts.Setenv("server", s.server.Addrs[0])
	ts.Setenv("server2", s.server.Addrs[1])
}

func startClient(ts *testscript.TestScript, _ bool, args []string) {
	s := on(ts)
	var err error
	s.client, err = s.lab.StartClient(lab.ClientOptions{Extra: args})
	ts.Check(err)
	if err := os.Remove(filepath.Join(s.run, "client.sock")); err != nil && !os.IsNotExist(err) { // of one that was halted
		ts.Check(err)
	}
	ts.Check(os.Symlink(s.client.Socket, filepath.Join(s.run, "client.sock")))
}

func halt(ts *testscript.TestScript, _ bool, args []string) {
	s := on(ts)
	if args[0] == "server" {
		ts.Check(s.server.Stop())
	} else {
		ts.Check(s.client.Stop())
	}
}

// follow has the lab end the process that has taken over.
func follow(ts *testscript.TestScript, _ bool, _ []string) { ts.Check(on(ts).client.Follow()) }

func hangup(ts *testscript.TestScript, _ bool, args []string) {
	s := on(ts)
	if args[0] == "server" {
		ts.Check(s.server.Signal(syscall.SIGHUP))
	} else {
		ts.Check(s.client.Signal(syscall.SIGHUP))
	}
}

func image(ts *testscript.TestScript, _ bool, args []string) {
	size, err := strconv.ParseInt(args[1], 10, 64)
	ts.Check(err)
	name := filepath.Join(on(ts).lab.Dir, "images", args[0])
	ts.Check(os.WriteFile(name, nil, 0o644))
	ts.Check(os.Truncate(name, size))
}

func exits(ts *testscript.TestScript, neg bool, args []string) {
	code, err := strconv.Atoi(args[0])
	ts.Check(err)
	expect(ts, neg, "", code, args[1:])
}

// asUser runs rnbd as a user that need not exist. The program is opened here, since
// its folder may be closed to that user.
func asUser(ts *testscript.TestScript, neg bool, args []string) {
	if os.Geteuid() != 0 {
		ts.Fatalf("needs root")
	}
	var ids [3]uint64
	for i := range ids {
		n, err := strconv.ParseUint(args[i], 10, 32)
		ts.Check(err)
		ids[i] = n
	}
	program, err := os.Open(on(ts).bin)
	ts.Check(err)
	defer program.Close()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/fd/3", args[3:]...)
	cmd.Dir, cmd.ExtraFiles = "/", []*os.File{program}
	cmd.Env = []string{"RNBD_SOCKET=" + ts.Getenv("RNBD_SOCKET")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(ids[0]), Gid: uint32(ids[0]), Groups: []uint32{uint32(ids[1])}}}
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	err = cmd.Run()
	fmt.Fprint(ts.Stdout(), on(ts).normal(o.String()))
	fmt.Fprint(ts.Stderr(), on(ts).normal(e.String()))
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != int(ids[2]) {
		ts.Fatalf("%v, want exit code %d", err, ids[2])
	}
}

func fails(ts *testscript.TestScript, neg bool, args []string) {
	code, err := strconv.Atoi(args[0])
	ts.Check(err)
	expect(ts, neg, args[1], code, args[2:])
}

func ports(ts *testscript.TestScript, _ bool, args []string) {
	_, port, _ := strings.Cut(on(ts).server.Addrs[0], ":")
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(strings.ReplaceAll(ts.ReadFile(args[0]), "PORT", port)), 0o644))
}

// limit is far more than any command needs.
const limit = 40 * time.Second

// expect runs rnbd and shows the script its output.
func expect(ts *testscript.TestScript, neg bool, input string, want int, args []string) {
	if neg {
		ts.Fatalf("use exits CODE")
	}
	code, out, errOut := runRNBD(ts, input, args)
	fmt.Fprint(ts.Stdout(), out)
	fmt.Fprint(ts.Stderr(), errOut)
	if code != want {
		ts.Fatalf("exit code %d, want %d", code, want)
	}
	if strings.Contains(errOut, "goroutine ") {
		ts.Fatalf("it panicked")
	}
	if code != 0 && out != "" && args[0] != "doctor" { // its findings are its output
		ts.Fatalf("it failed, and prints on standard output")
	}
}

func runRNBD(ts *testscript.TestScript, input string, args []string) (code int, out, errOut string) {
	s := on(ts)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.bin, args...)
	cmd.Env = append(os.Environ(), "RNBD_SOCKET="+ts.Getenv("RNBD_SOCKET"), "COLUMNS="+ts.Getenv("COLUMNS"))
	cmd.Dir = ts.MkAbs(".")
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	if input != "" {
		cmd.Stdin = strings.NewReader(ts.ReadFile(input))
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		ts.Fatalf("%v", err)
	}
	return cmd.ProcessState.ExitCode(), s.normal(o.String()), s.normal(e.String())
}

func eventually(ts *testscript.TestScript, neg bool, args []string) {
	var out, errOut string
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		_, out, errOut = runRNBD(ts, "", args[1:])
		if strings.Contains(out, args[0]) {
			fmt.Fprint(ts.Stdout(), out)
			return
		}
	}
	ts.Fatalf("it does not print %q in 20 s, but %s%s", args[0], out, errOut)
}

func reconnects(ts *testscript.TestScript, neg bool, args []string) {
	before := reconnectsOf(ts, args[0])
	expect(ts, neg, "", 0, args[1:])
	for end := time.Now().Add(20 * time.Second); reconnectsOf(ts, args[0]) == before; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			ts.Fatalf("no path of session %s is back in 20 s", args[0])
		}
	}
}

// paths runs rnbd to connect N paths of a session, each once.
func paths(ts *testscript.TestScript, neg bool, args []string) {
	before := reconnectsOf(ts, args[1])
	expect(ts, neg, "", 0, args[2:])
	if got := fmt.Sprint(reconnectsOf(ts, args[1]) - before); got != args[0] {
		ts.Fatalf("%s paths of session %s were connected, want %s", got, args[1], args[0])
	}
}

// reconnectsOf is how often paths of a session were connected again.
func reconnectsOf(ts *testscript.TestScript, session string) (sum uint64) {
	l, err := on(ts).client.API.ListSessions(context.Background(), &controlpb.ListRequest{})
	ts.Check(err)
	for _, s := range l.Sessions {
		for _, p := range s.Paths {
			if s.Name == session {
				sum += p.Reconnects
			}
		}
	}
	return sum
}

// A made-up name of a session has a token, and the port.
var (
	madeUp = regexp.MustCompile(`[^\s",>]+-[0-9a-f]{4}@127-0-0-1:\d+`)
	pid    = regexp.MustCompile(`(?m)("pid": |Process +)\d+`)
)

// normal puts names in the place of values that differ from run to run. Ports
// have as many digits as those of the kernel's choice, so that tables keep
// their form.
func (s *stage) normal(text string) string {
	if s.server != nil {
		for i, a := range s.server.Addrs {
			port := a[strings.LastIndexByte(a, ':')+1:]
			text = strings.ReplaceAll(text, a, fmt.Sprintf("127.0.0.%d:%s", i+1, strings.Repeat(strconv.Itoa(i+1), len(port))))
		}
	}
	text = madeUp.ReplaceAllString(text, "HOST-TOKEN@127-0-0-1:PORT")
	text = pid.ReplaceAllString(text, "${1}1")
	text = strings.ReplaceAll(text, url.QueryEscape(s.lab.Dir), "LAB")
	return strings.ReplaceAll(text, s.lab.Dir, "LAB")
}
