package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// accessKeys describes those of a rule of access.
var accessKeys = map[string]string{
	"identity": "patterns of what a client has proved to be; without them the rule fits clients that have proved nothing, too",
	"address":  "addresses or ranges, 10.0.0.0/24, that all paths of a client come from",
	"fabric":   "fabrics that all paths of a client use",
	"session":  "patterns of the name that a client gives its session, which it does not prove",
	"device":   "patterns of names below the search path: * is within one folder, ** any number of folders",
	"allow":    "none, ro, rw or migration, each with those before it",
}

var accessFields = []report.Field[*controlpb.AccessRule]{
	report.F("number", "Rule", "its number, from 1: the first that fits decides", func(r *controlpb.AccessRule) any { return r.Number }),
	report.F("text", "Text", "the rule in one line", func(r *controlpb.AccessRule) any { return r.Text }),
}

// accessNoun makes the commands about access rules.
func accessNoun() *noun {
	return &noun{
		name: "access", plural: "rules", short: "Rules by which clients may open devices",
		usual: func(daemonSet) []string { return nil },
		verbs: []*verb{{
			name: "list", on: onServer, words: outputWords, run: listAccess,
			short:   "List the rules by which clients may open devices",
			long:    "List the rules in force, in their order: the first that fits a client and a device\ndecides. Once there is one, a client that none fits is refused. They stand below\nthe key access of the server's configuration.",
			example: "  rnbd server access list",
		}, {
			name: "check", on: onServer, min: 3, max: 3, args: "IDENTITY DEVICE ro|rw|migration", flags: accessFlags, run: checkAccess,
			short:   "Say which rule decides about a client and a device",
			long:    "Say what the rules in force decide, and by which rule. IDENTITY is what the client\nhas proved to be, - for nothing. The exit code is 6 where the device is refused.",
			example: "  rnbd server access check - disk.img rw --address 10.0.0.7\n  rnbd server access check spiffe://example.org/web a/disk.img ro",
		}},
	}
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
