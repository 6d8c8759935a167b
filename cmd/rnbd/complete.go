package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/top"
)

// completer offers arguments: names that the daemons have, given the words
// before.
type completer func(inv *inventory, before []string) []string

// completionLimit bounds the time for a list of words.
const completionLimit = 2 * time.Second

// complete offers the arguments of v, then its options as words.
func (v *verb) complete(set daemonSet) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var words []string
		if v.args0 != nil && (v.max < 0 || len(args) < v.max) {
			words = v.args0(lookFor(cmd, set), args)
		}
		if len(args) >= v.min {
			words = append(words, v.knownWords()...)
		}
		words = slices.DeleteFunc(words, func(w string) bool { return !strings.HasPrefix(w, typed) || slices.Contains(args, w) })
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// lookFor asks the daemons for their objects. Errors are not reported.
func lookFor(cmd *cobra.Command, set daemonSet) *inventory {
	ctx, cancel := context.WithTimeout(context.Background(), completionLimit)
	defer cancel()
	d, err := connect(ctx, cmd, set)
	if err != nil {
		return &inventory{}
	}
	defer d.close()
	inv, err := d.look(ctx, true)
	if err != nil {
		return &inventory{}
	}
	return inv
}

func deviceNames(inv *inventory, before []string) (names []string) {
	if len(before) > 0 {
		return nil
	}
	for _, d := range inv.devices {
		names = append(names, d.key())
	}
	return names
}

func deviceNamesOrAll(inv *inventory, before []string) []string {
	return orAll(deviceNames(inv, before), before)
}

func sessionNames(inv *inventory, before []string) (names []string) {
	if len(before) > 0 {
		return nil
	}
	for _, s := range inv.sessions {
		names = append(names, s.Name)
	}
	return names
}

func sessionNamesOrAll(inv *inventory, before []string) []string {
	return orAll(sessionNames(inv, before), before)
}

func orAll(names, before []string) []string {
	if len(before) == 0 {
		names = append(names, report.All)
	}
	return names
}

// pathNames offers paths by name; behind a session those of the session.
func pathNames(inv *inventory, before []string) (names []string) {
	for _, p := range inv.paths {
		if len(before) == 0 || p.Session == before[0] {
			names = append(names, p.Name)
		}
	}
	if len(before) == 0 {
		names = append(names, sessionNames(inv, nil)...)
	}
	return names
}

func anyNames(inv *inventory, before []string) []string {
	return slices.Concat(deviceNames(inv, before), pathNames(inv, before))
}

// mapWords offers from, then the sessions and servers that are known.
func mapWords(inv *inventory, before []string) []string {
	switch {
	case len(before) == 0:
		return nil
	case len(before) == 1:
		return []string{"from"}
	}
	words := sessionNames(inv, nil)
	for _, p := range inv.paths {
		if !slices.Contains(words, p.Dst) {
			words = append(words, p.Dst)
		}
	}
	return words
}

func sessionSettings(inv *inventory, before []string) []string {
	if len(before) == 0 {
		return sessionNames(inv, nil)
	}
	return []string{"mp_policy=min-inflight", "mp_policy=round-robin", "mp_policy=min-latency", "max_reconnect_attempts="}
}

// flagWords are the values of flags that shells complete.
var flagWords = map[string][]string{
	"output":     report.Formats,
	"unit":       strings.Split(report.Units, ""),
	"access":     {"ro", "rw", "migration"},
	"frontend":   {"auto", "ublk", "nbd", "nbd-socket", "fuse", "fuse-loop"},
	"loss":       {"fail", "queue:30s", "queue:5m", "queue:forever"},
	"io-mode":    {"fileio", "blockio"},
	"policy":     {"min-inflight", "round-robin", "min-latency"},
	"log-level":  {"debug", "info", "warn", "error"},
	"log-format": {"text", "json"},
	"for":        waitGoals,
	"view":       top.Views,
}

// completeFlags has the shell complete the values of the flags of c and of all
// commands below it. fields are those that a list of c's kind has.
func completeFlags(c *cobra.Command, fields []report.Info) {
	for name, words := range flagWords {
		if c.LocalFlags().Lookup(name) != nil && !(name == "io-mode" && c.Name() == "run") {
			registerWords(c, name, words)
		}
	}
	if c.LocalFlags().Lookup("session") != nil {
		_ = c.RegisterFlagCompletionFunc("session", func(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return sessionNames(lookFor(cmd, onClient), nil), cobra.ShellCompDirectiveNoFileComp
		})
	}
	var names []string
	for _, f := range fields {
		names = append(names, f.Name)
	}
	for _, name := range []string{"fields", "sort"} {
		if len(names) > 0 && c.LocalFlags().Lookup(name) != nil {
			registerWords(c, name, names)
		}
	}
}

func registerWords(c *cobra.Command, flag string, words []string) {
	// The only error is a flag that is registered already.
	_ = c.RegisterFlagCompletionFunc(flag, func(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		fits := slices.DeleteFunc(slices.Clone(words), func(w string) bool { return !strings.HasPrefix(w, typed) })
		return fits, cobra.ShellCompDirectiveNoFileComp
	})
}
