package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// generalVerbs are those without a noun: of no kind of object, or of the kind
// that their argument turns out to be.
func generalVerbs(all []*noun) []*verb {
	return []*verb{
		{
			name: "list", aliases: []string{"ls"}, on: onBoth, words: outputWords, max: -1, flags: watchFlag, args: "[NAME]...", args0: anyNames, run: listAll,
			short:   "List devices, sessions and paths",
			long:    "List devices, sessions and paths: all, or those with a name, on one of the ends or\nof their session.",
			example: "  rnbd list\n  rnbd list web1@storage\n  rnbd server list json\n  rnbd list sessions",
		},
		{
			name: "show", aliases: []string{"status"}, on: onBoth, words: outputWords | statsWord, max: 2, anyFields: anyFields(all), args: "[DEVICE|SESSION|[SESSION] PATH]", args0: anyNames, run: showAny,
			short:   "Show all about a device, session or path; alone: about the daemons",
			example: "  rnbd show rnbd0\n  rnbd client show",
		},
		topVerb(),
		eventsVerb(),
		waitVerb(),
		logVerb(),
		upgradeVerb(),
		benchVerb(),
		{
			name: "disconnect", on: onBoth, min: 1, max: 2, args: "SESSION|[SESSION] PATH", args0: sessionNames, run: disconnectAny, interrupted: partLeft,
			short:   "Disconnect a session or a path",
			example: "  rnbd disconnect web1@storage\n  rnbd disconnect web1@storage 1",
		},
		{
			name: "reconnect", on: onClient, min: 1, max: 2, args: "SESSION|[SESSION] PATH", args0: sessionNames, run: reconnectAny, interrupted: partLeft,
			short:   "Connect a session or a path anew",
			example: "  rnbd reconnect web1@storage\n  rnbd reconnect web1@storage 1",
		},
		{
			name: "recover", on: onClient, min: 1, max: 2, args: "DEVICE|SESSION|[SESSION] PATH|all [add-missing]", args0: anyNames, words: missingWord, run: recoverAny, interrupted: partLeft,
			short:   "Connect and open again what is not",
			long:    "Connect paths that are not connected and open devices that are closed: of one\ndevice, session or path, or with all of everything.",
			example: "  rnbd recover all\n  rnbd recover all add-missing\n  rnbd recover rnbd0",
		},
	}
}

// anyFields are the fields of all kinds, each name once.
func anyFields(all []*noun) (fields []report.Info) {
	seen := map[string]bool{}
	add := func(infos []report.Info) {
		for _, f := range infos {
			if !seen[f.Name] {
				fields = append(fields, f)
			}
			seen[f.Name] = true
		}
	}
	for _, n := range all {
		add(n.fields)
	}
	add(report.Infos(daemonFields))
	return fields
}

func listAll(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, true)
		if err != nil {
			return err
		}
		if err := c.keepNamed(inv); err != nil {
			return err
		}
		devices, err := table(c, deviceNoun(), deviceFields, d.both(), inv.devices)
		if err != nil {
			return err
		}
		sessions, err := table(c, sessionNoun(), sessionFields, d.both(), inv.sessions)
		if err != nil {
			return err
		}
		paths, err := table(c, pathNoun(), pathFields, d.both(), inv.paths)
		if err != nil {
			return err
		}
		a, err := c.attention(ctx, d)
		if err != nil {
			return err
		}
		if !c.Machine() && !c.NoHeaders && len(a.things())+len(inv.devices)+len(inv.sessions) == 0 {
			return c.tell("%s", nothingYet(d))
		}
		devices.Attention = a.things()
		a.noteDevices(devices, inv.devices)
		a.noteSessions(sessions, inv.sessions)
		if c.Machine() || c.NoTree {
			notePaths(paths, inv.paths)
			return report.Lists(c.cmd.OutOrStdout(), c.Options, devices, sessions, paths)
		}
		if sessions, err = sessionTable(c, sessions, inv.sessions); err != nil {
			return err
		}
		return report.Lists(c.cmd.OutOrStdout(), c.Options, devices, sessions)
	})
}

// nothingYet returns advice for an empty list.
func nothingYet(d *daemons) string {
	switch {
	case d.both():
		return "nothing is mapped or exported; map a device of a server: rnbd map DEVICE from SERVER"
	case d.client != nil:
		return "nothing is mapped; map a device of a server: rnbd map DEVICE from SERVER"
	}
	return "no client has opened a device; on a client: rnbd map DEVICE from SERVER"
}

// found is the object of a name without a noun; one of them, or two nil and
// an error.
type found struct {
	device  *device
	session *session
	path    *transportPath
}

// find looks for the arguments among the names of all kinds. An empty kind is
// "not found"; more than one is an error.
func (inv *inventory) find(args []string, devices bool) (f found, err error) {
	var errs []error
	note := func(err error) bool {
		if err != nil && !isNotFound(err) {
			errs = append(errs, err)
		}
		return err == nil
	}
	n := 0
	if len(args) == 1 {
		if d, err := inv.device(args[0], ""); devices && note(err) {
			f.device = &d
			n++
		}
		if s, err := inv.session(args[0]); note(err) {
			f.session = &s
			n++
		}
	}
	if p, err := inv.path(args); n == 0 && note(err) {
		f.path = &p
		n++
	}
	switch {
	case len(errs) > 0:
		return found{}, errors.Join(errs...)
	case n == 0:
		return found{}, notFound("device, session or path", strings.Join(args, " "), "")
	case n > 1:
		return found{}, usageError{fmt.Errorf("%q is a device and a session: say which", args[0])}
	}
	return f, nil
}

