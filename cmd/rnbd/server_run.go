package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/metrics"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/status"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-server"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// serverOptions are the flags and the configuration file of the server.
type serverOptions struct {
	daemonOptions    `yaml:",inline"`
	Listen           []string      `yaml:"listen"`
	SearchPath       string        `yaml:"search-path"`
	SearchPathLater  bool          `yaml:"search-path-later"`
	BlockDevices     []string      `yaml:"block-devices"`
	ServeInUse       bool          `yaml:"serve-in-use"`
	List             bool          `yaml:"list"`
	IOPlugin         []string      `yaml:"io-plugin"`
	IOMode           []string      `yaml:"io-mode"`
	IOConfig         []string      `yaml:"io-config"`
	QueueDepth       int           `yaml:"queue-depth"`
	ChunkSize        int           `yaml:"chunk-size"`
	AlwaysInvalidate bool          `yaml:"always-invalidate"`
	Limit            []string      `yaml:"limit"`
	InfoTimeout      time.Duration `yaml:"info-timeout"`
	CrashLimit       int           `yaml:"crash-limit"`
	CrashWindow      time.Duration `yaml:"crash-window"`
	AccessGrace      time.Duration `yaml:"access-grace"`
	StateDir         string        `yaml:"state-dir"`
	AdminListen      string        `yaml:"admin-listen"`
	Access           []access.Rule `yaml:"access"` // of files only
	Pools            []poolOptions `yaml:"pools"`  // likewise
}

// poolOptions are the keys of a pool.
type poolOptions struct {
	Name string `yaml:"name"`
	Kind string `yaml:"kind"`
	Path string `yaml:"path"`
}

func (o *poolOptions) config() volume.Config {
	return volume.Config{Name: o.Name, Kind: o.Kind, Path: o.Path}
}

// Check implements config.Checker.
func (o *poolOptions) Check() (key string, err error) { return "", o.config().Check() }

func newServerRun() *cobra.Command {
	c, _ := serverRun()
	return c
}

// serverRun is the command, and the options that its flags set.
func serverRun() (*cobra.Command, *serverOptions) {
	def := server.DefaultConfig()
	o := &serverOptions{}
	c := &cobra.Command{
		Use:   "run",
		Short: "Run the server daemon",
		Example: `  rnbd server run --search-path /srv/images --listen 0.0.0.0:1234
  rnbd server run --config /etc/rnbd/server.yaml`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			hangups := hangups()
			return withPredecessor(func(pre *handover.Predecessor) error {
				if err := o.load(cmd); err != nil {
					return err
				}
				return runServer(cmd, o, hangups, pre)
			})
		},
	}
	f := c.Flags()
	o.daemonOptions.register(f, def.Pumps)
	o.tlsOptions.register(f, "TLS on iwarp: off, allow (the client decides) or require")
	o.registerAuth(f, "have clients without TLS prove their identities, with the files of TLS: off, allow (those that can) or require; nothing is encrypted")
	f.StringArrayVar(&o.Listen, "listen", []string{"127.0.0.1:1234"}, "where to listen: [FABRIC://]ADDRESS:PORT[,trusted][,auth=MODE], repeatable; trusted: the network is protected, see --tls require; auth: in place of --auth")
	f.StringVar(&o.SearchPath, "search-path", "", "folder that device names start from; %SESSNAME% is the session's name, %IDENTITY% what its client has proved to be; without it the devices of --block-devices are served and no others")
	f.BoolVar(&o.SearchPathLater, "search-path-later", false, "start although the folder of --search-path is not there yet, as one that is mounted later")
	f.StringArrayVar(&o.BlockDevices, "block-devices", nil, "block devices of this host that clients may open by their paths, a path or a pattern as /dev/vg0/*, repeatable; with --search-path all below that folder are")
	f.BoolVar(&o.ServeInUse, "serve-in-use", false, "serve block devices that this host uses: mounted ones, swap, and those that other devices are built on; others are refused then, and opened exclusively for writing")
	f.BoolVar(&o.List, "list", def.List, "tell clients the names below --search-path, their sizes and who has them open, as rnbd discover shows them")
	f.StringArrayVar(&o.IOPlugin, "io-plugin", nil, "storage plugin NAME=PATH[,sha256=HEX], repeatable, beside blockio and fileio of the plugin folder; NAME=none leaves one of these out")
	f.StringArrayVar(&o.IOMode, "io-mode", nil, "GLOB=NAME: device names that a plugin serves, repeatable, first match wins; a GLOB without a slash is for whole names, as *=rbd for pool/vol")
	f.StringArrayVar(&o.IOConfig, "io-config", nil, "NAME:KEY=VALUE: setting of a storage plugin, repeatable")
	f.IntVar(&o.QueueDepth, "queue-depth", def.QueueDepth, "requests in flight per session")
	f.IntVar(&o.ChunkSize, "chunk-size", def.ChunkSize, "bytes of memory per request, a multiple of 4096 from 8192 up")
	f.BoolVar(&o.AlwaysInvalidate, "always-invalidate", def.AlwaysInvalidate, "change the key of a chunk after every request")
	f.StringArrayVar(&o.Limit, "limit", nil, "NAME=NUMBER: what clients can take at most, repeatable, 0 for no limit: "+limitDefaults())
	f.DurationVar(&o.InfoTimeout, "info-timeout", def.InfoTimeout, "time for a path from its first connection until it is connected")
	f.IntVar(&o.CrashLimit, "crash-limit", def.CrashLimit, "crashes of a plugin within --crash-window that are too many")
	f.DurationVar(&o.CrashWindow, "crash-window", def.CrashWindow, "see --crash-limit")
	f.DurationVar(&o.AccessGrace, "access-grace", 30*time.Second, "time that a device stays open when a reload takes away the rule that allowed it, and a path when its client could not prove its identity any more")
	f.StringVar(&o.StateDir, "state-dir", "", "folder of this server alone that outlives reboots: after a stop in order clients are not told of a power cut; the default is the first of $STATE_DIRECTORY, which systemd sets, else there is none")
	f.StringVar(&o.AdminListen, "admin-listen", "", "ADDRESS:PORT for administrators of other hosts, by TLS with the certificates of --tls-ca; what they may do is for the rules with a role below the key access (default none)")
	return c, o
}

