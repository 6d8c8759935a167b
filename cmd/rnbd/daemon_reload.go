package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"reflect"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/mappings"
	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-server"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// Actions of a change of the configuration; those of mappings are in package
// mappings.
const (
	actionSet     = "set"
	actionRestart = "restart"
)

// daemonConfig is implemented by the options of both daemons.
type daemonConfig interface {
	load(cmd *cobra.Command) error
	common() *daemonOptions
}

func (o *daemonOptions) common() *daemonOptions { return o }

// running is the configuration of a daemon that runs.
type running[O daemonConfig] struct {
	kind    string
	cmd     *cobra.Command
	logs    *logs.Logs
	tls     *tlsauth.Auth // nil: none
	nbdTLS  *tlsauth.Auth // of NBD clients; nil: none
	metrics *metricsPage
	fresh   func() (*cobra.Command, O) // the daemon's command with its defaults
	refuse  func(now, next O) error    // of a reload; nil: refuses nothing
	mu      sync.Mutex
	options O        // as they are in force; guarded by mu
	keys    keyFiles // as at the start, or at the last reload; guarded by mu

	problems atomic.Pointer[[]string] // see DaemonInfo
}

func (r *running[O]) setProblems(p []string) { r.problems.Store(&p) }

// protection calls of, a method of the options, while no reload changes these. A nil
// running has no reloads yet.
func (r *running[O]) protection(of func() protection) protection {
	if r == nil {
		return of()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return of()
}

// describe adds folder and problems of the configuration to info.
func (r *running[O]) describe(info *controlpb.DaemonInfo) {
	info.ConfigDir = r.dir()
	if p := r.problems.Load(); p != nil {
		info.ConfigProblems = *p
	}
	c := control.Conditions{List: info.Conditions}
	for _, p := range info.ConfigProblems {
		c.Add(control.ConfigProblem, "", p)
	}
	info.Conditions = c.List
}

// dir is the folder of the configuration files.
func (r *running[O]) dir() string { return r.options.common().configDir(r.cmd, r.kind) }

// reload reads the configuration again and takes over the values that a running
// daemon can change. more does the same for the keys that only one kind of
// daemon has. A configuration with an error changes nothing. A dry run changes
// nothing either.
func (r *running[O]) reload(dry bool, more func(next O) []*controlpb.ConfigChange) (*controlpb.ReloadReply, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	reply, err := r.takeOver(dry, more)
	switch {
	case dry:
	case err != nil:
		r.setProblems([]string{oneLine(err)})
	default:
		r.setProblems(nil)
	}
	return reply, err
}

// takeOver is reload. The caller holds mu.
func (r *running[O]) takeOver(dry bool, more func(next O) []*controlpb.ConfigChange) (*controlpb.ReloadReply, error) {
	next, err := r.readAgain()
	if err != nil {
		return nil, err
	}
	if _, err := next.common().metricsOptions.address(); err != nil {
		return nil, fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	if r.refuse != nil {
		if err := r.refuse(r.options, next); err != nil {
			return nil, fmt.Errorf("%w: %w", err, syscall.EINVAL)
		}
	}
	keys := readKeyFiles(r.options)
	if err := reloadTLS(r.tls, dry); err != nil {
		return nil, err
	}
	if err := reloadTLS(r.nbdTLS, dry); err != nil {
		return nil, err
	}
	if err := r.metrics.reload(dry); err != nil {
		return nil, err
	}
	reply := &controlpb.ReloadReply{Changes: append(changedOptions(r.options, next), r.keys.changes(keys)...)}
	if err := applyLevel(r.logs, r.options.common(), next.common(), dry); err != nil {
		return nil, err
	}
	reply.Changes = append(reply.Changes, more(next)...)
	if !dry {
		r.keys = keys
	}
	return reply, nil
}

// readAgain returns the options that the daemon would have if it were started
// now with the same command line.
func (r *running[O]) readAgain() (O, error) {
	c, next := r.fresh()
	if err := sameFlags(r.cmd, c); err != nil {
		return next, err
	}
	next.common().ConfigDir = orNone(r.dir())
	if err := next.load(c); err != nil {
		return next, fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	return next, nil
}

// clientDaemon is the client's control API with the program's own part: its
// configuration.
type clientDaemon struct {
	controlpb.ClientDaemonServer
	conf      running[*clientOptions]
	keeper    *mappings.Keeper
	client    *client.Client
	upgrading *upgrading
	rules     *nbdRules
}

// refuseNoNBDRules is refuseNoRules for NBD clients.
func refuseNoNBDRules(now, next *clientOptions) error {
	switch {
	case len(now.NBDAccess) > 0 && next.NBDAccess == nil:
		return fmt.Errorf("nbd-access: no file has rules any more, and there were %d; write nbd-access: [] if every NBD client may open every device", len(now.NBDAccess))
	case len(next.NBDAccess) > 0 && now.NBDTLS == tlsOff:
		return fmt.Errorf("nbd-access has rules, and without TLS NBD clients prove no identity: say --nbd-tls %s, and start the daemon again", tlsRequire)
	}
	return nil
}

// reloadRules takes over the rules of NBD clients. RenewTLS must follow.
func (d *clientDaemon) reloadRules(next *clientOptions, dry bool) []*controlpb.ConfigChange {
	now := d.conf.options
	if len(now.NBDAccess)+len(next.NBDAccess) == 0 || reflect.DeepEqual(now.NBDAccess, next.NBDAccess) {
		return nil
	}
	change := &controlpb.ConfigChange{Subject: keyNBDAccess, Action: actionSet, Detail: rulesText(len(now.NBDAccess)) + " -> " + rulesText(len(next.NBDAccess))}
	if !dry {
		now.NBDAccess = next.NBDAccess
		d.rules.set(next.NBDAccess)
	}
	return []*controlpb.ConfigChange{change}
}

func (d *clientDaemon) Info(ctx context.Context, r *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	info, err := d.ClientDaemonServer.Info(ctx, r)
	if err == nil {
		d.conf.describe(info)
	}
	return info, err
}

func (d *clientDaemon) Reload(ctx context.Context, r *controlpb.ReloadRequest) (*controlpb.ReloadReply, error) {
	return d.conf.reload(r.DryRun, func(next *clientOptions) (changes []*controlpb.ConfigChange) {
		reserve := func() {
			if !r.DryRun {
				d.client.Reserve(next.deviceNames())
			}
		}
		reserve()
		for _, m := range d.keeper.Want(ctx, next.Mappings, r.DryRun) {
			changes = append(changes, mappingChange(m))
		}
		reserve() // also what was unmapped to be mapped in another way
		changes = append(changes, d.reloadRules(next, r.DryRun)...)
		if r.DryRun {
			return changes
		}
		if err := d.client.RenewTLS(ctx); err != nil {
			changes = append(changes, &controlpb.ConfigChange{Subject: keyNBDTLS, Action: actionSet, Error: err.Error()})
		}
		return changes
	})
}

// serverDaemon is the server's control API with its configuration.
type serverDaemon struct {
	controlpb.ServerDaemonServer
	server    *server.Server
	conf      running[*serverOptions]
	upgrading *upgrading
	serving   *serving
}

func (d *serverDaemon) Info(ctx context.Context, r *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	info, err := d.ServerDaemonServer.Info(ctx, r)
	if err == nil {
		d.conf.describe(info)
	}
	return info, err
}

func (d *serverDaemon) Reload(_ context.Context, r *controlpb.ReloadRequest) (*controlpb.ReloadReply, error) {
	return d.conf.reload(r.DryRun, func(next *serverOptions) []*controlpb.ConfigChange { return d.reloadAccess(next, r.DryRun) })
}

// refuseNoRules refuses a configuration in which all rules are missing, as after a
// file was lost or only half written: the server would be open to everybody. An
// empty list is taken.
func refuseNoRules(now, next *serverOptions) error {
	if len(now.Access) > 0 && next.Access == nil {
		return fmt.Errorf("access: no file has rules any more, and there were %d; write access: [] if every client may open every device", len(now.Access))
	}
	return nil
}

// reloadAccess takes over the rules of next. They have no error: load has checked
// them.
func (d *serverDaemon) reloadAccess(next *serverOptions, dry bool) []*controlpb.ConfigChange {
	now := d.conf.options
	if len(now.Access) == len(next.Access) && reflect.DeepEqual(now.Access, next.Access) || len(now.Access)+len(next.Access) == 0 {
		return nil
	}
	change := &controlpb.ConfigChange{Subject: keyAccess, Action: actionSet, Detail: rulesText(len(now.Access)) + " -> " + rulesText(len(next.Access))}
	if dry {
		return []*controlpb.ConfigChange{change}
	}
	rules, err := access.New(next.Access)
	if err != nil {
		change.Error = err.Error()
		return []*controlpb.ConfigChange{change}
	}
	now.Access = next.Access
	d.server.SetAccess(rules, now.AccessGrace)
	return []*controlpb.ConfigChange{change}
}

// rulesText counts rules for people.
func rulesText(n int) string {
	switch n {
	case 0:
		return "no rules, everything is allowed"
	case 1:
		return "1 rule"
	}
	return fmt.Sprintf("%d rules", n)
}

func mappingChange(c mappings.Change) *controlpb.ConfigChange {
	out := &controlpb.ConfigChange{Subject: c.Name, Action: c.Action, Detail: c.Mapping.String()}
	if c.Err != nil {
		out.Error = c.Err.Error()
	}
	return out
}

func orNone(dir string) string {
	if dir == "" {
		return configNone
	}
	return dir
}

// reloadTLS reads the files of keys and certificates again.
func reloadTLS(a *tlsauth.Auth, dry bool) error {
	if a == nil || dry {
		return nil
	}
	if err := a.Reload(true); err != nil {
		return fmt.Errorf("TLS: %w: %w", err, syscall.EINVAL)
	}
	return nil
}

// sameFlags gives the command to the flags that the command from was given.
func sameFlags(from, to *cobra.Command) (err error) {
	from.Flags().Visit(func(f *pflag.Flag) {
		if t := to.Flags().Lookup(f.Name); t != nil && err == nil {
			err = flagSetter(f)(t)
			t.Changed = true
		}
	})
	return err
}

// changedOptions lists the keys with different values. Both are pointers to
// the same type of options.
func changedOptions(now, next any) (changes []*controlpb.ConfigChange) {
	eachKey(reflect.ValueOf(now).Elem(), reflect.ValueOf(next).Elem(), func(key string, a, b any) {
		if key == keyMappings || key == keyAccess || key == keyNBDAccess || reflect.DeepEqual(a, b) || fmt.Sprint(a) == fmt.Sprint(b) {
			return
		}
		c := &controlpb.ConfigChange{Subject: key, Action: actionRestart, Detail: fmt.Sprintf("%v -> %v", a, b)}
		if key == keyLogLevel {
			c.Action = actionSet
		}
		changes = append(changes, c)
	})
	return changes
}

// Keys that a running daemon takes over.
const (
	keyMappings  = "mappings"
	keyLogLevel  = "log-level"
	keyAccess    = "access"
	keyPools     = "pools" // from the next start on
	keyNBDAccess = "nbd-access"
	keyNBDTLS    = "nbd-tls" // the contents of its files
)

// eachKey calls f for every key of two structs of options of the same type.
func eachKey(a, b reflect.Value, f func(key string, a, b any)) {
	for i := range a.NumField() {
		field := a.Type().Field(i)
		switch tag := field.Tag.Get("yaml"); tag {
		case "-":
		case ",inline":
			eachKey(a.Field(i), b.Field(i), f)
		default:
			f(tag, a.Field(i).Interface(), b.Field(i).Interface())
		}
	}
}

// applyLevel takes over the log level of next, if that is another than now's.
func applyLevel(l *logs.Logs, now, next *daemonOptions, dry bool) error {
	if dry || now.LogLevel == next.LogLevel {
		return nil
	}
	level, err := logs.ParseLevel(next.LogLevel)
	if err != nil {
		return err
	}
	now.LogLevel = next.LogLevel
	return l.SetLevel(logs.All, level)
}

// mapper is the client daemon as its keeper of mappings sees it.
type mapper struct {
	c    *client.Client
	api  controlpb.ClientDaemonServer
	loss client.Loss // of mappings that name none
}

func (m mapper) Map(ctx context.Context, want mappings.Mapping) (string, error) {
	r, err := want.Request(m.loss)
	if err != nil {
		return "", err
	}
	d, err := m.c.Map(ctx, r)
	if err != nil {
		return "", err
	}
	return d.Name(), nil
}

func (m mapper) Unmap(ctx context.Context, name string) error { return m.c.Unmap(ctx, name, false) }

func (m mapper) Mapped() map[string]mappings.Mapped {
	out := map[string]mappings.Mapped{}
	if l, err := m.api.ListDevices(context.Background(), &controlpb.ListRequest{}); err == nil {
		for _, d := range l.Devices {
			out[d.Name] = mappings.Mapped{Device: d.Path, Session: d.Session, Access: d.AccessMode}
		}
	}
	return out
}

// hangups delivers SIGHUP. From then on SIGHUP does not end the process.
func hangups() <-chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP)
	return c
}

// onHangup calls f at each SIGHUP until the function that it returns is called.
func onHangup(hangups <-chan os.Signal, f func()) (stop func()) {
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			select {
			case <-hangups:
				f()
			case <-done:
				return
			}
		}
	})
	return func() { close(done); ended.Wait() }
}

// reloader is implemented by the control APIs of both daemons.
type reloader interface {
	Reload(context.Context, *controlpb.ReloadRequest) (*controlpb.ReloadReply, error)
}

// reloadNow has d read its configuration again, and logs the result.
func reloadNow(ctx context.Context, d reloader, log *slog.Logger) error {
	reply, err := d.Reload(ctx, &controlpb.ReloadRequest{})
	if err != nil {
		log.Error("the configuration is not reloaded, the old one holds", "err", err)
		return err
	}
	log.Info("the configuration is reloaded", "changes", len(reply.Changes))
	for _, c := range reply.Changes {
		switch {
		case c.Error != "":
			log.Warn("change of the configuration failed", "action", c.Action, "subject", c.Subject, "detail", c.Detail, "err", c.Error)
		case c.Action == actionRestart:
			log.Warn("change of the configuration holds from the next start on", "key", c.Subject, "change", c.Detail)
		default:
			log.Info("change of the configuration", "action", c.Action, "subject", c.Subject, "detail", c.Detail)
		}
	}
	return nil
}
