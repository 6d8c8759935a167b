package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// pathFields: the names and headers up to hostname are those of the tool for
// the kernel's RNBD.
var pathFields = []report.Field[transportPath]{
	report.F("sessname", "Sessname", "name of the session", func(p transportPath) any { return p.Session }).As(report.Name),
	report.F("pathname", "Path name", "CLIENT@SERVER addresses", func(p transportPath) any { return p.Name }).As(report.Exact),
	report.F("src_addr", "Client Addr", "address of the client", func(p transportPath) any { return hostOf(p.Src) }).As(report.Exact),
	report.F("dst_addr", "Server Addr", "address and port of the server", func(p transportPath) any { return p.Dst }).As(report.Exact),
	report.F("hca_name", "HCA", "device of the fabric", func(p transportPath) any { return p.Device }).As(report.Name),
	report.F("hca_port", "Port", "port of that device", func(p transportPath) any { return uint64(p.HcaPort) }),
	report.F("state", "State", "connected, closed, ...", func(p transportPath) any { return p.State }).As(report.Exact),
	report.F("rx_bytes", "RX", "bytes received", func(p transportPath) any { return report.Bytes(p.RxBytes) }),
	report.F("tx_bytes", "TX", "bytes sent", func(p transportPath) any { return report.Bytes(p.TxBytes) }),
	report.F("inflights", "Inflights", "requests under way", func(p transportPath) any { return report.Count(p.Inflight) }),
	report.F("reconnects", "Reconnects", "times it came back, here", onOutgoingPath(func(p transportPath) any { return report.Count(p.Reconnects) })),
	report.F("direction", "Direction", "outgoing here, incoming on the server", func(p transportPath) any { return direction(p.incoming) }).As(report.Exact),
	report.F("hostname", "Hostname", "host at the other end", func(p transportPath) any { return p.host }).As(report.Name),

	report.F("id", "Id", "number in its session", func(p transportPath) any { return uint64(p.Id) }),
	report.F("fabric", "Fabric", "kind of transport", func(p transportPath) any { return p.Fabric }).As(report.Exact),
	report.F("connections", "Connections", "it is made of", func(p transportPath) any { return uint64(p.Connections) }),
	report.F("changing_keys", "Changing Keys", "each request changes its chunk's key (always_invalidate), on the server", func(p transportPath) any {
		if !p.incoming {
			return nil
		}
		return p.ChangingKeys
	}),
	report.F("tls", "TLS", "protocol and cipher, empty if it is not encrypted", onProtected(func(s *controlpb.Security) any {
		if s.Protocol == challengeProtocol {
			return nil
		}
		return s.Protocol + " " + s.Cipher
	})),
	report.F("auth", "Auth", "how the other end has proved its identity: tls or challenge, and with what", onProtected(func(s *controlpb.Security) any {
		if s.Protocol == challengeProtocol {
			return s.Protocol + " " + s.Cipher
		}
		return "tls"
	})),
	report.F("peer", "Peer", "identity that the other end has proved", onProtected(func(s *controlpb.Security) any { return s.Peer })).As(report.Name),
	report.F("peer_expires", "Peer Expires", "end of the validity of its certificate", onProtected(func(s *controlpb.Security) any {
		if s.ExpiresUnixMs == 0 {
			return nil
		}
		return time.UnixMilli(s.ExpiresUnixMs).UTC().Format(time.RFC3339)
	})),
	report.F("tls_resumed", "Resumed", "the handshake continued an earlier session", onProtected(func(s *controlpb.Security) any { return s.Resumed })),
	report.F("failovers", "Failovers", "requests taken over from other paths, here", onOutgoingPath(func(p transportPath) any { return report.Count(p.Failovers) })),
	report.F("latency", "Latency", "last heartbeat's round trip, for programs in ns", func(p transportPath) any { return time.Duration(p.LatencyNs) }),
	report.F("last_error", "Last Error", "why it is not connected, here", onOutgoingPath(func(p transportPath) any { return p.LastError })),
}

// challengeProtocol is that of a path whose ends have proved their identities,
// and that is not encrypted.
const challengeProtocol = "challenge"

// securityText returns protocol and cipher of an encrypted path, else nothing.
func securityText(s *controlpb.Security) string {
	if s == nil || s.Protocol == challengeProtocol {
		return ""
	}
	return s.Protocol + " " + s.Cipher
}

func onProtected(get func(*controlpb.Security) any) func(transportPath) any {
	return func(p transportPath) any {
		if p.Security == nil {
			return nil
		}
		return get(p.Security)
	}
}

func onOutgoingPath(get func(transportPath) any) func(transportPath) any {
	return func(p transportPath) any {
		if p.incoming {
			return nil
		}
		return get(p)
	}
}

