package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/mappings"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/metrics"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/status"
	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/loopdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// clientOptions are the flags and the configuration file of the client.
type clientOptions struct {
	daemonOptions  `yaml:",inline"`
	TLSName        string   `yaml:"tls-name"`
	Resolver       string   `yaml:"resolver"`
	FrontendPlugin []string `yaml:"frontend-plugin"`
	FrontendConfig []string `yaml:"frontend-config"`
	Frontend       string   `yaml:"frontend"`
	NBDListen      []string `yaml:"nbd-listen"`
	nbdOptions     `yaml:",inline"`
	DeviceLinks    string `yaml:"device-links"`
	FuseDir        string `yaml:"fuse-dir"`
	Slots          int    `yaml:"slots"`
	Policy         string `yaml:"policy"`
	Loss           string `yaml:"loss"`

	Mappings []mappings.Mapping `yaml:"mappings"`

	broken brokenFiles `yaml:"-"`
}

func newClientRun() *cobra.Command {
	c, _ := clientRun()
	return c
}

// clientRun is the command, and the options that its flags set.
func clientRun() (*cobra.Command, *clientOptions) {
	def := client.DefaultConfig()
	o := &clientOptions{}
	c := &cobra.Command{
		Use:   "run",
		Short: "Run the client daemon",
		Example: `  rnbd client run
  rnbd client run --nbd-listen tcp:127.0.0.1:10809 --loss queue:30s`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			hangups := hangups()
			return withPredecessor(func(pre *handover.Predecessor) error {
				if err := o.loadAtStart(cmd, pre); err != nil {
					return err
				}
				return runClient(cmd, o, hangups, pre)
			})
		},
	}
	f := c.Flags()
	o.daemonOptions.register(f, def.Pumps)
	o.tlsOptions.register(f, "TLS: off or require, on every path")
	o.registerAuth(f, "prove both ends' identities on paths without TLS, with the files of TLS: off, allow (where the server does) or require; nothing is encrypted")
	f.StringVar(&o.TLSName, "tls-name", "", "what servers must prove to be: a DNS name, an IP address or a SPIFFE ID (default the address of the path)")
	f.StringVar(&o.Resolver, "resolver", "", "unix:PATH, the control socket of rnbd-net: paths to addresses of its bonds go by the active slave (default none)")
	f.StringArrayVar(&o.FrontendPlugin, "frontend-plugin", nil, "front-end plugin NAME=PATH[,sha256=HEX], repeatable, beside ublk and nbd of the plugin folder; NAME=none leaves one of these out")
	f.StringArrayVar(&o.FrontendConfig, "frontend-config", nil, "NAME:KEY=VALUE: setting of a front-end plugin, repeatable")
	f.StringVar(&o.Frontend, "frontend", def.Frontend, "front end of mappings that name none: auto, ublk, nbd, fuse-loop, nbd-socket, fuse, or a plugin's name")
	f.StringArrayVar(&o.NBDListen, "nbd-listen", nil, "unix:PATH or tcp:ADDRESS:PORT of the NBD front end, repeatable; an address beyond loopback needs --nbd-tls require, or \""+trusted+"\" behind the port (default nbd.sock beside the control socket)")
	o.nbdOptions.register(f)
	f.StringVar(&o.FuseDir, "fuse-dir", "", "folder in which the front ends fuse and fuse-loop show devices as files; empty: there are none")
	f.StringVar(&o.DeviceLinks, "device-links", defaultLinkDir(), "folder of links SESSION/PATH to the device nodes; empty: none")
	f.IntVar(&o.Slots, "slots", def.Slots, "requests in flight per device")
	f.StringVar(&o.Policy, "policy", def.Policy.String(), "choice of the path: min-inflight, round-robin or min-latency")
	f.StringVar(&o.Loss, "loss", "fail", "what requests do while no path is left: fail, queue:DURATION or queue:forever")
	return c, o
}

// load reads the configuration files. The mappings and the rules of all files
// count; of any other key the last file.
func (o *clientOptions) load(cmd *cobra.Command) error { return o.loadSparing(cmd, nil) }

func (o *clientOptions) loadSparing(cmd *cobra.Command, spare spareFile) error {
	err := o.collect(func(eachFile func()) error { return o.daemonOptions.load(cmd, "client", o, eachFile, spare) })
	if err != nil {
		return usageError{fmt.Errorf("configuration: %w", err)}
	}
	return nil
}

