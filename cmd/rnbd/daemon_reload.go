package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"reflect"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/mappings"
	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

// Actions of a change of the configuration; those of mappings are in package
// mappings.
const (
	actionSet     = "set"
	actionRestart = "restart"
)

// clientDaemon is the client's control API with what the program adds: its
// configuration.
type clientDaemon struct {
	controlpb.ClientDaemonServer
	cmd     *cobra.Command
	logs    *logs.Logs
	keeper  *mappings.Keeper
	mu      sync.Mutex
	options *clientOptions // as they are in force; guarded by mu
}

func (d *clientDaemon) Info(ctx context.Context, r *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	info, err := d.ClientDaemonServer.Info(ctx, r)
	if err == nil {
		info.ConfigDir = d.options.configDir(d.cmd, "client")
	}
	return info, err
}

// Reload reads the configuration again. A configuration with an error changes
// nothing.
func (d *clientDaemon) Reload(ctx context.Context, r *controlpb.ReloadRequest) (*controlpb.ReloadReply, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, fresh := clientRun()
	if err := sameFlags(d.cmd, c); err != nil {
		return nil, err
	}
	fresh.ConfigDir = d.options.ConfigDir
	if err := fresh.loadAgain(d.cmd, c); err != nil {
		return nil, fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	reply := &controlpb.ReloadReply{Changes: changedOptions(d.options, fresh)}
	if err := applyLevel(d.logs, &d.options.daemonOptions, &fresh.daemonOptions, r.DryRun); err != nil {
		return nil, err
	}
	for _, m := range d.keeper.Want(ctx, fresh.Mappings, r.DryRun) {
		reply.Changes = append(reply.Changes, mappingChange(m))
	}
	return reply, nil
}

func mappingChange(c mappings.Change) *controlpb.ConfigChange {
	out := &controlpb.ConfigChange{Subject: c.Name, Action: c.Action, Detail: c.Mapping.String()}
	if c.Err != nil {
		out.Error = c.Err.Error()
	}
	return out
}

// loadAgain is load with the folder of the daemon that runs as running.
func (o *clientOptions) loadAgain(running, cmd *cobra.Command) error {
	o.ConfigDir = orNone(o.configDir(running, "client"))
	return o.load(cmd)
}

func orNone(dir string) string {
	if dir == "" {
		return configNone
	}
	return dir
}

// serverDaemon is the server's control API with its configuration.
type serverDaemon struct {
	controlpb.ServerDaemonServer
	cmd     *cobra.Command
	logs    *logs.Logs
	mu      sync.Mutex
	options *serverOptions // as they are in force; guarded by mu
}

func (d *serverDaemon) Info(ctx context.Context, r *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	info, err := d.ServerDaemonServer.Info(ctx, r)
	if err == nil {
		info.ConfigDir = d.options.configDir(d.cmd, "server")
	}
	return info, err
}

// Reload reads the configuration again. A configuration with an error changes
// nothing.
func (d *serverDaemon) Reload(_ context.Context, r *controlpb.ReloadRequest) (*controlpb.ReloadReply, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, fresh := serverRun()
	if err := sameFlags(d.cmd, c); err != nil {
		return nil, err
	}
	fresh.ConfigDir = orNone(d.options.configDir(d.cmd, "server"))
	if err := fresh.load(c); err != nil {
		return nil, fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	reply := &controlpb.ReloadReply{Changes: changedOptions(d.options, fresh)}
	return reply, applyLevel(d.logs, &d.options.daemonOptions, &fresh.daemonOptions, r.DryRun)
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

// changedOptions lists the keys whose values differ. Both are pointers to the
// same type of options.
func changedOptions(now, next any) (changes []*controlpb.ConfigChange) {
	eachKey(reflect.ValueOf(now).Elem(), reflect.ValueOf(next).Elem(), func(key string, a, b any) {
		if key == keyMappings || reflect.DeepEqual(a, b) || fmt.Sprint(a) == fmt.Sprint(b) {
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
	keyMappings = "mappings"
	keyLogLevel = "log-level"
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

// hangups delivers SIGHUP, which does not end the process any more.
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

// reloader is what both daemons' control APIs are.
type reloader interface {
	Reload(context.Context, *controlpb.ReloadRequest) (*controlpb.ReloadReply, error)
}

// reloadNow has d read its configuration again, and logs what comes of it.
func reloadNow(ctx context.Context, d reloader, log *slog.Logger) {
	reply, err := d.Reload(ctx, &controlpb.ReloadRequest{})
	if err != nil {
		log.Error("the configuration is not reloaded, the old one holds", "err", err)
		return
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
}
