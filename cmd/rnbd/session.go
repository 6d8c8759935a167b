package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// sessionFields: the names and headers up to hostname are those of the tool
// for the kernel's RNBD.
var sessionFields = []report.Field[session]{
	report.F("sessname", "Session name", "name of the session", func(s session) any { return s.Name }).As(report.Name),
	report.F("path_cnt", "Path cnt", "number of paths", func(s session) any { return report.Count(len(s.Paths)) }),
	report.F("act_path_cnt", "Act path cnt", "number of connected paths", func(s session) any { return report.Count(s.active()) }),
	report.F("state", "State", "connected or disconnected", func(s session) any { return s.State }).As(report.Exact),
	report.F("path_uu", "PS", "each path: U connected, _ not", func(s session) any { return s.pathStates() }).As(report.Exact),
	report.F("mp", "MP Policy", "how paths are chosen, here", onOutgoing(func(s session) any { return s.Policy })).As(report.Exact),
	report.F("mp_short", "MP", "how paths are chosen, in short, here", onOutgoing(func(s session) any { return shortPolicy(s.Policy) })).As(report.Exact),
	report.F("rx_bytes", "RX", "bytes received", func(s session) any { return s.sum((*controlpb.Path).GetRxBytes) }),
	report.F("tx_bytes", "TX", "bytes sent", func(s session) any { return s.sum((*controlpb.Path).GetTxBytes) }),
	report.F("inflights", "Inflights", "requests under way", func(s session) any { return report.Count(s.sum((*controlpb.Path).GetInflight)) }),
	report.F("reconnects", "Reconnects", "paths that came back, here", onOutgoing(func(s session) any { return report.Count(s.sum((*controlpb.Path).GetReconnects)) })),
	report.F("direction", "Direction", "outgoing here, incoming on the server", func(s session) any { return direction(s.incoming) }).As(report.Exact),
	report.F("srvname", "Server Name", "host of the server", func(s session) any { return s.ServerName }).As(report.Name),
	report.F("hostname", "Hostname", "host at the other end", func(s session) any { return s.Hostname }).As(report.Name),

	report.F("devices", "Devices", "that go through it", func(s session) any { return report.Count(s.Devices) }),
	report.F("queue_depth", "Queue Depth", "requests that can be under way", func(s session) any { return uint64(s.QueueDepth) }),
	report.F("max_io", "Max IO", "largest request in bytes, here", onOutgoing(func(s session) any { return report.Limit(s.MaxIoSize) })),
	report.F("max_reconnects", "Max Reconnects", "attempts per path, -1: for ever, here", onOutgoing(func(s session) any { return int64(s.MaxReconnectAttempts) })),
}

func onOutgoing(get func(session) any) func(session) any {
	return func(s session) any {
		if s.incoming {
			return nil
		}
		return get(s)
	}
}

func (s session) active() (n int) {
	for _, p := range s.Paths {
		if connected(p) {
			n++
		}
	}
	return n
}

func (s session) pathStates() string {
	var b strings.Builder
	for _, p := range s.Paths {
		if connected(p) {
			b.WriteByte('U')
		} else {
			b.WriteByte('_')
		}
	}
	return b.String()
}

func (s session) sum(of func(*controlpb.Path) uint64) (sum report.Bytes) {
	for _, p := range s.Paths {
		sum += report.Bytes(of(p))
	}
	return sum
}

// shortPolicy is the abbreviation of the kernel's tool: round-robin is RR.
func shortPolicy(policy string) string {
	var b strings.Builder
	for _, w := range strings.FieldsFunc(policy, func(r rune) bool { return r == '-' }) {
		b.WriteString(strings.ToUpper(w[:1]))
	}
	return b.String()
}

func sessionNoun() *noun {
	return &noun{
		name: "session", plural: "sessions", short: "Sessions with servers and of clients",
		fields: report.Infos(sessionFields),
		usual: func(set daemonSet) []string {
			if set == onServer {
				return []string{"sessname", "path_cnt", "tx_bytes", "rx_bytes", "inflights"}
			}
			return []string{"sessname", "state", "path_uu", "mp_short", "tx_bytes", "rx_bytes", "reconnects"}
		},
		spare: []string{"reconnects", "mp_short", "inflights", "rx_bytes", "tx_bytes"},
		wide:  []string{"mp", "hostname", "devices", "queue_depth", "inflights"},
		verbs: sessionVerbs(),
	}
}

