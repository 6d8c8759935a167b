package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/grpclog"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/cgroup"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
)

// daemonOptions are the options of both daemons.
type daemonOptions struct {
	Config       string        `yaml:"-"`
	ConfigDir    string        `yaml:"-"`
	filesRead    []string      `yaml:"-"` // configuration files, in their order
	PluginDir    string        `yaml:"plugin-dir"`
	Confine      string        `yaml:"confine"`
	PluginUser   string        `yaml:"plugin-user"`
	PluginAllow  []string      `yaml:"plugin-allow"`
	PluginMemory string        `yaml:"plugin-memory"`
	Pumps        int           `yaml:"pumps"`
	Spin         time.Duration `yaml:"spin"`
	MPACRC       bool          `yaml:"mpa-crc"`
	KernelTiming bool          `yaml:"kernel-timing"`
	LogFormat    string        `yaml:"log-format"`
	LogLevel     string        `yaml:"log-level"`
	Audit        string        `yaml:"audit"`
	AuditFull    string        `yaml:"audit-full"`
	Sys          string        `yaml:"sys"`
	ControlGroup string        `yaml:"control-group"`
	HungAfter    time.Duration `yaml:"hung-after"`
	EventHook    string        `yaml:"event-hook"`
	tlsOptions   `yaml:",inline"`

	metricsOptions `yaml:",inline"`
}

func (o *daemonOptions) register(f *pflag.FlagSet, pumps int) {
	f.StringVar(&o.Config, "config", configAuto, "YAML file with these options; the command line wins; auto: "+systemConfig+"/client.yaml or server.yaml, if it is there, for root's daemon on the default socket; none")
	f.StringVar(&o.ConfigDir, "config-dir", configAuto, "folder of YAML files (*.yaml) that are read after --config, in the order of their names; auto: "+systemConfig+"/client.d or server.d for root's daemon on the default socket; none")
	f.StringVar(&o.PluginDir, "plugin-dir", defaultPluginDir(), "folder of the plugins")
	f.StringVar(&o.Confine, "confine", string(confine.Try), "what plugins lose of the daemon's rights: try (what this host can take away), strict (all of it, or they do not start) or off")
	f.StringVar(&o.PluginUser, "plugin-user", "", "user that plugins run as (default the daemon's)")
	f.StringArrayVar(&o.PluginAllow, "plugin-allow", nil, "NAME=WHAT: more for a plugin, repeatable: network, programs (it may start some), disks (front ends that show disks), an absolute path, or none of what its name has")
	f.StringVar(&o.PluginMemory, "plugin-memory", "", "most memory of a plugin, as 512M, beyond which it is killed and started again; needs a control group that is delegated to the daemon (default no limit)")
	f.IntVar(&o.Pumps, "pumps", pumps, "threads of the data path")
	f.DurationVar(&o.Spin, "spin", 100*time.Microsecond, "how long an idle pump looks for work before it sleeps; 0: not at all")
	f.BoolVar(&o.MPACRC, "mpa-crc", true, "ask for checksums on iwarp connections")
	f.BoolVar(&o.KernelTiming, "kernel-timing", false, "heartbeats and reconnects as slow as the Linux kernel's")
	f.StringVar(&o.LogFormat, "log-format", "text", "text or json")
	f.StringVar(&o.LogLevel, "log-level", "info", "debug, info, warn or error; \"rnbd log\" changes it")
	f.StringVar(&o.AuditFull, "audit-full", string(audit.Continue), "what happens while the audit log cannot be written: continue, or refuse new sessions, devices and commands that change something")
	f.StringVar(&o.Audit, "audit", "", "file, or syslog, for a record of each connection, device and command as a line of JSON (default not at all)")
	o.metricsOptions.register(f)
	f.StringVar(&o.ControlGroup, "control-group", "", "group of users that may list and show what the daemon has, and read its metrics by commands (default none but root and the daemon's user)")
	f.DurationVar(&o.HungAfter, "hung-after", 10*time.Second, "age from which a request without an answer is reported; 0: none is, and failed requests are not logged")
	f.StringVar(&o.EventHook, "event-hook", "", "program that is run for each event, which it finds in RNBD_EVENT_... of its environment (default none)")
	f.StringVar(&o.Sys, "sys", sysAuto, "folder for the tree of control files, off, or auto: sys beside the control socket, where that can be mounted")
}

// confinement is the library's configuration for the plugins.
func (o *daemonOptions) confinement() (confine.Config, error) {
	mode, err := confine.ParseMode(o.Confine)
	if err != nil {
		return confine.Config{}, usageError{fmt.Errorf("--confine: %w", err)}
	}
	if mode == confine.Off && o.PluginUser != "" {
		return confine.Config{}, usageError{errors.New("--plugin-user needs --confine=try or strict")}
	}
	allow, err := confine.ParseAllow(o.PluginAllow)
	if err != nil {
		return confine.Config{}, usageError{fmt.Errorf("--plugin-allow %w", err)}
	}
	c := confine.Config{Mode: mode, User: o.PluginUser, Allow: allow, Launcher: []string{"/proc/self/exe", confine.Argument}}
	if err := c.Check(); err != nil {
		return c, usageError{err}
	}
	return c, nil
}

