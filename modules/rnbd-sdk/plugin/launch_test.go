package plugin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A plugin that does not fit is refused with an error that names the path,
// the reason and a remedy.
func TestLaunch_Refuses(t *testing.T) {
	dir := t.TempDir()
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("text"), 0o700); err != nil {
		t.Fatal(err)
	}
	at := func(path string) Config {
		return Config{Path: path, Kind: KindIO, Logger: slog.New(slog.DiscardHandler)}
	}
	with := func(c Config, change func(*Config)) Config { change(&c); return c }
	for _, test := range []struct {
		name string
		c    Config
		is   error
		says []string
	}{
		{"missing binary", at(filepath.Join(dir, "absent")), fs.ErrNotExist, []string{"no such file", "install"}},
		{"not executable", at(plain), fs.ErrPermission, []string{"not executable", "chmod"}},
		{"directory", at(dir), fs.ErrInvalid, []string{"not a regular file"}},
		{"no program at all", at(text), syscall.ENOEXEC, []string{"exec format error"}},
		{"other checksum", with(self(t, "memory"), func(c *Config) { c.SHA256 = make([]byte, 32) }),
			ErrIncompatible, []string{"SHA-256", "000000", "configure the new sum"}},
		{"front end given as io plugin", with(self(t, "front end"), func(c *Config) { c.Kind = KindIO }),
			ErrIncompatible, []string{`it is a "front-end plugin"`, `wanted is a "io plugin"`}},
		{"io plugin given as front end", with(self(t, "memory"), func(c *Config) { c.Kind = KindFrontend }),
			ErrIncompatible, []string{`it is a "io plugin"`, `wanted is a "front-end plugin"`}},
		{"other application protocol", self(t, "protocol 7"), ErrIncompatible, []string{"version 7", "version 1", "same release"}},
		{"other ring version", self(t, "ring 9"), ErrIncompatible, []string{"version 9", "version 1", "same release"}},
		{"exits at once", self(t, "exits"), nil, []string{"exit status 3", "no licence found"}},
		{"panics at once", self(t, "panics"), nil, []string{"exit status 2", "panic: at the start"}},
		{"hangs in the handshake", with(self(t, "hangs"), func(c *Config) { c.StartTimeout = 200 * time.Millisecond }),
			os.ErrDeadlineExceeded, []string{"no handshake within 200ms", "is it an rnbd plugin?"}},
		{"prints something else", self(t, "babbles"), nil, []string{"hello, I am a program"}},
		{"answers with an empty line", at("/bin/echo"),
			nil, []string{`it answered the handshake with ""`, "is it an rnbd plugin?"}},
		{"refuses its settings", with(self(t, "memory"), func(c *Config) { c.Configure = map[string]string{"colour": "red"} }),
			syscall.EINVAL, []string{`unknown setting "colour"`}},
		{"takes no settings", with(self(t, "front end"), func(c *Config) { c.Configure = map[string]string{"a": "b"} }),
			syscall.EINVAL, []string{"takes no settings"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.c.OnExit = func(error) { t.Error("OnExit for a plugin that never started") }
			p, err := Launch(testContext(t), test.c)
			if err == nil {
				p.Kill()
				t.Fatal("started")
			}
			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("error has no %v in its chain", test.is)
			}
			for _, s := range append(test.says, test.c.Path) {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("error does not say %q", s)
				}
			}
			if t.Failed() {
				t.Logf("error: %v", err)
			}
		})
	}
}

func TestLaunch_EndsWithItsContext(t *testing.T) {
	c := self(t, "hangs")
	c.StartTimeout = time.Minute
	for _, after := range []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 200 * time.Millisecond} {
		t.Run(after.String(), func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			if after == 0 {
				cancel()
			}
			time.AfterFunc(after, cancel)
			start := time.Now()
			_, err := Launch(ctx, c)
			if took := time.Since(start); !errors.Is(err, context.Canceled) || took > 20*time.Second {
				t.Errorf("after %v: %v", took, err)
			}
		})
	}
}

func TestPlugin_StartedByHandSaysWhatItIs(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), roleKey+"=memory", "RNBD_TEST_BYHAND=1")
	cmd.Args = []string{"io-memory", "-test.run=^TestByHand$"}
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "this is an rnbd plugin, not a command") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestByHand is the process of the test above.
func TestByHand(t *testing.T) {
	if os.Getenv("RNBD_TEST_BYHAND") == "" {
		t.Skip("only a process of TestPlugin_StartedByHandSaysWhatItIs")
	}
	ServeIO(newMemory())
}

