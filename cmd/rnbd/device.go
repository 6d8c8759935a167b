package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func newClientDevice() *cobra.Command {
	return group("device", "Mapped devices",
		newDeviceMap(), newDeviceUnmap(), newDeviceRemap(), newDeviceList(), newDeviceShow())
}

func newDeviceMap() *cobra.Command {
	var r controlpb.MapRequest
	c := &cobra.Command{
		Use:   "map PATH from [SRC@]ADDRESS[:PORT][%FABRIC]...",
		Short: "Map a device of a server",
		Long: `Map opens PATH on the server and makes it a device here.

Each address is one path to the same server; requests are spread over all of
them, and go on as long as one is left. With --session alone an open session
is used again.`,
		Example: `  rnbd client device map disk.img from 192.0.2.1
  rnbd client device map vg0/lv1 from 10.0.0.2@10.0.0.1 10.1.0.2@10.1.0.1 --loss queue:30s`,
		Args: args(checkMapArgs),
		RunE: func(cmd *cobra.Command, a []string) error {
			r.Path = a[0]
			if len(a) > 2 {
				r.Paths = a[2:]
			}
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				d, err := c.Map(ctx, &r)
				if err != nil {
					return err
				}
				return show(cmd, d, func(w io.Writer) { deviceRows(w, d) })
			})
		},
	}
	f := c.Flags()
	f.StringVar(&r.Session, "session", "", "name of the session (default made from host and address)")
	f.StringVar(&r.AccessMode, "access", "rw", "ro, rw or migration")
	f.StringVar(&r.Frontend, "frontend", "", "front end that serves it (default the first)")
	f.StringVar(&r.Loss, "loss", "", "fail, or queue:DURATION (default the daemon's)")
	f.StringVar(&r.Name, "name", "", "name of the device here (default rnbdN)")
	f.StringToStringVar(&r.Options, "option", nil, "KEY=VALUE for the front end, repeatable")
	return c
}

func checkMapArgs(cmd *cobra.Command, a []string) error {
	session, err := cmd.Flags().GetString("session")
	if err != nil {
		return err
	}
	switch {
	case len(a) == 1 && session != "":
		return nil
	case len(a) >= 3 && a[1] == "from":
		return nil
	}
	return fmt.Errorf("write: map PATH from ADDRESS, or: map PATH --session NAME")
}

func newDeviceUnmap() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "unmap DEVICE", Short: "Take a device away", Args: args(cobra.ExactArgs(1)),
		Long: "Unmap refuses with exit code 5 while a user has the device open, unless forced.",
		RunE: func(cmd *cobra.Command, a []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				_, err := c.Unmap(ctx, &controlpb.UnmapRequest{Device: a[0], Force: force})
				return err
			})
		},
	}
	c.Flags().BoolVar(&force, "force", false, "disconnect users; their requests fail")
	return c
}

func newDeviceRemap() *cobra.Command {
	return &cobra.Command{
		Use: "remap DEVICE", Short: "Open a closed device again", Args: args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				d, err := c.Remap(ctx, &controlpb.DeviceRequest{Device: a[0]})
				if err != nil {
					return err
				}
				return show(cmd, d, func(w io.Writer) { deviceRows(w, d) })
			})
		},
	}
}

func newDeviceList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List mapped devices", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				l, err := c.ListDevices(ctx, &controlpb.ListRequest{})
				if err != nil {
					return err
				}
				return show(cmd, l, func(w io.Writer) {
					row(w, "DEVICE", "PATH", "SESSION", "SIZE", "ACCESS", "STATE", "ENDPOINT")
					for _, d := range l.Devices {
						row(w, d.Name, d.Path, d.Session, size(d.Limits.Size), d.AccessMode, d.State, d.Endpoint)
					}
				})
			})
		},
	}
}

func newDeviceShow() *cobra.Command {
	return &cobra.Command{
		Use: "show DEVICE", Short: "Show all about a device", Args: args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			return withClient(cmd, func(ctx context.Context, c controlpb.ClientDaemonClient) error {
				l, err := c.ListDevices(ctx, &controlpb.ListRequest{})
				if err != nil {
					return err
				}
				for _, d := range l.Devices {
					if d.Name == a[0] || d.Path == a[0] {
						return show(cmd, d, func(w io.Writer) { deviceRows(w, d) })
					}
				}
				return notFound("device", a[0])
			})
		},
	}
}

func deviceRows(w io.Writer, d *controlpb.ClientDevice) {
	l := d.Limits
	row(w, "device", d.Name)
	row(w, "endpoint", d.Endpoint)
	row(w, "path on the server", d.Path)
	row(w, "session", d.Session)
	row(w, "state", d.State)
	row(w, "access", d.AccessMode)
	row(w, "on loss of all paths", d.Loss)
	row(w, "size", fmt.Sprintf("%d (%s)", l.Size, size(l.Size)))
	row(w, "block size", fmt.Sprintf("%d logical, %d physical", l.LogicalBlockSize, l.PhysicalBlockSize))
	row(w, "largest request", size(uint64(l.MaxIoSize)))
	row(w, "write cache", fmt.Sprintf("%t, FUA %t", l.WriteCache, l.Fua))
	row(w, "discard", size(l.MaxDiscard))
	row(w, "write zeroes", size(l.MaxWriteZeroes))
	row(w, "front end", d.Frontend)
	row(w, "users", d.Openers)
	row(w, "sectors read, written", fmt.Sprintf("%d, %d", d.RxSectors, d.TxSectors))
	row(w, "in flight", d.Inflight)
	row(w, "last error", d.LastError)
}
