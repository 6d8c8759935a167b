package main

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func newServer() *cobra.Command {
	c := group("server", "Export devices and look after them",
		newServerRun(), newServerDevice(), newServerSession(), newServerInfo())
	socketFlag(c, "server")
	return c
}

func newServerInfo() *cobra.Command {
	return &cobra.Command{
		Use: "show", Short: "Show the daemon, its listeners and plugins", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withServer(cmd, func(ctx context.Context, c controlpb.ServerDaemonClient) error {
				info, err := c.Info(ctx, &controlpb.InfoRequest{})
				if err != nil {
					return err
				}
				return showInfo(cmd, info)
			})
		},
	}
}

func newServerDevice() *cobra.Command {
	list := &cobra.Command{
		Use: "list", Short: "List the devices that sessions have open", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withServer(cmd, func(ctx context.Context, c controlpb.ServerDaemonClient) error {
				l, err := c.ListDevices(ctx, &controlpb.ListRequest{})
				if err != nil {
					return err
				}
				return show(cmd, l, func(w io.Writer) {
					row(w, "NAME", "PATH", "SIZE", "IO MODE", "STATE", "SESSION", "ID", "ACCESS")
					for _, d := range l.Devices {
						for _, u := range d.Users {
							row(w, d.Name, d.Path, size(d.Limits.Size), d.IoMode, d.State, u.Session, u.DeviceId, u.AccessMode)
						}
					}
				})
			})
		},
	}
	closeCmd := &cobra.Command{
		Use: "close SESSION ID", Short: "Close a session's device by force", Args: args(cobra.ExactArgs(2)),
		Example: "  rnbd server device close host1@10-0-0-1:1234 0",
		RunE: func(cmd *cobra.Command, a []string) error {
			id, err := parseID(a[1])
			if err != nil {
				return err
			}
			return withServer(cmd, func(ctx context.Context, c controlpb.ServerDaemonClient) error {
				_, err := c.CloseDevice(ctx, &controlpb.CloseDeviceRequest{Session: a[0], DeviceId: id})
				return err
			})
		},
	}
	return group("device", "Exported devices", list, closeCmd)
}

func newServerSession() *cobra.Command {
	list := &cobra.Command{
		Use: "list", Short: "List the sessions of clients", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withServer(cmd, func(ctx context.Context, c controlpb.ServerDaemonClient) error {
				l, err := c.ListSessions(ctx, &controlpb.ListRequest{})
				if err != nil {
					return err
				}
				return showSessions(cmd, l)
			})
		},
	}
	disconnect := &cobra.Command{
		Use: "disconnect SESSION", Short: "Disconnect all paths of a session", Args: args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			return withServer(cmd, func(ctx context.Context, c controlpb.ServerDaemonClient) error {
				_, err := c.DisconnectSession(ctx, &controlpb.SessionRequest{Session: a[0]})
				return err
			})
		},
	}
	return group("session", "Sessions of clients", list, disconnect)
}

var errNumber = errors.New("is not a number")
