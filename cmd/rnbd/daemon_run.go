package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
	hooks "github.com/rnbd-go/rnbd/cmd/rnbd/internal/hook"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/metrics"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/service"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/status"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// daemonRun is one run of a daemon, from its options to its end.
type daemonRun struct {
	tls     *tlsauth.Auth // nil: none
	metrics *metricsPage  // nil before listen
	kind    string        // "client" or "server"
	cmd     *cobra.Command
	options *daemonOptions
	hangups <-chan os.Signal
	logs    *logs.Logs
	log     *slog.Logger   // of the daemon itself
	socket  string         // path of the control socket
	sock    net.Listener   // nil before listen
	audit   *audit.Log     // nil: nothing is recorded
	readers *control.Group // may read from the control socket; nil: none
	manager *service.Manager
	journal *journal.Journal

	pre       *handover.Predecessor // nil: no process hands over to this one
	upgrading *upgrading
	served    bool        // the control socket is this process's
	before    *protection // of the process that hands over; nil: not known
}

// begin prepares the process for a daemon of a kind, which goes on in place of pre,
// unless that is nil. end must follow.
func (o *daemonOptions) begin(cmd *cobra.Command, kind string, hangups <-chan os.Signal, pre *handover.Predecessor) (*daemonRun, error) {
	manager, err := service.Meet()
	if err != nil {
		return nil, err
	}
	l, err := o.start(kind)
	if err != nil {
		return nil, err
	}
	r := &daemonRun{kind: kind, cmd: cmd, options: o, hangups: hangups, logs: l, log: l.Logger(kind), manager: manager, journal: journal.New(journal.DefaultSize), pre: pre}
	r.upgrading = newUpgrading(r)
	r.log.Info("configuration is read", "file", strings.Join(o.filesRead, ", ")) // empty: of no file
	if r.before, err = inheritedProtection(); err != nil {
		l.Flush()
		return nil, err
	}
	if r.socket, err = socketPath(cmd, kind); err != nil {
		l.Flush()
		return nil, err
	}
	return r, nil
}

// protect refuses a hand-over to a process that protects less than the running one, has the
// next process learn of p, and compares p with the last run at another start.
func (r *daemonRun) protect(p func() protection) error {
	r.upgrading.protection = p
	if r.pre != nil {
		return refuseWeaker(r.before, p())
	}
	compareProtection(r.socket, p(), r.log)
	return nil
}

// Names of sockets that the service manager holds.
const (
	socketControl = "control"
	socketNBD     = "nbd"
	// socketNBDTrusted is like ",trusted" behind an address of --nbd-listen.
	socketNBDTrusted = "nbd-trusted"
)

// socketFolder returns the folder of a daemon's sockets, that of its control socket.
// Empty: it is not known.
func socketFolder(control string) string {
	dir, err := filepath.Abs(filepath.Dir(control))
	if err != nil {
		return ""
	}
	return dir
}

// listen makes the control socket, or takes over that of the service manager,
// opens the audit log, and reads the files of the metrics page. It fails if
// another daemon has the socket.
func (r *daemonRun) listen() (err error) {
	if r.metrics, err = r.options.openMetrics(r.log); err != nil {
		return err
	}
	if name := r.options.ControlGroup; name != "" {
		if r.readers, err = control.FindGroup(name); err != nil {
			return usageError{fmt.Errorf("--control-group: %w", err)}
		}
	}
	r.sock, err = r.inheritControl()
	switch held := r.manager.Sockets(socketControl); {
	case r.sock != nil || err != nil:
	case len(held) == 0:
		r.sock, err = control.ListenGroup(r.socket, r.readers)
	case len(held) == 1:
		r.sock, err = control.ListenFile(held[0], r.socket, r.readers)
	default:
		err = fmt.Errorf("the service manager holds %d sockets of the name %q: %w", len(held), socketControl, syscall.EINVAL)
	}
	if err != nil {
		return err
	}
	if hook := r.options.EventHook; hook != "" {
		if err := hooks.Check(hook); err != nil {
			return err
		}
	}
	if others := r.manager.Others(); len(others) > 0 {
		r.log.Warn("sockets of the service manager are not used", "listener", others)
	}
	full := audit.Full(r.options.AuditFull)
	if full != audit.Continue && full != audit.Refuse {
		return usageError{fmt.Errorf("--audit-full %q: use continue or refuse", full)}
	}
	if r.options.Audit == "" {
		return nil
	}
	r.audit, err = audit.Open(r.options.Audit, r.kind, full, r.log)
	return err
}