// pathUsual returns the fields that are shown. A server's paths differ in the
// addresses of clients.
func pathUsual(set daemonSet) []string {
	if set == onServer {
		return []string{"sessname", "hca_name", "hca_port", "src_addr", "state", "tx_bytes", "rx_bytes"}
	}
	return []string{"sessname", "hca_name", "hca_port", "dst_addr", "state", "tx_bytes", "rx_bytes"}
}

// pathSpare are the fields that narrow tables leave out.
var pathSpare = []string{"hca_port", "hca_name", "rx_bytes", "tx_bytes"}

func pathNoun() *noun {
	return &noun{
		name: "path", plural: "paths", short: "Paths of sessions",
		fields: report.Infos(pathFields), usual: pathUsual, verbs: pathVerbs(),
		number: "id", spare: pathSpare,
		wide: []string{"pathname", "fabric", "inflights", "reconnects", "latency", "last_error"},
	}
}

const pathArgs = "[SESSION] PATH"

const pathHelp = `

PATH is its number in the session, SESSION:NUMBER, its name CLIENT@SERVER, an
address of it, or its HCA with or without the port. SESSION is needed where
that is not clear without it.`

func pathVerbs() []*verb {
	return []*verb{
		{
			name: "list", aliases: []string{"ls"}, on: onBoth, words: outputWords, max: -1, flags: listFlags, args: "[NAME]...", args0: pathNames, run: listPaths,
			short:   "List paths",
			example: "  rnbd path list\n  rnbd server path list K all\n  rnbd list paths +latency -hca_name",
		},
		{
			name: "show", on: onBoth, words: outputWords | statsWord, min: 1, max: 2, args: pathArgs, args0: pathNames, run: showPath,
			short:   "Show all about a path",
			long:    "Show all about a path, or the fields that are chosen." + pathHelp,
			example: "  rnbd path show web1@storage 1\n  rnbd path show 10.0.0.2@10.0.0.1 state",
		},
		{
			name: "add", on: onClient, bare: true, min: 2, max: 2, args: "SESSION [SRC@]ADDRESS[:PORT][%FABRIC]", args0: sessionNames, words: outputWords, run: addPath, interrupted: partLeft,
			short:   "Add a path to a session",
			long:    "Add a path to a session. ADDRESS is an IP address, gid:GID, or the name of a host,\nwhose addresses are tried in turn.",
			example: "  rnbd add web1@storage 10.2.0.1\n  rnbd path add web1@storage 10.2.0.2@10.2.0.1:1234%rocev2",
		},
		{
			name: "delete", aliases: []string{"remove"}, on: onClient, bare: true, min: 1, max: 2, args: pathArgs + " [force]", args0: pathNames, words: forceWord, run: deletePath, interrupted: partLeft,
			short:   "Delete a path; requests go on over the others",
			long:    "Delete a path from its session; requests go on over the others. The last one\nis kept with exit code 5, unless by force: devices have no server then." + pathHelp,
			example: "  rnbd path delete web1@storage 3",
		},
		{
			name: "readd", on: onClient, bare: true, min: 1, max: 2, args: pathArgs, args0: pathNames, run: readdPath, interrupted: partLeft,
			short:   "Delete a path and add it again",
			long:    "Delete a path from its session and add it again, with a new number. A path that\ndoes not connect stays in the session and is tried again." + pathHelp,
			example: "  rnbd readd web1@storage 10.0.0.1",
		},
		{
			name: "disconnect", on: onBoth, min: 1, max: 2, args: pathArgs, args0: pathNames, run: disconnectPath, interrupted: partLeft,
			short:   "Disconnect a path",
			long:    "Disconnect a path. Here it stays so until it is reconnected or recovered; a\nclient whose path is disconnected on the server connects it again by itself." + pathHelp,
			example: "  rnbd path disconnect web1@storage 1",
		},
		{
			name: "reconnect", on: onClient, min: 1, max: 2, args: pathArgs, args0: pathNames, run: reconnectPath, interrupted: partLeft,
			short:   "Connect a path again, now",
			long:    "Disconnect a path if it is connected, and connect it again." + pathHelp,
			example: "  rnbd path reconnect 10.0.0.1",
		},
		{
			name: "recover", on: onClient, min: 1, max: 2, args: "[SESSION] PATH|all", args0: pathNames, run: recoverPaths, interrupted: partLeft,
			short:   "Connect a path again if it is not connected",
			long:    "Connect a path again if it is not connected; with all, every one." + pathHelp,
			example: "  rnbd path recover all\n  rnbd path recover web1@storage all",
		},
	}
}