// groups opens the control group of this daemon, below which each plugin gets one.
// nil: there is none that may be used.
func (o *daemonOptions) groups(log *slog.Logger) (*cgroup.Tree, error) {
	memory, err := o.pluginMemory()
	if err != nil || o.Confine == string(confine.Off) {
		return nil, err
	}
	t, err := cgroup.Open(cgroup.Limits{Memory: memory})
	switch {
	case err == nil:
		return t, nil
	case memory > 0:
		return nil, fmt.Errorf("--plugin-memory: %w", err)
	case !errors.Is(err, cgroup.ErrNotDelegated):
		log.Warn("plugins get no control groups of their own", "err", err)
	}
	return nil, nil
}

func (o *daemonOptions) pluginMemory() (int64, error) {
	if o.PluginMemory == "" {
		return 0, nil
	}
	if o.Confine == string(confine.Off) {
		return 0, usageError{errors.New("--plugin-memory needs --confine=try or strict")}
	}
	n, err := report.ParseSize(o.PluginMemory, 0)
	if err == nil && n < minPluginMemory {
		err = fmt.Errorf("a plugin needs %d MiB at least", minPluginMemory>>20)
	}
	if err != nil {
		return 0, usageError{fmt.Errorf("--plugin-memory %s: %w", o.PluginMemory, err)}
	}
	return int64(n), nil
}

// minPluginMemory is what a plugin needs to start.
const minPluginMemory = 32 << 20

// spin is the pumps' setting: the flag's 0 is their "never".
func (o *daemonOptions) spin() time.Duration {
	if o.Spin == 0 {
		return -1
	}
	return o.Spin
}

// logFormats are the values of --log-format.
var logFormats = map[string]func(io.Writer) slog.Handler{
	"text": func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, logs.Everything) },
	"json": func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, logs.Everything) },
}

// stderr is where this process reports its error. In a daemon it is the Writer of the
// log, behind whose lines the error belongs.
var stderr io.Writer = os.Stderr

// flushTime bounds the wait for the reader of the log at the end of a daemon.
const flushTime = time.Second

// flushStderr waits until what a daemon has written to stderr has arrived.
func flushStderr() {
	if lines, ok := stderr.(*logs.Writer); ok {
		lines.Flush(flushTime)
	}
}

// start makes the loggers and prepares the process. kind is that of the daemon,
// and the name of its subsystem.
func (o *daemonOptions) start(kind string) (*logs.Logs, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.LogLevel)); err != nil {
		return nil, usageError{fmt.Errorf("--log-level %q: use debug, info, warn or error", o.LogLevel)}
	}
	format, ok := logFormats[o.LogFormat]
	if !ok {
		return nil, usageError{fmt.Errorf("--log-format %q: use text or json", o.LogFormat)}
	}
	lines := logs.Stderr(format)
	stderr = lines
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, lines))
	l := logs.New(lines.Handler(), level)
	log := l.Logger(kind)
	slog.SetDefault(log)
	pump.SetProcs(o.Pumps)
	selfstats.Start(log)
	return l, nil
}

// shutdownLimit bounds an orderly end.
const shutdownLimit = 20 * time.Second

// serveUntilDone serves the control API until ctx is cancelled by a signal, or
// another process has taken over, then ends the daemon in order. A second signal
// ends it at once.
func serveUntilDone(ctx context.Context, api *grpc.Server, sock net.Listener, u *upgrading, closeDaemon func(context.Context) error) error {
	failed := make(chan error, 1)
	go func() { failed <- api.Serve(sock) }()
	select {
	case err := <-failed:
		return errors.Join(err, closeWithin(closeDaemon))
	case err := <-u.broken:
		api.Stop()
		return errors.Join(err, closeWithin(closeDaemon))
	case <-u.replaced:
	case <-ctx.Done():
		signal.Reset(syscall.SIGINT, syscall.SIGTERM)
		u.end()
	}
	if u.isReplaced() {
		control.Leave(sock)
		stopGracefully(api)
	} else {
		api.Stop()
	}
	return closeWithin(closeDaemon)
}

// answerTime is for the answers to commands that are under way when another process
// has taken over.
const answerTime = time.Second

// stopGracefully stops api when the commands under way are answered.
func stopGracefully(api *grpc.Server) {
	late := time.AfterFunc(answerTime, api.Stop)
	defer late.Stop()
	api.GracefulStop()
}

func closeWithin(closeDaemon func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownLimit)
	defer cancel()
	return closeDaemon(ctx)
}

// answers reports whether the daemon at the control socket answers.
func answers(ctx context.Context, kind, socket string) error {
	var conn *grpc.ClientConn
	var ask func(context.Context, *controlpb.InfoRequest, ...grpc.CallOption) (*controlpb.DaemonInfo, error)
	var err error
	if kind == "client" {
		var api controlpb.ClientDaemonClient
		if api, conn, err = control.DialClient(ctx, socket); err == nil {
			ask = api.Info
		}
	} else {
		var api controlpb.ServerDaemonClient
		if api, conn, err = control.DialServer(ctx, socket); err == nil {
			ask = api.Info
		}
	}
	if err == nil {
		_, err = ask(ctx, &controlpb.InfoRequest{})
		conn.Close()
	}
	if err != nil {
		return fmt.Errorf("the control socket does not answer: %w", err)
	}
	return nil
}
