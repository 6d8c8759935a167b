package plugin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// startTimeout is the default of Config.StartTimeout.
const startTimeout = time.Minute

// Config describes the plugin to start.
type Config struct {
	Path         string            // of the executable
	Kind         Kind              // the required kind
	Name         string            // for logs and errors; empty: the executable's name
	SHA256       []byte            // if set, of the executable
	Args         []string          // of the plugin, after its own path
	Env          []string          // KEY=value, added to the few that are passed on
	Configure    map[string]string // settings for the plugin
	Pumps        int               // how many queues will be attached; 0: 1
	StartTimeout time.Duration     // until the handshake is done; 0: a minute
	SocketDir    string            // absolute path of the folder of the host's sockets, for the plugin's too; empty: a temporary folder
	Logger       *slog.Logger      // gets the plugin's log lines too; nil: slog.Default
	// OnExit is called once, on a goroutine of its own, when the process has
	// ended: nil after Stop. The end of the process is no fence: its I/O may
	// still reach the disk.
	OnExit func(error)

	// Confine has the rights of its host that the plugin keeps; nil: all of them.
	// Launcher is the program that takes the others away, with its arguments; see
	// package confine.
	Confine  *confine.Profile
	Launcher []string

	reapGrace time.Duration // 0: reapGrace
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = filepath.Base(c.Path)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.StartTimeout == 0 {
		c.StartTimeout = startTimeout
	}
	if c.reapGrace == 0 {
		c.reapGrace = reapGrace
	}
	c.Pumps = max(c.Pumps, 1)
	return c
}

// Launch starts a plugin, checks that it fits, and configures it. ctx bounds
// the start; it does not end the plugin later. The errors of a plugin that
// does not fit have ErrIncompatible in their chain; all name the path.
func Launch(ctx context.Context, c Config) (*Process, error) {
	c = c.withDefaults()
	p, err := launch(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("start %s %q (%s): %w", c.Kind, c.Name, c.Path, err)
	}
	return p, nil
}

func launch(ctx context.Context, c Config) (*Process, error) {
	if c.Confine != nil && len(c.Launcher) == 0 {
		return nil, fmt.Errorf("a confined plugin needs a launcher: %w", blk.EINVAL)
	}
	exe, err := openExecutable(c)
	if err != nil {
		return nil, misfit{err}
	}
	if exe.file != nil {
		defer exe.file.Close()
	}
	conn, peer, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer peer.Close()
	s := &starter{c: c, exe: exe.path, control: peer}
	if c.Confine != nil {
		s.confined = openConfined(c, exe.file)
	}
	link, err := s.start(ctx)
	if err != nil {
		_ = conn.Close()
		s.cleanup()
		return nil, err
	}
	p := newProcess(c, &connSender{conn: conn}, link)
	p.child = s.child
	p.cleanup = s.cleanup
	p.confined = s.report
	go p.supervise()
	if err := p.introduce(ctx); err != nil {
		p.quietly.Store(true)
		p.Kill()
		<-p.exited
		if blk.ToErrno(err) == blk.EINVAL {
			err = misfit{err}
		}
		return nil, err
	}
	c.Logger.Info("plugin started", "plugin", c.Name, "kind", c.Kind.String(), "version", p.info.Version, "path", c.Path, "pid", p.PID())
	return p, nil
}

// misfit is the error of a plugin that is wrong or wrongly configured: another start of
// it fails, too.
type misfit struct{ error }

func (m misfit) Unwrap() error { return m.error }

// IsMisfit reports whether the error of Launch is one of the configuration: the file is
// no plugin that may be executed, the plugin does not fit to this host, or it refuses
// its settings. Other errors may be over at the next start.
func IsMisfit(err error) bool {
	var m misfit
	return errors.As(err, &m) || errors.Is(err, ErrIncompatible)
}

// executable is the file to execute: the path, or the open file that was checked.
type executable struct {
	path string
	file *os.File
}