// end gives up the control socket and writes the last lines of the log.
func (r *daemonRun) end() {
	if r.sock != nil {
		if r.pre != nil && !r.served { // the name belongs to the process that goes on
			control.Leave(r.sock)
		}
		r.sock.Close()
	}
	if err := r.audit.Close(); err != nil {
		r.log.Error("records of the audit log are lost", "err", err)
	}
	r.logs.Flush()
}

// newAPI makes the gRPC server of the control socket.
func (r *daemonRun) newAPI() *grpc.Server {
	return control.NewServer(control.LogCalls(r.logs.Logger("control")), control.AuditCalls(r.audit), control.Authorize(r.readers))
}

// services are the rest that a daemon serves, beside its control API.
type services struct {
	metrics  *metrics.Daemon
	status   *status.Daemon
	tree     map[string]ctltree.Node
	reloader reloader                        // called at each SIGHUP
	problems []string                        // of the configuration, at the start
	ready    func(ctx context.Context)       // called when all of that is served
	alive    func(ctx context.Context) error // reports what hangs in the daemon
	close    func(ctx context.Context) error // ends the daemon
}

// serve runs the daemon until a signal ends it, and closes it.
func (r *daemonRun) serve(api *grpc.Server, s services) error {
	stopMetrics, err := r.metrics.serve(s.metrics, s.status, r.log)
	if err != nil {
		return errors.Join(err, closeWithin(s.close))
	}
	defer stopMetrics()
	unmount, err := r.options.mountTree(r.kind, r.socket, s.tree, r.log)
	if err != nil {
		return errors.Join(err, closeWithin(s.close))
	}
	ctx := r.cmd.Context()
	r.served = true
	r.log.Info(r.kind+" is ready", "socket", r.socket, "version", versionString())
	r.journal.Add(journal.Event{Kind: journal.Daemon, To: "ready", Why: versionString()})
	defer r.runHook(ctx)()
	for _, p := range s.problems {
		r.log.Error("a part of the configuration is left out", "err", p)
		r.journal.Add(journal.Event{Kind: journal.Config, To: "left out", Why: p})
	}
	s.ready(ctx)
	r.manager.Ready(r.serves(len(s.problems)))
	defer onHangup(r.hangups, func() {
		r.manager.Reloading()
		r.audit.Reopen()
		problems := 0
		if err := reloadNow(ctx, s.reloader, r.log); err != nil {
			problems = 1
			r.journal.Add(journal.Event{Kind: journal.Config, To: "refused", Why: err.Error()})
		} else {
			r.journal.Add(journal.Event{Kind: journal.Config, To: "read again", Why: "SIGHUP"})
		}
		r.manager.Ready(r.serves(problems))
	})()
	watched, unwatch := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { r.manager.Watch(watched, r.log, func(ctx context.Context) error { return r.alive(ctx, s) }) })
	return serveUntilDone(ctx, api, r.sock, r.upgrading, func(ctx context.Context) error {
		unwatch()
		watch.Wait()
		r.journal.Add(journal.Event{Kind: journal.Daemon, From: "ready", To: "stopping"})
		if !r.upgrading.isReplaced() { // the service goes on
			r.manager.Stopping(shutdownLimit)
		}
		return errors.Join(unmount(), s.close(ctx))
	})
}

// serves is the state for the service manager.
func (r *daemonRun) serves(problems int) string {
	text := "serves on " + r.socket
	if problems > 0 {
		text += "; the configuration has errors, see rnbd doctor"
	}
	return text
}

// alive reports what hangs: the daemon, or its control socket.
func (r *daemonRun) alive(ctx context.Context, s services) error {
	if err := s.alive(ctx); err != nil {
		return err
	}
	return answers(ctx, r.kind, r.socket)
}

// runHook runs the event hook, if there is one, until the function that it returns is
// called.
func (r *daemonRun) runHook(ctx context.Context) (stop func()) {
	if r.options.EventHook == "" {
		return func() {}
	}
	h := &hooks.Hook{Program: r.options.EventHook, Daemon: r.kind, Journal: r.journal, Log: r.log}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // it learns of the devices that close at the end
	var done sync.WaitGroup
	done.Go(func() { h.Run(ctx) })
	return func() { cancel(); done.Wait() }
}
