package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func newClient() *cobra.Command {
	c := group("client", "Map devices and look after them",
		newClientRun(), newClientDevice(), newClientSession(), newClientPath(), newClientInfo())
	socketFlag(c, "client")
	return c
}

func newClientInfo() *cobra.Command {
	return &cobra.Command{
		Use: "show", Short: "Show the daemon, its sockets and plugins", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				info, err := c.Info(ctx, &controlpb.InfoRequest{})
				if err != nil {
					return err
				}
				return showInfo(cmd, info)
			})
		},
	}
}