func openExecutable(c Config) (executable, error) {
	st, err := os.Stat(c.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return executable{}, fmt.Errorf("there is no such file; install the plugin or correct its path: %w", errno(err))
	case err != nil:
		return executable{}, errno(err)
	case !st.Mode().IsRegular():
		return executable{}, fmt.Errorf("not a regular file: %w", fs.ErrInvalid)
	case st.Mode().Perm()&0o111 == 0:
		return executable{}, fmt.Errorf("not executable; chmod +x it if it is the plugin: %w", fs.ErrPermission)
	}
	if err := confine.CheckFolder(c.Path); err != nil {
		return executable{}, err
	}
	if len(c.SHA256) == 0 && c.Confine == nil {
		return executable{path: c.Path}, nil
	}
	f, err := pin(c.Path)
	if err != nil {
		return executable{}, errno(err)
	}
	if len(c.SHA256) > 0 {
		if err := checkSum(c, f); err != nil {
			_ = f.Close()
			return executable{}, err
		}
	}
	return executable{path: fmt.Sprintf("/proc/self/fd/%d", f.Fd()), file: f}, nil
}

// errno drops the path from a path error: ours names it already.
func errno(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// checkSum hashes the open file that is executed, so that another one put in its
// place meanwhile is not. A file that is written in place is: CheckFolder refuses
// files that others than root may write to.
func checkSum(c Config, f *os.File) error {
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return fmt.Errorf("checksum: %w", errno(err))
	}
	if sum := h.Sum(nil); !bytes.Equal(sum, c.SHA256) {
		return fmt.Errorf("%w: SHA-256 of the file is %x, configured is %x; "+
			"if the plugin was updated on purpose, configure the new sum", ErrIncompatible, sum, c.SHA256)
	}
	return nil
}

// starter drives go-plugin through the start of one process.
type starter struct {
	c       Config
	exe     string
	control *os.File
	dir     *socketDir // of the plugin's gRPC socket
	child   *child
	client  *goplugin.Client
	pid     atomic.Int64

	confined *confined       // nil: it keeps its host's rights
	report   *confine.Report // of the confined process
}

func (s *starter) start(ctx context.Context) (grpc.ClientConnInterface, error) {
	var err error
	otherUser := s.confined != nil && s.confined.profile.User != nil
	if s.dir, err = newSocketDir(s.c.SocketDir, otherUser); err != nil {
		return nil, err
	}
	var words lastWords
	s.client = goplugin.NewClient(&goplugin.ClientConfig{
		HandshakeConfig:  handshake(),
		VersionedPlugins: map[int]goplugin.PluginSet{ProtocolVersion: {setName: &grpcPlugin{}}},
		RunnerFunc: func(_ hclog.Logger, cmd *exec.Cmd, sockets string) (runner.Runner, error) {
			return s.newRunner(ctx, cmd, sockets)
		},
		UnixSocketConfig: &goplugin.UnixSocketConfig{TempDir: s.dir.path},
		AllowedProtocols: []goplugin.Protocol{goplugin.ProtocolGRPC},
		AutoMTLS:         true,
		SkipHostEnv:      true,
		StartTimeout:     timeout(ctx, s.c.StartTimeout),
		Logger:           newHclog(s.c.Logger, s.attrs),
		Stderr:           &words,
		SyncStdout:       lineWriter{s.printed},
		SyncStderr:       lineWriter{s.printed},
	})
	link, err := s.connect(ctx)
	if err != nil {
		return nil, s.explain(ctx, err, &words)
	}
	s.child.words = &words
	if s.confined != nil {
		if s.report, err = s.confined.report(); err != nil {
			s.kill()
			return nil, err
		}
	}
	return link, nil
}

// connect does the handshake; the end of ctx ends the child.
func (s *starter) connect(ctx context.Context) (grpc.ClientConnInterface, error) {
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-ctx.Done():
			s.kill()
		case <-done:
		}
	}()
	proto, err := s.client.Client()
	if err != nil {
		return nil, err
	}
	raw, err := proto.Dispense(setName)
	if err != nil {
		return nil, err
	}
	return raw.(grpc.ClientConnInterface), nil
}

func (s *starter) kill() {
	if pid := s.pid.Load(); pid != 0 {
		_ = s.child.kill()
	}
}

// newRunner is called by go-plugin with the environment it wants, and the folder
// of its sockets.
func (s *starter) newRunner(ctx context.Context, cmd *exec.Cmd, sockets string) (runner.Runner, error) {
	env := append(hostEnv(s.c), cmd.Env...)
	if s.confined != nil {
		tmp, err := s.confined.home(s.dir, sockets)
		if err != nil {
			return nil, err
		}
		env = append(env, "TMPDIR="+tmp)
		if err := s.confined.enclose(s.c.Name); err != nil {
			return nil, err
		}
	}
	s.child = newChild(s.c.Path, s.exe, s.c.Args, env, s.control)
	s.child.started = func(pid int) {
		s.pid.Store(int64(pid))
		if ctx.Err() != nil { // connect found nothing to kill
			s.kill()
		}
	}
	if s.confined != nil {
		if err := s.confined.wrap(s.child); err != nil {
			return nil, err
		}
	}
	return s.child, nil
}

