package main

import (
	"context"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func notFound(kind, name string) error {
	return fmt.Errorf("there is no %s %q: %w", kind, name, syscall.ENOENT)
}

func newClientSession() *cobra.Command {
	list := &cobra.Command{
		Use: "list", Short: "List the sessions", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				l, err := c.ListSessions(ctx, &controlpb.ListRequest{})
				if err != nil {
					return err
				}
				return showSessions(cmd, l)
			})
		},
	}
	policy := &cobra.Command{
		Use: "policy SESSION POLICY", Short: "Choose how requests are spread over paths", Args: args(cobra.ExactArgs(2)),
		Example: "  rnbd client session policy s1 round-robin",
		RunE: func(cmd *cobra.Command, a []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				_, err := c.SetPolicy(ctx, &controlpb.SetPolicyRequest{Session: a[0], Policy: a[1]})
				return err
			})
		},
	}
	return group("session", "Sessions with servers", list, policy)
}

func showSessions(cmd *cobra.Command, l *controlpb.SessionList) error {
	return show(cmd, l, func(w io.Writer) {
		row(w, "SESSION", "STATE", "PATHS", "DEVICES", "DEPTH", "POLICY")
		for _, s := range l.Sessions {
			row(w, s.Name, s.State, len(s.Paths), s.Devices, s.QueueDepth, s.Policy)
		}
	})
}

func showPaths(cmd *cobra.Command, l *controlpb.SessionList) error {
	return show(cmd, l, func(w io.Writer) {
		row(w, "SESSION", "ID", "STATE", "FABRIC", "SOURCE", "DESTINATION", "RX", "TX", "INFLIGHT", "RECONNECTS", "LATENCY", "LAST ERROR")
		for _, s := range l.Sessions {
			for _, p := range s.Paths {
				row(w, s.Name, p.Id, p.State, p.Fabric, p.Src, p.Dst, size(p.RxBytes), size(p.TxBytes), p.Inflight, p.Reconnects, time.Duration(p.LatencyNs), p.LastError)
			}
		}
	})
}

func showInfo(cmd *cobra.Command, i *controlpb.DaemonInfo) error {
	return show(cmd, i, func(w io.Writer) {
		row(w, "version", i.Version)
		row(w, "pid", i.Pid)
		row(w, "pumps", i.Pumps)
		for _, l := range i.Listen {
			row(w, "listens on", l)
		}
		for _, p := range i.Plugins {
			row(w, "plugin "+p.Name, fmt.Sprintf("%s, pid %d, restarts %d, version %s, %s", p.State, p.Pid, p.Restarts, p.Version, p.Path))
		}
	})
}