// incarnationFile returns the file for Config.IncarnationFile, empty for none.
func (o *serverOptions) incarnationFile() string {
	dir := o.StateDir
	if dir == "" {
		dir, _, _ = strings.Cut(os.Getenv("STATE_DIRECTORY"), ":")
	}
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, "incarnation")
}

// load reads the configuration files. The rules of all files hold, in the order of
// the files; of any other key the last file counts.
func (o *serverOptions) load(cmd *cobra.Command) error {
	err := o.collectAccess(func(eachFile func()) error { return o.daemonOptions.load(cmd, "server", o, eachFile, nil) })
	if err != nil {
		return usageError{fmt.Errorf("configuration: %w", err)}
	}
	return nil
}

// collectAccess gathers the rules of the files that read reads, and checks them
// together. Access is nil if no file has the key.
func (o *serverOptions) collectAccess(read func(eachFile func()) error) error {
	var all []access.Rule
	err := read(func() {
		if all == nil && o.Access != nil {
			all = []access.Rule{}
		}
		all, o.Access = append(all, o.Access...), nil
	})
	o.Access = all
	if err == nil {
		_, err = access.New(all)
	}
	return err
}

func runServer(cmd *cobra.Command, o *serverOptions, hangups <-chan os.Signal, pre *handover.Predecessor) error {
	run, err := o.begin(cmd, "server", hangups, pre)
	if err != nil {
		return err
	}
	defer run.end()
	cfg, fabrics, err := o.libraryConfig(run)
	if err != nil {
		return err
	}
	var conf *running[*serverOptions]
	if err := run.protect(func() protection { return conf.protection(o.protection) }); err != nil {
		return err
	}
	if err := run.listen(); err != nil {
		return err
	}
	cfg.Audit, cfg.Standby = run.audit, pre != nil
	if cfg.PluginPatience = pluginPatience; cfg.Standby {
		cfg.PluginPatience = 0 // the process before goes on with the plugins that it has
	}
	if cfg.Confine.Groups, err = o.groups(run.log); err != nil {
		return err
	}
	s, err := server.New(cmd.Context(), cfg)
	if err != nil {
		return explainListen(fmt.Errorf("server: %w", err))
	}
	serve := func() error {
		if err := inheritErrors(pre, s); err != nil {
			run.log.Warn("clients may not be told of flushes that have failed", "err", err)
		}
		return s.Serve(cfg.Listen)
	}
	if err := run.takeOver(serve, s.Devices); err != nil {
		return errors.Join(err, closeWithin(s.Close))
	}
	daemon := &serverDaemon{ServerDaemonServer: s.Control(versionString()), server: s, upgrading: run.upgrading}
	daemon.serving = &serving{server: s, options: o, fabrics: fabrics, reopen: func(fabric string) (verbs.Device, error) { return o.openFabric(run, fabric) }}
	conf = &daemon.conf
	daemon.conf = running[*serverOptions]{kind: "server", cmd: cmd, logs: run.logs, options: o, keys: readKeyFiles(o), fresh: serverRun, refuse: refuseNoRules, tls: run.tls, metrics: run.metrics}
	defer watchKeys(run.tls, func() { s.RecheckIdentities(o.AccessGrace) })()
	view, api := control.ViewServer(daemon), run.newAPI()
	controlpb.RegisterServerDaemonServer(api, daemon)
	stopAdmin, err := o.serveAdmin(run, daemon, s.Access)
	if err != nil {
		return errors.Join(err, closeWithin(s.Close))
	}
	defer stopAdmin()
	return run.serve(api, services{
		metrics: metrics.Server(view), status: status.Server(view), tree: s.Tree(), reloader: daemon,
		ready: func(context.Context) {}, alive: s.Alive, close: s.Close,
	})
}

