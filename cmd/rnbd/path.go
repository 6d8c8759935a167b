package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func newClientPath() *cobra.Command {
	list := &cobra.Command{
		Use: "list", Short: "List the paths of all sessions", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				l, err := c.ListSessions(ctx, &controlpb.ListRequest{})
				if err != nil {
					return err
				}
				return showPaths(cmd, l)
			})
		},
	}
	add := &cobra.Command{
		Use: "add SESSION [SRC@]ADDRESS[:PORT][%FABRIC]", Short: "Add a path to a session", Args: args(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, a []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				p, err := c.AddPath(ctx, &controlpb.AddPathRequest{Session: a[0], Path: a[1]})
				if err != nil {
					return err
				}
				return show(cmd, p, func(w io.Writer) { row(w, "path", p.Id, p.Src, p.Dst, p.State) })
			})
		},
	}
	return group("path", "Paths of sessions", list, add,
		onPath("remove", "Remove a path; requests go on over the others", controlpb.ClientDaemonClient.RemovePath),
		onPath("disconnect", "Disconnect a path until it is reconnected", controlpb.ClientDaemonClient.DisconnectPath),
		onPath("reconnect", "Connect a path again, now", controlpb.ClientDaemonClient.ReconnectPath))
}

// onPath is a command on one path by the number that list shows.
func onPath(verb, short string, call func(controlpb.ClientDaemonClient, context.Context, *controlpb.PathRequest, ...grpc.CallOption) (*controlpb.Empty, error)) *cobra.Command {
	return &cobra.Command{
		Use: verb + " SESSION ID", Short: short, Args: args(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, a []string) error {
			id, err := parseID(a[1])
			if err != nil {
				return err
			}
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				_, err := call(c, ctx, &controlpb.PathRequest{Session: a[0], Id: id})
				return err
			})
		},
	}
}
