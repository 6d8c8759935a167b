package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// upgraded is the result of an upgrade.
type upgraded struct {
	daemon string
	*controlpb.UpgradeReply
}

var upgradeFields = []report.Field[upgraded]{
	report.F("daemon", "Daemon", "client or server", func(u upgraded) any { return u.daemon }),
	report.F("pid", "PID", "of the new process", func(u upgraded) any { return int64(u.Pid) }),
	report.F("version", "Version", "of the new process", func(u upgraded) any { return u.Version }),
	report.F("devices", "Devices", "whose users waited", func(u upgraded) any { return report.Count(u.Devices) }),
	report.F("pause", "Pause", "from the news to the clients until the new process served, in milliseconds", func(u upgraded) any { return u.pause().Milliseconds() }),
	report.F("closed", "Closed", "connections of NBD clients that could not be handed over", func(u upgraded) any { return report.Count(u.Closed) }),
}

func (u upgraded) pause() time.Duration { return time.Duration(u.PauseUs) * time.Microsecond }

const (
	flagBinary = "binary"
	flagReady  = "ready-within"
)

func upgradeVerb() *verb {
	return &verb{
		name: "upgrade", on: onBoth, words: outputWords, run: upgrade,
		interrupted: "the upgrade goes on; `rnbd client show` or `rnbd server show` tells the process that serves",
		short:       "Start a new binary that goes on in the daemon's place",
		long: `Start another process of the daemon, which goes on in its place: with the same
command line, the configuration as it is now, and the program that is installed by
now, or that of --binary. No request fails, whatever --loss is: clients of a server
hold theirs back meanwhile, those of a Linux kernel see a lost path; the users of a
client's devices wait, with their connections, except NBD clients with TLS, which
have to connect again. If the new process does not get to serve, the old one goes
on.`,
		example: "  rnbd server upgrade\n  rnbd client upgrade --binary /opt/rnbd-0.2/rnbd",
		flags: func(f *pflag.FlagSet) {
			f.String(flagBinary, "", "path of the new program (default the one that the daemon was started from)")
			f.Duration(flagReady, readyTime, "time for the new process to get ready, while the old one serves")
		},
	}
}

func upgrade(c *call) error {
	binary := c.text(flagBinary)
	if binary != "" {
		var err error
		if binary, err = filepath.Abs(binary); err != nil {
			return usageError{fmt.Errorf("--%s: %w", flagBinary, err)}
		}
	}
	ready, err := c.cmd.Flags().GetDuration(flagReady)
	if err != nil || ready <= 0 {
		return usageError{fmt.Errorf("--%s %s: write how long it may take, as 60s", flagReady, c.text(flagReady))}
	}
	return c.with(func(ctx context.Context, d *daemons) error {
		u, err := upgradeOne(ctx, d, &controlpb.UpgradeRequest{Binary: binary, ReadyUs: ready.Microseconds()})
		if err != nil {
			return err
		}
		if c.Machine() {
			return report.List(c.cmd.OutOrStdout(), c.Options, report.Build("upgrades", "upgrade", upgradeFields, []upgraded{u}))
		}
		if err := c.tell("%s is process %d now, version %s; requests of %d devices waited for %s", u.daemon, u.Pid, u.Version, u.Devices, u.pause().Round(time.Millisecond)); err != nil || u.Closed == 0 {
			return err
		}
		return c.tell("%d connections of NBD clients were closed: they have TLS, or their front end cannot hand them over", u.Closed)
	})
}

// upgradeOne upgrades the one daemon that is meant.
func upgradeOne(ctx context.Context, d *daemons, r *controlpb.UpgradeRequest) (u upgraded, err error) {
	switch {
	case d.both():
		return u, usageError{errors.New("both daemons run here; say `rnbd client upgrade` or `rnbd server upgrade`")}
	case d.client != nil:
		u.daemon = "client"
		u.UpgradeReply, err = d.client.Upgrade(ctx, r)
	default:
		u.daemon = "server"
		u.UpgradeReply, err = d.server.Upgrade(ctx, r)
	}
	return u, err
}