// libraryConfig is config with the fabrics, the listeners and the logs of run.
func (o *serverOptions) libraryConfig(run *daemonRun) (server.Config, map[string]verbs.Device, error) {
	cfg, err := o.config()
	if err != nil {
		return cfg, nil, err
	}
	if err := o.checkSearchPath(run.log); err != nil {
		return cfg, nil, err
	}
	if _, err := o.mode(); err != nil {
		return cfg, nil, err
	}
	challenges, err := o.challenges()
	if err != nil {
		return cfg, nil, err
	}
	if run.tls, err = o.openTLS(challenges, run.logs.Logger("tls")); err != nil {
		return cfg, nil, err
	}
	fc, err := o.fabricConfig(run)
	if err != nil {
		return cfg, nil, err
	}
	devices, err := openFabrics(fc)
	if err != nil {
		return cfg, nil, err
	}
	if challenges {
		cfg.Auth = run.tls
	}
	cfg.Logs, cfg.Journal = run.logs, run.journal
	cfg.SocketDir, cfg.IncarnationFile = socketFolder(run.socket), o.incarnationFile()
	cfg.Listen, err = o.listeners(devices, run.pre.Take)
	return cfg, devices, err
}

// openTLS reads the files of keys and certificates. Remote administration needs them, too.
func (o *serverOptions) openTLS(challenges bool, log *slog.Logger) (*tlsauth.Auth, error) {
	a, err := o.tlsOptions.open("", challenges, o.AdminListen != "", log)
	if err == nil && o.AdminListen != "" && o.TLSCert == "" {
		err = usageError{errors.New("--admin-listen needs --tls-ca, --tls-cert and --tls-key: administrators prove who they are by certificates")}
	}
	return a, err
}

// challenges reports whether a listener challenges clients.
func (o *serverOptions) challenges() (bool, error) {
	mode, err := authMode("--auth", o.Auth)
	any := mode != rtrs.AuthOff
	for _, arg := range o.Listen {
		l, e := o.parseListener(arg)
		any, err = any || l.auth != rtrs.AuthOff, errors.Join(err, e)
	}
	return any, err
}

// fabricConfig is the configuration of the fabrics of run.
func (o *serverOptions) fabricConfig(run *daemonRun) (fabricConfig, error) {
	timing := server.DefaultConfig().Timing
	if o.KernelTiming {
		timing = rtrs.KernelTiming()
	}
	accept, err := o.mode()
	c := fabricConfig{MPACRC: o.MPACRC, Timing: timing, Logs: run.logs}
	if accept != iwarp.TLSOff {
		c.TLS, c.Accept = run.tls, accept
	}
	return c, err
}

// openFabric opens one fabric again.
func (o *serverOptions) openFabric(run *daemonRun, fabric string) (verbs.Device, error) {
	c, err := o.fabricConfig(run)
	if err != nil {
		return nil, err
	}
	c.Logger = run.logs.Logger(fabric)
	return fabrics[fabric](c)
}

// checkSearchPath refuses a search path that is no folder. The part from
// %SESSNAME% or %IDENTITY% on has names of clients and is not checked.
func (o *serverOptions) checkSearchPath(log *slog.Logger) error {
	folder, _, _ := strings.Cut(o.SearchPath, "%SESSNAME%")
	folder, _, _ = strings.Cut(folder, "%IDENTITY%")
	if folder == "" {
		return nil
	}
	st, err := os.Stat(folder)
	if err == nil && !st.IsDir() {
		err = fmt.Errorf("%s is no folder: %w", folder, syscall.ENOTDIR)
	}
	if err == nil {
		return nil
	}
	if o.SearchPathLater {
		log.Warn("the search path is not there: no device opens before it is", "path", folder, "err", err)
		return nil
	}
	return hinted{usageError{fmt.Errorf("--search-path: %w", err)}, "make the folder, or start with --search-path-later where it is mounted later"}
}

