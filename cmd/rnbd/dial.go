package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// errNoDaemon is in the chain when nobody answers on the control socket.
var errNoDaemon = errors.New("no daemon")

func socketFlag(cmd *cobra.Command, kind string) {
	cmd.PersistentFlags().String("socket", control.DefaultSocket(kind), "control socket of the "+kind+" daemon")
}

func deadline(cmd *cobra.Command) (context.Context, context.CancelFunc, error) {
	limit, err := cmd.Root().PersistentFlags().GetDuration("timeout")
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), limit)
	return ctx, cancel, nil
}

// withServer runs f with a connection to the server daemon and a deadline.
func withServer(cmd *cobra.Command, f func(context.Context, controlpb.ServerDaemonClient) error) error {
	socket, err := cmd.Flags().GetString("socket")
	if err != nil {
		return err
	}
	ctx, cancel, err := deadline(cmd)
	if err != nil {
		return err
	}
	defer cancel()
	c, conn, err := control.DialServer(ctx, socket)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoDaemon, err)
	}
	defer conn.Close()
	return f(ctx, c)
}

// withClient is withServer for the client daemon.
func withClient(cmd *cobra.Command, f func(context.Context, controlpb.ClientDaemonClient) error) error {
	socket, err := cmd.Flags().GetString("socket")
	if err != nil {
		return err
	}
	ctx, cancel, err := deadline(cmd)
	if err != nil {
		return err
	}
	defer cancel()
	c, conn, err := control.DialClient(ctx, socket)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoDaemon, err)
	}
	defer conn.Close()
	return f(ctx, c)
}