func (c *call) onAny(devices bool, f func(context.Context, *daemons, *inventory, found) error) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, devices)
		if err != nil {
			return err
		}
		what, err := inv.find(c.args, devices)
		if err != nil {
			return err
		}
		return f(ctx, d, inv, what)
	})
}

func showAny(c *call) error {
	if len(c.args) == 0 {
		return showDaemons(c)
	}
	return c.onAny(true, func(ctx context.Context, d *daemons, _ *inventory, what found) error {
		switch {
		case what.device != nil:
			return printDevice(ctx, c, d, *what.device)
		case what.session != nil:
			return printSession(c, *what.session)
		}
		return printPath(ctx, c, d, *what.path)
	})
}

func disconnectAny(c *call) error {
	return c.onAny(false, func(ctx context.Context, d *daemons, _ *inventory, what found) error {
		if what.session != nil {
			return c.disconnectSession(ctx, d, *what.session)
		}
		return c.disconnectPath(ctx, d, *what.path)
	})
}

func reconnectAny(c *call) error {
	return c.onAny(false, func(ctx context.Context, d *daemons, _ *inventory, what found) error {
		if what.session != nil {
			return c.reconnectPaths(ctx, d.client, what.session.Paths)
		}
		return c.reconnectPaths(ctx, d.client, []*controlpb.Path{what.path.Path})
	})
}

func recoverAny(c *call) error {
	if c.args[0] == report.All {
		return c.with(func(ctx context.Context, d *daemons) error {
			inv, err := d.look(ctx, true)
			if err != nil {
				return err
			}
			errs := c.recoverSessions(ctx, d.client, inv, inv.sessions)
			if inv, err = d.look(ctx, true); err != nil { // paths that are back must not be cut again
				return errors.Join(errs, err)
			}
			return errors.Join(errs, c.recoverDevices(ctx, d.client, inv, inv.devices))
		})
	}
	return c.onAny(true, func(ctx context.Context, d *daemons, inv *inventory, what found) error {
		switch {
		case what.device != nil:
			return c.recoverDevices(ctx, d.client, inv, []device{*what.device})
		case what.session != nil:
			return c.recoverSessions(ctx, d.client, inv, []session{*what.session})
		}
		return c.recoverPaths(ctx, d.client, []*controlpb.Path{what.path.Path})
	})
}

var daemonFields = []report.Field[*controlpb.DaemonInfo]{
	report.F("kind", "Daemon", "client or server", func(i *controlpb.DaemonInfo) any { return i.Kind }),
	report.F("version", "Version", "of the daemon", func(i *controlpb.DaemonInfo) any { return i.Version }),
	report.F("pid", "Process", "its number", func(i *controlpb.DaemonInfo) any { return int64(i.Pid) }),
	report.F("pumps", "Pumps", "threads of the data path", func(i *controlpb.DaemonInfo) any { return int64(i.Pumps) }),
	report.F("listen", "Listens on", "addresses", func(i *controlpb.DaemonInfo) any { return i.Listen }),
	report.F("conditions", "Conditions", "what needs attention now; empty: nothing", func(i *controlpb.DaemonInfo) any {
		out := []string{}
		for _, c := range i.Conditions {
			out = append(out, strings.TrimSpace(c.Kind+" "+c.Subject)+": "+c.Text)
		}
		return out
	}),
	report.F("config_problems", "Configuration", "what is wrong with it: parts that are left out, or why it was refused; empty: nothing", func(i *controlpb.DaemonInfo) any { return i.ConfigProblems }),
}

var pluginFields = []report.Field[*controlpb.Plugin]{
	report.F("name", "Plugin", "as configured", func(p *controlpb.Plugin) any { return p.Name }),
	report.F("kind", "Kind", "io or frontend", func(p *controlpb.Plugin) any { return p.Kind }),
	report.F("state", "State", "running, restarting, failed: ...", func(p *controlpb.Plugin) any { return p.State }),
	report.F("pid", "Process", "its number", func(p *controlpb.Plugin) any { return int64(p.Pid) }),
	report.F("restarts", "Restarts", "since the daemon started", func(p *controlpb.Plugin) any { return uint64(p.Restarts) }),
	report.F("version", "Version", "of the plugin", func(p *controlpb.Plugin) any { return p.Version }),
	report.F("path", "Path", "of its file", func(p *controlpb.Plugin) any { return p.Path }),
	report.F("confined", "Confined", "what keeps it to its work, and what this host lacks; off", func(p *controlpb.Plugin) any { return p.Confined }),
}

// showDaemons shows the daemon, or both.
func showDaemons(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		var infos []*controlpb.DaemonInfo
		if d.client != nil {
			i, err := d.client.Info(ctx, &controlpb.InfoRequest{})
			if err != nil {
				return err
			}
			infos = append(infos, i)
		}
		if d.server != nil {
			i, err := d.server.Info(ctx, &controlpb.InfoRequest{})
			if err != nil {
				return err
			}
			infos = append(infos, i)
		}
		fields, err := report.Select(daemonFields, everyField(daemonFields), c.chosen)
		if err != nil {
			return usageError{err}
		}
		t := report.Build("daemons", "daemon", fields, infos)
		for i := range t.Rows {
			t.Rows[i].Sub = []report.Table{report.Build("plugins", "plugin", pluginFields, infos[i].Plugins)}
		}
		if len(infos) > 1 {
			return report.List(c.cmd.OutOrStdout(), c.Options, t)
		}
		return report.Show(c.cmd.OutOrStdout(), c.Options, t)
	})
}