func listPaths(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, false)
		if err != nil {
			return err
		}
		if err := c.keepNamed(inv); err != nil {
			return err
		}
		if inv.paths, err = arrange(c, pathFields, inv.paths); err != nil {
			return err
		}
		t, err := table(c, c.noun, pathFields, d.both(), inv.paths)
		if err != nil {
			return err
		}
		a, err := c.attention(ctx, d)
		if err != nil {
			return err
		}
		t.Attention = a.things()
		notePaths(t, inv.paths)
		return report.List(c.cmd.OutOrStdout(), c.Options, t)
	})
}

// onPath runs f with the path that the arguments name.
func (c *call) onPath(f func(context.Context, *daemons, transportPath) error) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, false)
		if err != nil {
			return err
		}
		p, err := inv.path(c.args)
		if err != nil {
			return err
		}
		return f(ctx, d, p)
	})
}

func showPath(c *call) error {
	return c.onPath(func(ctx context.Context, d *daemons, p transportPath) error { return printPath(ctx, c, d, p) })
}

func printPath(ctx context.Context, c *call, all *daemons, p transportPath) error {
	t, err := selected(c, pathNoun(), pathFields, everyField(pathFields), []transportPath{p})
	if err != nil {
		return err
	}
	if c.stats {
		sub, err := pathStats(ctx, all, p)
		if err != nil {
			return err
		}
		t.Rows[0].Sub = []report.Table{sub}
	}
	return report.Show(c.cmd.OutOrStdout(), c.Options, t)
}

func addPath(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, false)
		if err != nil {
			return err
		}
		s, err := inv.session(c.args[0])
		if err != nil {
			return err
		}
		choices, err := resolvePaths(ctx, c.args[1:])
		if err != nil {
			return err
		}
		var p *controlpb.Path
		err = tryPaths(ctx, choices, func(ctx context.Context, paths []string) (err error) {
			p, err = d.client.AddPath(ctx, &controlpb.AddPathRequest{Session: s.Name, Path: paths[0]})
			return err
		})
		if err != nil {
			return err
		}
		return printPath(ctx, c, d, transportPath{Path: p, host: s.Hostname})
	})
}

func request(p *controlpb.Path) *controlpb.PathRequest {
	return &controlpb.PathRequest{Session: p.Session, Id: p.Id}
}

// pathSpec names a path as users do when they add it. A source that the
// system chose is named too: it chooses the same again.
func pathSpec(p *controlpb.Path) string {
	spec := p.Dst + "%" + p.Fabric
	if p.Src != "" {
		spec = hostOf(p.Src) + "@" + spec
	}
	return spec
}

func deletePath(c *call) error {
	return c.onPath(func(ctx context.Context, d *daemons, p transportPath) error {
		r := request(p.Path)
		r.Force = c.force
		_, err := d.client.RemovePath(ctx, r)
		return err
	})
}

func readdPath(c *call) error {
	return c.onPath(func(ctx context.Context, d *daemons, p transportPath) error {
		next, err := d.client.ReaddPath(ctx, request(p.Path))
		if unimplemented(err) { // an older daemon: nothing is lost by this
			return c.reconnectPaths(ctx, d.client, []*controlpb.Path{p.Path})
		}
		if err != nil {
			return err
		}
		c.say("path %s:%d is connected", next.Session, next.Id)
		return nil
	})
}

func disconnectPath(c *call) error {
	return c.onPath(func(ctx context.Context, d *daemons, p transportPath) error { return c.disconnectPath(ctx, d, p) })
}

func (c *call) disconnectPath(ctx context.Context, d *daemons, p transportPath) (err error) {
	if p.incoming {
		_, err = d.server.DisconnectPath(ctx, request(p.Path))
	} else {
		_, err = d.client.DisconnectPath(ctx, request(p.Path))
	}
	return err
}

func reconnectPath(c *call) error {
	return c.onPath(func(ctx context.Context, d *daemons, p transportPath) error {
		return c.reconnectPaths(ctx, d.client, []*controlpb.Path{p.Path})
	})
}

func recoverPaths(c *call) error {
	last := c.args[len(c.args)-1]
	if last != report.All {
		return c.onPath(func(ctx context.Context, d *daemons, p transportPath) error {
			return c.recoverPaths(ctx, d.client, []*controlpb.Path{p.Path})
		})
	}
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, false)
		if err != nil {
			return err
		}
		which := inv.sessions
		if len(c.args) > 1 {
			s, err := inv.session(c.args[0])
			if err != nil {
				return err
			}
			which = []session{s}
		}
		var errs []error
		for _, s := range slices.Clone(which) {
			errs = append(errs, c.recoverPaths(ctx, d.client, s.Paths))
		}
		return errors.Join(errs...)
	})
}