// collect gathers the lists of the files that read reads, and checks them.
// NBDAccess is nil if no file has the key.
func (o *clientOptions) collect(read func(eachFile func()) error) error {
	var all []mappings.Mapping
	var rules []plugin.UserRule
	err := read(func() {
		if rules == nil && o.NBDAccess != nil {
			rules = []plugin.UserRule{}
		}
		rules, o.NBDAccess = append(rules, o.NBDAccess...), nil
		all, o.Mappings = append(all, o.Mappings...), nil
	})
	o.Mappings, o.NBDAccess = all, rules
	if err == nil {
		err = mappings.CheckAll(all)
	}
	if err == nil {
		_, err = plugin.ParseRules(rules)
	}
	return err
}

func runClient(cmd *cobra.Command, o *clientOptions, hangups <-chan os.Signal, pre *handover.Predecessor) error {
	run, err := o.begin(cmd, "client", hangups, pre)
	if err != nil {
		return err
	}
	defer run.end()
	cfg, err := o.config(run.socket)
	if err != nil {
		return err
	}
	cfg.Logs, cfg.Journal = run.logs, run.journal
	if err := o.takeKeys(run, &cfg); err != nil {
		return err
	}
	fabrics := fabricConfig{MPACRC: o.MPACRC, Timing: cfg.Timing, Logs: run.logs}
	if cfg.Protect {
		fabrics.TLS = run.tls
	}
	if r, err := newRoutes(o.Resolver, run.logs.Logger("client")); err != nil {
		return err
	} else if r != nil {
		cfg.Resolver = r
	}
	if cfg.Fabrics, err = openFabrics(fabrics); err != nil {
		return err
	}
	cfg.Reopen = reopening(fabrics, cfg.Fabrics)
	cfg.HoldUsers = len(o.Mappings) > 0
	cfg.ReservedNames = o.deviceNames()
	nbdTLS, err := o.nbdOptions.open(run.logs.Logger("tls"))
	if err != nil {
		return err
	}
	rules := &nbdRules{}
	o.protectNBD(&cfg, nbdTLS, rules)
	inheritUsers(&cfg, pre, o)
	takeSockets(&cfg, run.manager.Sockets(socketNBD), run.manager.Sockets(socketNBDTrusted), len(o.NBDListen) > 0)
	var conf *running[*clientOptions]
	if err := run.protect(func() protection { return conf.protection(o.protection) }); err != nil {
		return err
	}
	if err := run.listen(); err != nil {
		return err
	}
	if cfg.Confine.Groups, err = o.groups(run.log); err != nil {
		return err
	}
	if o.Audit != "" {
		auditNBD(&cfg, run)
	}
	c, err := client.New(cmd.Context(), cfg)
	if err != nil {
		return explainListen(fmt.Errorf("client: %w", err))
	}
	kept, err := o.takeOver(run, c)
	if err != nil {
		return err
	}
	daemon := &clientDaemon{ClientDaemonServer: c.Control(versionString()), client: c, upgrading: run.upgrading, rules: rules}
	conf = &daemon.conf
	daemon.conf = running[*clientOptions]{kind: "client", cmd: cmd, logs: run.logs, options: o, keys: readKeyFiles(o), fresh: clientRun, tls: run.tls, nbdTLS: nbdTLS, metrics: run.metrics, refuse: refuseNoNBDRules}
	daemon.conf.setProblems(o.broken.problems)
	daemon.keeper = mappings.NewKeeper(mapper{c, daemon, cfg.Loss}, run.log)
	if err := daemon.keeper.Inherit(kept); err != nil { // it maps them as at a start
		run.log.Warn("mappings of the configuration are looked at anew", "err", err)
	}
	view, api := control.ViewClient(daemon), run.newAPI()
	controlpb.RegisterClientDaemonServer(api, daemon)
	return run.serve(api, services{
		metrics: metrics.Client(view), status: status.Client(view), tree: c.Tree(), reloader: daemon, problems: o.broken.problems,
		ready: func(ctx context.Context) {
			daemon.keeper.Want(ctx, o.Mappings, false)
			go serveUsers(ctx, daemon.keeper, c)
		},
		alive: c.Alive,
		close: func(ctx context.Context) error {
			daemon.keeper.Close()
			if run.manager.HostStops(ctx) {
				run.log.Info("the host goes down: disks in use are taken away")
				c.LeaveNothing()
			}
			return c.Close(ctx)
		},
	})
}

