package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// errNoDaemon is in the chain when no daemon answers on the control socket.
var errNoDaemon = errors.New("no daemon")

// socketPath is the control socket of the daemon of a kind, "client" or
// "server".
func socketPath(cmd *cobra.Command, kind string) (string, error) {
	path, err := cmd.Flags().GetString("socket")
	if err != nil {
		return "", err
	}
	if path == "" {
		path = os.Getenv("RNBD_SOCKET")
	}
	if path == "" {
		return control.DefaultSocket(kind), nil
	}
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return filepath.Join(path, kind+".sock"), nil
	}
	return path, nil
}

// deadline bounds a command by --timeout.
func deadline(cmd *cobra.Command) (context.Context, context.CancelFunc, error) {
	limit, err := cmd.Flags().GetDuration("timeout")
	if err != nil {
		return nil, nil, err
	}
	if limit <= 0 {
		return nil, nil, usageError{fmt.Errorf("--timeout %s: write how long it may take, as 30s or 2m", limit)}
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), limit)
	return ctx, cancel, nil
}

// daemons are those that a command talks to; nil: it does not run.
type daemons struct {
	client controlpb.ClientDaemonClient
	server controlpb.ServerDaemonClient
	conns  []*grpc.ClientConn
}

func (d *daemons) close() {
	for _, c := range d.conns {
		c.Close()
	}
}

// both reports whether objects of two daemons are in one list.
func (d *daemons) both() bool { return d.client != nil && d.server != nil }

// connect reaches the daemons of set: the one, or those of the two that run.
func connect(ctx context.Context, cmd *cobra.Command, set daemonSet) (*daemons, error) {
	d := &daemons{}
	remote, err := remoteServer(cmd)
	switch {
	case err != nil:
		return nil, err
	case remote != "" && set&onServer == 0:
		return nil, usageError{fmt.Errorf("%s: it is for the client daemon of this host, and --%s names a server", cmd.CommandPath(), flagServer)}
	case remote != "":
		return d, d.dialRemote(cmd, remote)
	}
	var errs []error
	for _, m := range modes {
		if set&m.set == 0 {
			continue
		}
		path, err := socketPath(cmd, m.name)
		if err != nil {
			return nil, err
		}
		if err := d.dial(ctx, m.set, path); err != nil {
			errs = append(errs, err)
		}
	}
	if len(d.conns) == 0 {
		return nil, noDaemon(cmd, errs)
	}
	if d.both() {
		return d, d.tellApart(ctx)
	}
	return d, nil
}

// noDaemon is the error of a command that reaches no daemon, where dialing gave
// errs. EACCES or EPERM in the chain: one may be there, and is not for this user.
func noDaemon(cmd *cobra.Command, errs []error) error {
	for _, err := range errs {
		if errors.Is(err, fs.ErrPermission) {
			return noDaemonError{fmt.Errorf("not permitted: %w", err)}
		}
	}
	if f := cmd.Flags().Lookup("socket"); f != nil && f.Value.String() == "" && os.Getenv("RNBD_SOCKET") == "" {
		if _, err := os.Lstat(filepath.Join(rootFolder, "client.sock")); errors.Is(err, fs.ErrPermission) {
			return noDaemonError{fmt.Errorf("not permitted: you run no daemon, and those of root are not for you: %w", err)}
		}
	}
	if len(errs) == 2 && errs[0].Error() == errs[1].Error() { // --socket names one for both
		errs = errs[:1]
	}
	return noDaemonError{errors.Join(errs...)}
}

// rootFolder has the control sockets of root's daemons.
const rootFolder = "/run/rnbd"

// noDaemonError is errNoDaemon with the reason.
type noDaemonError struct{ error }

func (e noDaemonError) Unwrap() error { return e.error }

func (e noDaemonError) Is(target error) bool { return target == errNoDaemon }

func (d *daemons) dial(ctx context.Context, set daemonSet, path string) error {
	var conn *grpc.ClientConn
	var err error
	if set == onClient {
		d.client, conn, err = control.DialClient(ctx, path)
	} else {
		d.server, conn, err = control.DialServer(ctx, path)
	}
	if err == nil {
		d.conns = append(d.conns, conn)
	}
	return err
}

// tellApart finds the kind of the daemon if one socket was named for both: a
// daemon does not implement the calls of the other kind.
func (d *daemons) tellApart(ctx context.Context) error {
	_, clientErr := d.client.Info(ctx, &controlpb.InfoRequest{})
	_, serverErr := d.server.Info(ctx, &controlpb.InfoRequest{})
	switch {
	case unimplemented(serverErr):
		d.server = nil
		return clientErr
	case unimplemented(clientErr):
		d.client = nil
		return serverErr
	}
	return errors.Join(clientErr, serverErr)
}

func unimplemented(err error) bool {
	var e *control.Error
	return errors.As(err, &e) && e.Code == codes.Unimplemented
}

// with runs f with the daemons of the command.
func (c *call) with(f func(context.Context, *daemons) error) error {
	ctx := c.cmd.Context()
	d, err := connect(ctx, c.cmd, c.set)
	if err != nil {
		return err
	}
	defer d.close()
	return f(ctx, d)
}

func notFound(kind, name, suggestion string) error {
	return fmt.Errorf("there is no %s %q%s: %w", kind, name, suggestion, syscall.ENOENT)
}
