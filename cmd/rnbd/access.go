package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// accessKeys describes those of a rule of access.
var accessKeys = map[string]string{
	"identity":    "patterns of what a client has proved to be; without them the rule fits clients that have proved nothing, too",
	"address":     "addresses or ranges, 10.0.0.0/24, that all paths of a client come from",
	"fabric":      "fabrics that all paths of a client use",
	"session":     "patterns of the name that a client gives its session, which it does not prove",
	"device":      "patterns of names below the search path: * is within one folder, ** any number of folders",
	"role":        "makes the rule one about administrators of --admin-listen: read, volumes (create volumes, and change those that the identity has created) or admin, each with those before it; the rule has identity and address beside it",
	"quota-bytes": "sum of the sizes of the volumes of an identity with the role volumes; 0: any",
	"allow":       "none, ro, rw or migration, each with those before it",

	"sessions":         "sessions that may have a device open by the rule at a time; 0: any number",
	"devices":          "devices open by the rule at a time, of all sessions; 0: any number",
	"queue-depth":      "requests of these devices in the storage plugin at a time; 0: any number",
	"iops":             "requests in a second of all these devices together; 0: any number",
	"iops-burst":       "requests at once after a pause; 0: a tenth of iops",
	"bytes-per-second": "bytes read and written in a second by all these devices together; 0: any number",
	"bytes-burst":      "bytes at once after a pause; 0: a tenth of bytes-per-second",
}

var accessFields = []report.Field[*controlpb.AccessRule]{
	report.F("number", "Rule", "its number, from 1: the first that fits decides", func(r *controlpb.AccessRule) any { return r.Number }),
	report.F("text", "Text", "the rule in one line", func(r *controlpb.AccessRule) any { return r.Text }),
	report.F("limits", "Limits", "in force, as rnbd server access limit may have changed them", func(r *controlpb.AccessRule) any { return limitsText(r.Limits) }),
	report.F("open_sessions", "Sessions", "that have a device open by the rule", func(r *controlpb.AccessRule) any { return report.Count(uint64(r.OpenSessions)) }),
	report.F("open_devices", "Devices", "open by the rule", func(r *controlpb.AccessRule) any { return report.Count(uint64(r.OpenDevices)) }),
	report.F("queued", "Queued", "requests in storage plugins, with limits on requests", func(r *controlpb.AccessRule) any { return report.Count(uint64(r.Queued)) }),
	report.F("waited", "Waited", "requests that had to wait since the rules were read", func(r *controlpb.AccessRule) any { return report.Count(r.Waited) }),
}

// accessNoun makes the commands about access rules.
func accessNoun() *noun {
	return &noun{
		name: "access", plural: "rules", short: "Rules by which clients may open devices",
		usual: func(daemonSet) []string { return nil },
		verbs: []*verb{{
			name: "list", aliases: []string{"ls"}, on: onServer, words: outputWords, run: listAccess,
			short:   "List the rules by which clients may open devices",
			long:    "List the rules in force, in their order: the first that fits a client and a device\ndecides. Once there is one, a client that none fits is refused. They stand below\nthe key access of the server's configuration.",
			example: "  rnbd server access list",
		}, {
			name: "check", on: onServer, min: 3, max: 3, args: "IDENTITY DEVICE ro|rw|migration", flags: accessFlags, run: checkAccess,
			short:   "Say which rule decides about a client and a device",
			long:    "Say what the rules in force decide, and by which rule. IDENTITY is what the client\nhas proved to be, - for nothing. The exit code is 6 where the device is refused.",
			example: "  rnbd server access check - disk.img rw --address 10.0.0.7\n  rnbd server access check spiffe://example.org/web a/disk.img ro",
		}, {
			name: "limit", on: onServer, min: 2, max: 8, args: "RULE NAME=NUMBER...", run: limitAccess,
			short:   "Change the limits of an access rule",
			long:    "Change limits of a rule, by its number in rnbd server access list. The names are\n" + strings.Join(limitNamesOf(&controlpb.AccessLimits{}), ", ") + ";\n0 is no limit. The change holds at once, also for devices that are open, until the\nrules in the configuration change or the server starts again.",
			example: "  rnbd server access limit 2 iops=500 iops-burst=50\n  rnbd server access limit 2 iops=0",
		}},
	}
}

// namedLimit is one limit of a rule.
type namedLimit struct {
	name  string
	value *uint64
}