// takeKeys reads the files for TLS and for challenges.
func (o *clientOptions) takeKeys(run *daemonRun, cfg *client.Config) (err error) {
	if o.TLS != tlsOff && o.TLS != tlsRequire {
		return usageError{fmt.Errorf("--tls %q: use %s or %s", o.TLS, tlsOff, tlsRequire)}
	}
	if cfg.AuthMode, err = authMode("--auth", o.Auth); err != nil {
		return err
	}
	challenges := cfg.AuthMode != rtrs.AuthOff
	if run.tls, err = o.tlsOptions.open(o.TLSName, challenges, false, run.logs.Logger("tls")); err != nil {
		return err
	}
	if challenges {
		cfg.Auth = run.tls
	}
	cfg.Protect = o.TLS == tlsRequire
	return nil
}

// usersWait bounds the time for which users of NBD sockets wait for mappings
// that the configuration wants.
const usersWait = 10 * time.Second

// usersServer is the part of a client that serveUsers needs.
type usersServer interface{ ServeUsers(ctx context.Context) }

// serveUsers lets NBD clients in when the wanted mappings have been tried: one
// that comes at once after a restart finds its device. A daemon that ends before
// lets no NBD client in: its devices are missing, and users wait for the next daemon.
func serveUsers(ctx context.Context, k *mappings.Keeper, c usersServer) {
	wait, cancel := context.WithTimeout(ctx, usersWait)
	defer cancel()
	if err := k.AwaitTried(wait); errors.Is(err, context.Canceled) {
		return
	}
	c.ServeUsers(context.WithoutCancel(ctx))
}

// rootLinkDir is where the links to devices of root's daemon are.
const rootLinkDir = "/dev/rnbd"

// defaultLinkDir is where other links to devices are; only root can write there.
func defaultLinkDir() string {
	if os.Geteuid() != 0 {
		return ""
	}
	return rootLinkDir
}

// config turns options into the library's configuration.
func (o *clientOptions) config(socket string) (client.Config, error) {
	cfg := client.DefaultConfig()
	cfg.DefaultFabric, cfg.PreferredFabric = defaultFabric, preferredFabric
	cfg.Pumps, cfg.Spin, cfg.Slots, cfg.Frontend = o.Pumps, o.spin(), o.Slots, o.Frontend
	cfg.HungAfter, cfg.PluginPatience = o.HungAfter, pluginPatience
	cfg.SocketDir = socketFolder(socket)
	cfg.LoopTool = loopdev.Tool{"/proc/self/exe", loopdev.Argument}
	cfg.LinkDir, cfg.StateFile = o.DeviceLinks, strings.TrimSuffix(socket, ".sock")+".devices"
	if o.KernelTiming {
		cfg.Timing = rtrs.KernelTiming()
	}
	var err error
	if cfg.Confine, err = o.confinement(); err != nil {
		return cfg, err
	}
	if cfg.Policy, err = rtrs.ParsePolicy(o.Policy); err != nil {
		return cfg, usageError{err}
	}
	if cfg.Loss, err = client.ParseLoss(o.Loss); err != nil {
		return cfg, usageError{err}
	}
	if cfg.Hostname, err = os.Hostname(); err != nil {
		return cfg, err
	}
	names := []string{"ublk", "nbd"}
	if o.FuseDir != "" {
		names = append(names, "fuse")
	}
	files, err := findPlugins(o.FrontendPlugin, o.PluginDir, "frontend-", names...)
	if err != nil {
		return cfg, err
	}
	if err := giveSettings(files, o.FrontendConfig); err != nil {
		return cfg, err
	}
	for _, p := range files {
		fe := client.FrontendConfig{Name: p.name, Path: p.path, SHA256: p.sha256, Configure: p.settings}
		if p.name == "nbd" {
			fe.Listen = o.NBDListen
			if len(fe.Listen) == 0 {
				fe.Listen = []string{"unix:" + filepath.Join(filepath.Dir(socket), "nbd.sock")}
			}
		}
		if p.name == "fuse" {
			fe.MountDir = o.FuseDir
		}
		cfg.Frontends = append(cfg.Frontends, fe)
	}
	return cfg, nil
}