// explain adds the reason of a failed start, and a remedy.
func (s *starter) explain(ctx context.Context, err error, words *lastWords) error {
	if s.child == nil || s.child.pid() == 0 {
		return errno(err)
	}
	if v, ok := s.child.protocol(); ok && v != ProtocolVersion {
		return fmt.Errorf("%w: it speaks version %d of the plugin protocol, this host version %d; "+
			"install a plugin and a host of the same release", ErrIncompatible, v, ProtocolVersion)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if hello, ok := s.child.said(); ok {
		return fmt.Errorf("it answered the handshake with %q; is it an rnbd plugin?%s: %w", hello, words, err)
	}
	<-s.child.ended // go-plugin has killed it if it lived
	if s.confined != nil {
		if _, err := s.confined.report(); err != nil {
			return err
		}
	}
	s.child.hearOut(muteGrace)
	if s.child.killed.Load() {
		return fmt.Errorf("no handshake within %v; is it an rnbd plugin?%s: %w", s.c.StartTimeout, words, os.ErrDeadlineExceeded)
	}
	return fmt.Errorf("it ended in the handshake (%s)%s", exitStatus(s.child.status), words)
}

// cleanup runs after the process has ended.
func (s *starter) cleanup() {
	if s.client != nil {
		s.client.Kill()
	}
	if s.confined != nil {
		s.confined.close()
	}
	s.dir.remove()
}

func (s *starter) attrs() []any {
	return []any{"plugin", s.c.Name, "pid", s.pid.Load()}
}

func (s *starter) printed(line string) {
	s.c.Logger.Info(line, s.attrs()...)
}

// timeout is d, or less when ctx ends earlier.
func timeout(ctx context.Context, d time.Duration) time.Duration {
	if t, ok := ctx.Deadline(); ok {
		d = max(min(d, time.Until(t)), time.Millisecond)
	}
	return d
}

// passedOn are the variables of the host that a plugin sees, besides RNBD_*.
var passedOn = []string{"PATH", "HOME", "TMPDIR", "XDG_RUNTIME_DIR", "GOTRACEBACK", "GODEBUG", "GOCOVERDIR"}

func hostEnv(c Config) []string {
	var env []string
	for _, kv := range os.Environ() {
		k, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(k, "RNBD_") && k != cookieKey && k != logLevelKey {
			env = append(env, kv)
		}
	}
	for _, k := range passedOn {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	if c.Logger.Enabled(context.Background(), slog.LevelDebug) {
		env = append(env, logLevelKey+"=debug")
	}
	return append(env, c.Env...)
}

func exitStatus(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// introduce is the part of the start that speaks our protocol.
func (p *Process) introduce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.c.StartTimeout)
	defer cancel()
	d, err := p.plugin.Describe(ctx, &pluginpb.DescribeRequest{RingVersion: RingVersion})
	if err != nil {
		return p.failed("describe", err)
	}
	p.info = infoFromPB(d.GetInfo())
	switch {
	case p.info.Kind != p.c.Kind:
		return fmt.Errorf("%w: wrong kind: it is a %q, wanted is a %q; correct its path or what it is configured as",
			ErrIncompatible, p.info.Kind, p.c.Kind)
	case d.GetRingVersion() != RingVersion:
		return fmt.Errorf("%w: its rings have version %d, this host's version %d; "+
			"install a plugin and a host of the same release", ErrIncompatible, d.GetRingVersion(), RingVersion)
	}
	_, err = p.plugin.Configure(ctx, &pluginpb.ConfigureRequest{Settings: p.c.Configure, Pumps: uint32(p.c.Pumps)})
	if err != nil {
		return p.failed("configure", err)
	}
	if d, err = p.plugin.Describe(ctx, &pluginpb.DescribeRequest{RingVersion: RingVersion}); err != nil {
		return p.failed("describe", err)
	}
	p.info.Crash = infoFromPB(d.GetInfo()).Crash // it may depend on the settings
	return nil
}