func sessionVerbs() []*verb {
	return []*verb{
		{
			name: "list", aliases: []string{"ls"}, on: onBoth, words: outputWords, max: -1, flags: listFlags, args: "[NAME]...", args0: sessionNames, run: listSessions,
			short:   "List sessions and their paths",
			example: "  rnbd session list\n  rnbd list sessions notree\n  rnbd server session list all json",
		},
		{
			name: "show", on: onBoth, words: outputWords, min: 1, max: 1, args: "SESSION", args0: sessionNames, run: showSession,
			short:   "Show all about a session",
			long:    "Show all about a session, or the fields that are chosen, and its paths.\n\nSESSION is its name, or the host at its other end.",
			example: "  rnbd session show web1@storage",
		},
		{
			name: "disconnect", on: onBoth, min: 1, max: 1, args: "SESSION", args0: sessionNames, run: disconnectSession, interrupted: partLeft,
			short:   "Disconnect all paths of a session",
			long:    "Disconnect all paths of a session. Here they stay so until they are reconnected\nor recovered; a client whose session is disconnected on the server connects\nagain by itself.",
			example: "  rnbd session disconnect web1@storage",
		},
		{
			name: "reconnect", on: onClient, min: 1, max: 1, args: "SESSION", args0: sessionNames, run: reconnectSession, interrupted: partLeft,
			short:   "Disconnect and connect all paths of a session, one after the other",
			example: "  rnbd session reconnect web1@storage",
		},
		{
			name: "recover", on: onClient, min: 1, max: 1, args: "SESSION|all [add-missing]", args0: sessionNamesOrAll, words: missingWord, run: recoverSessions, interrupted: partLeft,
			short: "Connect the paths of a session that are not connected",
			long: `Connect the paths of a session that are not connected. add-missing also adds
the paths that other sessions with the same server have: those with a server
address, or a name of the server, in common.`,
			example: "  rnbd session recover web1@storage\n  rnbd session recover all add-missing",
		},
		{
			name: "remap", on: onClient, min: 1, max: 1, args: "SESSION [force]", args0: sessionNames, words: forceWord, run: remapSession, interrupted: partLeft,
			short:   "Open all closed devices of a session again",
			long:    "Open all closed devices of a session again. By force every device is unmapped\nand mapped again.",
			example: "  rnbd session remap web1@storage",
		},
		{
			name: "set", on: onClient, min: 2, max: -1, args: "SESSION SETTING=VALUE...", args0: sessionSettings, run: setSession, interrupted: partLeft,
			short: "Change settings of a session",
			long: `Change settings of a session:

  mp_policy                min-inflight, round-robin or min-latency
  max_reconnect_attempts   of each path; 0: never, -1: for ever`,
			example: "  rnbd session set web1@storage mp_policy=round-robin max_reconnect_attempts=-1",
		},
	}
}

// sessionTable lists sessions with their paths.
func sessionTable(c *call, t report.Table, sessions []session) (report.Table, error) {
	usual := slices.DeleteFunc(pathUsual(c.set), func(f string) bool { return f == "sessname" })
	if !c.Machine() {
		usual = slices.Insert(usual, 0, "id")
	}
	if strings.Contains(c.chosen, report.All) {
		usual = everyField(pathFields)
	}
	fields, err := report.Select(pathFields, usual, "")
	if err != nil {
		return t, err
	}
	for i := range t.Rows {
		sub := report.Build("paths", "path", fields, sessions[i].transportPaths())
		rank(sub.Columns, pathSpare)
		t.Rows[i].Sub = []report.Table{sub}
	}
	return t, nil
}

func listSessions(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, false)
		if err != nil {
			return err
		}
		if err := c.keepNamed(inv); err != nil {
			return err
		}
		if inv.sessions, err = arrange(c, sessionFields, inv.sessions); err != nil {
			return err
		}
		t, err := table(c, c.noun, sessionFields, d.both(), inv.sessions)
		if err != nil {
			return err
		}
		a, err := c.attention(ctx, d)
		if err != nil {
			return err
		}
		t.Attention = a.things()
		a.noteSessions(t, inv.sessions)
		if t, err = sessionTable(c, t, inv.sessions); err != nil {
			return err
		}
		return report.List(c.cmd.OutOrStdout(), c.Options, t)
	})
}

func showSession(c *call) error {
	return c.onSession(func(_ context.Context, _ *daemons, _ *inventory, s session) error { return printSession(c, s) })
}

func printSession(c *call, s session) error {
	t, err := selected(c, sessionNoun(), sessionFields, everyField(sessionFields), []session{s})
	if err != nil {
		return err
	}
	if t, err = sessionTable(c, t, []session{s}); err != nil {
		return err
	}
	return report.Show(c.cmd.OutOrStdout(), c.Options, t)
}

// onSession runs f with the session that the first argument names.
func (c *call) onSession(f func(context.Context, *daemons, *inventory, session) error) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, true)
		if err != nil {
			return err
		}
		s, err := inv.session(c.args[0])
		if err != nil {
			return err
		}
		return f(ctx, d, inv, s)
	})
}

func disconnectSession(c *call) error {
	return c.onSession(func(ctx context.Context, d *daemons, _ *inventory, s session) error {
		return c.disconnectSession(ctx, d, s)
	})
}