// config turns options into the library's configuration.
func (o *serverOptions) config() (server.Config, error) {
	cfg := server.DefaultConfig()
	cfg.SearchPath, cfg.List = o.SearchPath, o.List
	cfg.BlockDevices, cfg.ServeInUse = o.BlockDevices, o.ServeInUse
	if o.SearchPath != "" && len(o.BlockDevices) > 0 {
		return cfg, usageError{errors.New("--block-devices is of no use with --search-path: block devices and links to them below that folder are served")}
	}
	cfg.Pumps, cfg.Spin = o.Pumps, o.spin()
	cfg.QueueDepth, cfg.ChunkSize, cfg.AlwaysInvalidate = o.QueueDepth, o.ChunkSize, o.AlwaysInvalidate
	cfg.CrashLimit, cfg.CrashWindow = o.CrashLimit, o.CrashWindow
	cfg.InfoTimeout, cfg.HungAfter, cfg.SearchPathLater = o.InfoTimeout, o.HungAfter, o.SearchPathLater
	var err error
	if cfg.Confine, err = o.confinement(); err != nil {
		return cfg, err
	}
	if cfg.Access, err = access.New(o.Access); err != nil {
		return cfg, usageError{fmt.Errorf("access: %w", err)}
	}
	for _, p := range o.Pools {
		cfg.Pools = append(cfg.Pools, p.config())
	}
	if err := setLimits(&cfg, o.Limit); err != nil {
		return cfg, err
	}
	if o.KernelTiming {
		cfg.Timing = rtrs.KernelTiming()
	}
	files, err := findPlugins(o.IOPlugin, o.PluginDir, "io-", "blockio", "fileio")
	if err != nil {
		return cfg, err
	}
	if err := giveSettings(files, o.IOConfig); err != nil {
		return cfg, err
	}
	for _, p := range files {
		cfg.Plugins = append(cfg.Plugins, server.PluginConfig{Name: p.name, Path: p.path, SHA256: p.sha256, Configure: p.settings})
	}
	for _, r := range o.IOMode {
		glob, name, ok := strings.Cut(r, "=")
		if !ok {
			return cfg, usageError{fmt.Errorf("--io-mode %q: write GLOB=NAME", r)}
		}
		cfg.Rules = append(cfg.Rules, server.Rule{Glob: strings.TrimLeft(glob, "/"), Plugin: name})
	}
	return cfg, nil
}

// serverLimit is one of --limit.
type serverLimit struct {
	name string
	of   func(cfg *server.Config) any // *int or *int64
}

func (l serverLimit) set(cfg *server.Config, n int64) {
	switch p := l.of(cfg).(type) {
	case *int:
		*p = int(n)
	case *int64:
		*p = n
	}
}

func (l serverLimit) get(cfg *server.Config) int64 {
	switch p := l.of(cfg).(type) {
	case *int:
		return int64(*p)
	case *int64:
		return *p
	}
	return 0
}

var serverLimits = []serverLimit{
	{"sessions", func(c *server.Config) any { return &c.Limits.Sessions }},
	{"sessions-per-address", func(c *server.Config) any { return &c.Limits.SessionsPerAddr }},
	{"connections", func(c *server.Config) any { return &c.Limits.Connections }},
	{"connections-per-address", func(c *server.Config) any { return &c.Limits.ConnectionsPerAddr }},
	{"chunk-memory", func(c *server.Config) any { return &c.Limits.ChunkMemory }},
	{"chunk-memory-per-address", func(c *server.Config) any { return &c.Limits.ChunkMemoryPerAddr }},
	{"unfinished", func(c *server.Config) any { return &c.Limits.Unfinished }},
	{"unfinished-per-address", func(c *server.Config) any { return &c.Limits.UnfinishedPerAddr }},
	{"devices-per-session", func(c *server.Config) any { return &c.SessionDevices }},
	{"opens", func(c *server.Config) any { return &c.Opens }},
}

func limitNames() (names []string) {
	for _, l := range serverLimits {
		names = append(names, l.name)
	}
	return names
}

// limitDefaults lists the limits with their defaults, for --help.
func limitDefaults() string {
	cfg := server.DefaultConfig()
	var list []string
	for _, l := range serverLimits {
		list = append(list, fmt.Sprintf("%s=%d", l.name, l.get(&cfg)))
	}
	return strings.Join(list, ", ")
}

// setLimits takes the arguments of --limit over into cfg.
func setLimits(cfg *server.Config, args []string) error {
	for _, arg := range args {
		name, number, _ := strings.Cut(arg, "=")
		n, err := strconv.ParseInt(number, 10, 64)
		if err != nil || n < 0 {
			return usageError{fmt.Errorf("--limit %q: write NAME=NUMBER, bytes for memory", arg)}
		}
		known := false
		for _, l := range serverLimits {
			if l.name == name {
				l.set(cfg, n)
				known = true
			}
		}
		if !known {
			return usageError{fmt.Errorf("--limit %q: the names are %s", arg, strings.Join(limitNames(), ", "))}
		}
	}
	return nil
}