func namedLimits(l *controlpb.AccessLimits) []namedLimit {
	return []namedLimit{
		{"sessions", &l.Sessions}, {"devices", &l.Devices}, {"queue-depth", &l.QueueDepth}, {"iops", &l.Iops},
		{"iops-burst", &l.IopsBurst}, {"bytes-per-second", &l.BytesPerSecond}, {"bytes-burst", &l.BytesBurst},
	}
}

func limitNamesOf(l *controlpb.AccessLimits) (names []string) {
	for _, n := range namedLimits(l) {
		names = append(names, n.name)
	}
	return names
}

// limitsText is the limits that there are, in one line.
func limitsText(l *controlpb.AccessLimits) string {
	if l == nil {
		return ""
	}
	var list []string
	for _, n := range namedLimits(l) {
		if *n.value > 0 {
			list = append(list, fmt.Sprintf("%s=%d", n.name, *n.value))
		}
	}
	return strings.Join(list, " ")
}

// setNamedLimits takes arguments NAME=NUMBER over into l.
func setNamedLimits(l *controlpb.AccessLimits, args []string) error {
	for _, a := range args {
		name, number, _ := strings.Cut(a, "=")
		n, err := strconv.ParseUint(number, 10, 63)
		i := slices.IndexFunc(namedLimits(l), func(n namedLimit) bool { return n.name == name })
		if err != nil || i < 0 {
			return usageError{fmt.Errorf("%q: write NAME=NUMBER, with a name of %s", a, strings.Join(limitNamesOf(l), ", "))}
		}
		*namedLimits(l)[i].value = n
	}
	return nil
}

func limitAccess(c *call) error {
	rule, err := strconv.ParseUint(c.args[0], 10, 31)
	if err != nil {
		return usageError{fmt.Errorf("%q is no number of a rule", c.args[0])}
	}
	if err := setNamedLimits(&controlpb.AccessLimits{}, c.args[1:]); err != nil {
		return err
	}
	return c.with(func(ctx context.Context, d *daemons) error {
		list, err := d.server.ListAccess(ctx, &controlpb.ListRequest{})
		if err != nil {
			return err
		}
		limits := &controlpb.AccessLimits{}
		for _, r := range list.Rules {
			if uint64(r.Number) == rule && r.Limits != nil {
				limits = r.Limits
			}
		}
		if err := setNamedLimits(limits, c.args[1:]); err != nil {
			return err
		}
		_, err = d.server.SetAccessLimits(ctx, &controlpb.SetAccessLimitsRequest{Rule: uint32(rule), Limits: limits})
		return err
	})
}

func accessFlags(f *pflag.FlagSet) {
	f.String("address", "", "addresses of the client's paths, with commas between them")
	f.String("fabric", "iwarp", "fabric of its paths")
	f.String("session", "", "name of its session")
}

func listAccess(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		list, err := d.server.ListAccess(ctx, &controlpb.ListRequest{})
		if err != nil {
			return err
		}
		if len(list.Rules) == 0 && !c.Machine() {
			return c.tell("There are no rules: every client may open every device.")
		}
		return report.List(c.cmd.OutOrStdout(), c.Options, report.Build("rules", "rule", accessFields, list.Rules))
	})
}

// refusedError is the answer of a check that was made.
type refusedError struct{ text string }

func (e refusedError) Error() string { return e.text }

func checkAccess(c *call) error {
	r := &controlpb.CheckAccessRequest{Device: c.args[1], AccessMode: c.args[2], Fabric: c.text("fabric"), Session: c.text("session")}
	if c.args[0] != "-" {
		r.Identities = []string{c.args[0]}
	}
	if a := c.text("address"); a != "" {
		r.Addresses = strings.Split(a, ",")
	}
	if _, ok := blk.ParseAccessMode(r.AccessMode); !ok {
		return usageError{fmt.Errorf("%q is no access mode: write ro, rw or migration", r.AccessMode)}
	}
	return c.with(func(ctx context.Context, d *daemons) error {
		reply, err := d.server.CheckAccess(ctx, r)
		if err != nil {
			return err
		}
		why := reply.Why
		if reply.Text != "" {
			why += " (" + reply.Text + ")"
		}
		if !reply.Allowed {
			return refusedError{"refused: " + why}
		}
		return c.tell("allowed: %s", why)
	})
}