func (c *call) disconnectSession(ctx context.Context, d *daemons, s session) error {
	if s.incoming {
		_, err := d.server.DisconnectSession(ctx, &controlpb.SessionRequest{Session: s.Name})
		return err
	}
	var errs []error
	for _, p := range s.Paths {
		_, err := d.client.DisconnectPath(ctx, &controlpb.PathRequest{Session: s.Name, Id: p.Id})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func reconnectSession(c *call) error {
	return c.onSession(func(ctx context.Context, d *daemons, _ *inventory, s session) error {
		return c.reconnectPaths(ctx, d.client, s.Paths)
	})
}

// reconnectPaths connects paths again. All are tried.
func (c *call) reconnectPaths(ctx context.Context, client controlpb.ClientDaemonClient, paths []*controlpb.Path) error {
	var errs []error
	for _, p := range paths {
		_, err := client.ReconnectPath(ctx, &controlpb.PathRequest{Session: p.Session, Id: p.Id})
		if err == nil {
			c.say("path %s:%d is connected", p.Session, p.Id)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// recoverPaths connects those that are not connected.
func (c *call) recoverPaths(ctx context.Context, client controlpb.ClientDaemonClient, paths []*controlpb.Path) error {
	return c.reconnectPaths(ctx, client, slices.DeleteFunc(slices.Clone(paths), connected))
}

func recoverSessions(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, false)
		if err != nil {
			return err
		}
		which := inv.sessions
		if c.args[0] != report.All {
			s, err := inv.session(c.args[0])
			if err != nil {
				return err
			}
			which = []session{s}
		}
		return c.recoverSessions(ctx, d.client, inv, which)
	})
}

func (c *call) recoverSessions(ctx context.Context, client controlpb.ClientDaemonClient, inv *inventory, which []session) error {
	var errs []error
	for _, s := range which {
		errs = append(errs, c.recoverPaths(ctx, client, s.Paths))
		switch {
		case c.missing:
			errs = append(errs, c.addMissing(ctx, client, s, inv.sessions))
		case len(s.Paths) == 0:
			errs = append(errs, fmt.Errorf("session %s has no path that could be connected, add one: rnbd path add %s ADDRESS: %w", s.Name, s.Name, syscall.ENOTCONN))
		}
	}
	return errors.Join(errs...)
}

// addMissing adds the paths that other sessions with the server of s have.
func (c *call) addMissing(ctx context.Context, client controlpb.ClientDaemonClient, s session, all []session) error {
	have := map[string]bool{}
	for _, p := range s.Paths {
		have[pathSpec(p)] = true
	}
	var errs []error
	for _, other := range all {
		if other.Name == s.Name || !sameServer(s, other) {
			continue
		}
		for _, p := range other.Paths {
			spec := pathSpec(p)
			if have[spec] {
				continue
			}
			have[spec] = true
			_, err := client.AddPath(ctx, &controlpb.AddPathRequest{Session: s.Name, Path: spec})
			if err == nil {
				c.say("session %s has a path %s", s.Name, spec)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// sameServer reports whether two sessions have a server's address or name in
// common.
func sameServer(a, b session) bool {
	if a.ServerName != "" && a.ServerName == b.ServerName {
		return true
	}
	for _, p := range a.Paths {
		if slices.ContainsFunc(b.Paths, func(q *controlpb.Path) bool { return p.Dst == q.Dst && p.Fabric == q.Fabric }) {
			return true
		}
	}
	return false
}

func remapSession(c *call) error {
	return c.onSession(func(ctx context.Context, d *daemons, inv *inventory, s session) error {
		var errs []error
		for _, dev := range inv.devices {
			if dev.session == s.Name && (c.force || dev.state == "closed") {
				errs = append(errs, c.remap(ctx, d.client, dev))
			}
		}
		return errors.Join(errs...)
	})
}

func setSession(c *call) error {
	return c.onSession(func(ctx context.Context, d *daemons, _ *inventory, s session) error {
		for _, kv := range c.args[1:] {
			key, value, _ := strings.Cut(kv, "=")
			var err error
			switch key {
			case "mp_policy":
				_, err = d.client.SetPolicy(ctx, &controlpb.SetPolicyRequest{Session: s.Name, Policy: value})
			case "max_reconnect_attempts":
				n, bad := strconv.ParseInt(value, 10, 32)
				if bad != nil {
					return usageError{fmt.Errorf("%s: %q %w", key, value, errNumber)}
				}
				_, err = d.client.SetMaxReconnectAttempts(ctx, &controlpb.SetMaxReconnectAttemptsRequest{Session: s.Name, Attempts: int32(n)})
			default:
				return usageError{fmt.Errorf("there is no setting %q: use mp_policy or max_reconnect_attempts", key)}
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}
