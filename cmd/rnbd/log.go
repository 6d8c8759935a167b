package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

// logLevel is the log level of a subsystem of a daemon.
type logLevel struct{ daemon, subsystem, level string }

var logFields = []report.Field[logLevel]{
	report.F("daemon", "Daemon", "client or server", func(l logLevel) any { return l.daemon }),
	report.F("subsystem", "Subsystem", "its name", func(l logLevel) any { return l.subsystem }),
	report.F("level", "Level", "debug, info, warn or error", func(l logLevel) any { return l.level }),
}

func logVerb() *verb {
	return &verb{
		name: "log", on: onBoth, words: outputWords, max: -1, args: "[SUBSYSTEM=LEVEL]...", run: logLevels, interrupted: "`rnbd log` lists the levels that hold",
		short: "List or change what daemons log",
		long: "List what the subsystems of the daemons log, after changing those that are named. LEVEL is\n" +
			"debug, info, warn or error; the subsystem all stands for every one.",
		example: "  rnbd client log\n  rnbd server log rtrs=debug plugins=warn\n  rnbd log all=info",
	}
}

func logLevels(c *call) error {
	var set []*controlpb.LogLevel
	for _, a := range c.args {
		subsystem, level, ok := strings.Cut(a, "=")
		if !ok || subsystem == "" {
			return usageError{fmt.Errorf("%q: write SUBSYSTEM=LEVEL", a)}
		}
		if _, err := logs.ParseLevel(level); err != nil {
			return usageError{err}
		}
		set = append(set, &controlpb.LogLevel{Subsystem: subsystem, Level: level})
	}
	return c.with(func(ctx context.Context, d *daemons) error {
		var rows []logLevel
		add := func(daemon string, r *controlpb.LogLevelsReply, err error) error {
			for _, l := range r.GetLevels() {
				rows = append(rows, logLevel{daemon, l.Subsystem, l.Level})
			}
			return err
		}
		if d.client != nil {
			r, err := clientLevels(ctx, d.client, set)
			if err := add("client", r, err); err != nil {
				return err
			}
		}
		if d.server != nil {
			r, err := serverLevels(ctx, d.server, set)
			if err := add("server", r, err); err != nil {
				return err
			}
		}
		return report.List(c.cmd.OutOrStdout(), c.Options, report.Build("levels", "level", logFields, rows))
	})
}

// clientLevels changes levels and lists all of them. Callers that may only read can
// list.
func clientLevels(ctx context.Context, d controlpb.ClientDaemonClient, set []*controlpb.LogLevel) (*controlpb.LogLevelsReply, error) {
	if len(set) == 0 {
		return d.LogLevels(ctx, &controlpb.LogLevelsRequest{})
	}
	return d.SetLogLevels(ctx, &controlpb.SetLogLevelsRequest{Levels: set})
}

func serverLevels(ctx context.Context, d controlpb.ServerDaemonClient, set []*controlpb.LogLevel) (*controlpb.LogLevelsReply, error) {
	if len(set) == 0 {
		return d.LogLevels(ctx, &controlpb.LogLevelsRequest{})
	}
	return d.SetLogLevels(ctx, &controlpb.SetLogLevelsRequest{Levels: set})
}