func TestLaunch_PinnedChecksumRunsThatFile(t *testing.T) {
	c := self(t, "memory")
	b, err := os.ReadFile(c.Path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	c.SHA256 = sum[:]
	c.Args = []string{"-x", "y z"}
	p := launchT(t, c)
	if p.Executable() != c.Path {
		t.Errorf("executable is %q", p.Executable())
	}
	_, err = p.OpenDisk(testContext(t), OpenRequest{Name: "args"})
	if want := fmt.Sprintf("%q", []string{c.Path, "-x", "y z"}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("arguments: %v, want %s", err, want)
	}
}

func TestLaunch_InfoAndProcess(t *testing.T) {
	p := launchT(t, self(t, "memory"))
	want := Info{Name: "memory", Version: "0.1", Kind: KindIO, Crash: KeepsFlushed, Names: NamesOpaque, Matches: RegularFiles}
	if p.Info() != want {
		t.Errorf("info %+v", p.Info())
	}
	if pgid, err := syscall.Getpgid(p.PID()); err != nil || pgid != p.PID() {
		t.Errorf("process group %d of %d: %v", pgid, p.PID(), err)
	}
	if in, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/0", p.PID())); err != nil || in != "/dev/null" {
		t.Errorf("stdin is %q, %v", in, err)
	}
}

func TestLaunch_PassesOnFewVariables(t *testing.T) {
	t.Setenv("RNBD_X", "1")
	t.Setenv("SECRET_TOKEN", "2")
	c := self(t, "memory")
	c.Env = append(c.Env, "MINE=3")
	p := launchT(t, c)
	for name, want := range map[string]string{
		"RNBD_X": `"1" true`, "SECRET_TOKEN": `"" false`, "MINE": `"3" true`, "PATH": "true",
	} {
		_, err := p.OpenDisk(testContext(t), OpenRequest{Name: "env:" + name})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
}

// A signal to the whole group, as systemd sends, does not end a plugin before
// its host has drained it.
func TestPlugin_IgnoresSignalsOfTheGroup(t *testing.T) {
	p := launchT(t, self(t, "memory"))
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		if err := syscall.Kill(p.PID(), sig); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(50 * time.Millisecond)
	if err := p.Drain(testContext(t)); err != nil {
		t.Error(err)
	}
	if err := p.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
}

// syncBuffer is a buffer for several goroutines.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestLog_LinesOfPluginReachTheHost(t *testing.T) {
	var out syncBuffer
	c := self(t, "memory")
	c.Name = "mem"
	c.Logger = slog.New(slog.NewTextHandler(&out, nil))
	p := launchT(t, c)
	if _, err := p.OpenDisk(testContext(t), OpenRequest{Name: "log"}); err != nil {
		t.Fatal(err)
	}
	// Its output comes another way than the answer, and not after its end.
	eventually(func() bool {
		return strings.Contains(out.String(), "printed to stdout") && strings.Contains(out.String(), "printed to stderr")
	})
	if err := p.Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
	log := out.String()
	for _, want := range []string{
		fmt.Sprintf("level=WARN msg=careful plugin=mem pid=%d disk=log\n", p.PID()),
		fmt.Sprintf("level=INFO msg=counted plugin=mem pid=%d size=134217728\n", p.PID()),
		fmt.Sprintf("level=INFO msg=\"printed to stdout\" plugin=mem pid=%d\n", p.PID()),
		fmt.Sprintf("level=INFO msg=\"printed to stderr\" plugin=mem pid=%d\n", p.PID()),
		`msg="plugin started"`, `msg="plugin stopped"`,
	} {
		if !strings.Contains(log, want) {
			t.Errorf("log lacks %q", want)
		}
	}
	if strings.Contains(log, "level=DEBUG") || strings.Contains(log, "RPC") {
		t.Error("log has lines of go-plugin")
	}
	if t.Failed() {
		t.Log(log)
	}
}

// TestTheCrashClassMayDependOnSettings: the host knows it after Configure.
func TestTheCrashClassMayDependOnSettings(t *testing.T) {
	for keeps, want := range map[string]CrashClass{"acknowledged": KeepsAcknowledged, "flushed": KeepsFlushed} {
		settings := map[string]string{"keeps": keeps}
		c := self(t, "memory")
		c.Configure = settings
		p := launchT(t, c)
		if got := p.Info().Crash; got != want {
			t.Errorf("keeps=%s: a process has the class %v", keeps, got)
		}
		in, err := LaunchInProcess(testContext(t), Config{Kind: KindIO, Configure: settings}, newMemory())
		if err != nil {
			t.Fatal(err)
		}
		if got := in.Info().Crash; got != want {
			t.Errorf("keeps=%s: a plugin in this process has the class %v", keeps, got)
		}
		if err := in.Stop(testContext(t)); err != nil {
			t.Error(err)
		}
	}
}
