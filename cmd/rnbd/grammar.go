package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// A command line is [MODE] [NOUN] VERB: each verb stands in a table of its
// noun, and newRoot makes commands of the tables. The short forms are
// commands, too; resolve finds the command for shortened or reordered words.

// daemonSet is the set of daemons that a command is for.
type daemonSet uint8

const (
	onClient daemonSet = 1 << iota
	onServer
	onBoth = onClient | onServer
)

// modes are the words for sets of one.
var modes = []struct {
	name, short string
	set         daemonSet
}{
	{"client", "Map devices and look after them", onClient},
	{"server", "Export devices and look after them", onServer},
}

// noun is a kind of object that commands are about.
type noun struct {
	name, plural, short string
	fields              []report.Info
	usual               func(daemonSet) []string // fields shown when none are chosen
	wide                []string                 // fields that the format wide shows besides
	number              string                   // field that tables show besides, after the first: commands take it
	spare               []string                 // usual fields that narrow tables leave out, the first one first
	verbs               []*verb
	newer               bool // it takes no short forms from commands of earlier versions
}

// verb is a command.
type verb struct {
	noun    *noun // nil: of no kind, or of several
	name    string
	aliases []string
	on      daemonSet // where it exists
	bare    bool      // the noun may be left out
	args    string    // as usage shows them
	min     int       // arguments that are never taken for options
	max     int       // arguments without options; -1: any number
	keyword string    // an argument; the word after it is one, too
	short   string
	long    string
	example string
	words   wordSet // option words it takes
	// anyFields are those of the kinds of objects that a verb without a noun
	// can show.
	anyFields []report.Info
	flags     func(*pflag.FlagSet)
	args0     completer // of its arguments
	// atLength: it takes as long as it is told to; --timeout bounds only its
	// questions to others on the way.
	atLength bool
	// interrupted describes the state after a signal ended it; empty: it
	// changes nothing.
	interrupted string
	run         func(*call) error
}

// nouns are built per command tree, since verbs point to them.
func nouns() []*noun {
	all := []*noun{deviceNoun(), sessionNoun(), pathNoun(), pluginNoun(), accessNoun(), poolNoun(), volumeNoun()}
	for _, n := range all {
		for _, v := range n.verbs {
			v.noun = n
		}
	}
	return all
}

// addVerbs gives a mode, or the root, its nouns and verbs.
func addVerbs(parent *cobra.Command, set daemonSet) {
	all := nouns()
	for _, n := range all {
		group := group(n.name, n.short)
		group.Aliases, group.GroupID = []string{n.plural}, groupNouns
		if n.newer {
			group.Annotations = map[string]string{newerNoun: n.name}
		}
		for _, v := range n.verbs {
			if on := v.on & set; on != 0 {
				group.AddCommand(v.command(on))
				if v.bare {
					addShort(parent, v.command(on))
				}
			}
		}
		if group.HasSubCommands() {
			parent.AddCommand(group)
		}
	}
	for _, v := range generalVerbs(all) {
		if on := v.on & set; on != 0 {
			addShort(parent, v.command(on))
		}
	}
}

func addShort(parent, c *cobra.Command) {
	c.GroupID = groupVerbs
	parent.AddCommand(c)
}

// group is a command that only holds others.
func group(name, short string) *cobra.Command {
	c := &cobra.Command{
		Use: name, Short: short, Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, a []string) error {
			if len(a) > 0 {
				return unknownCommand(cmd, a[0])
			}
			return cmd.Help()
		},
	}
	c.AddGroup(&cobra.Group{ID: groupNouns, Title: "About one kind of object:"},
		&cobra.Group{ID: groupVerbs, Title: "Commands:"})
	return c
}

const (
	groupModes = "modes"
	groupNouns = "nouns"
	groupVerbs = "verbs"
)

// Annotations of commands: verbOf names the verb behind one, newerNoun the noun of a group
// that is newer.
const (
	verbOf    = "rnbd-verb"
	newerNoun = "rnbd-newer-noun"
)

// command makes a command of v for the daemons of set.
func (v *verb) command(set daemonSet) *cobra.Command {
	c := &cobra.Command{
		Use: strings.TrimSpace(v.name + " " + v.args), Aliases: v.aliases,
		Short: v.short, Long: v.help(set), Example: v.example, Args: cobra.ArbitraryArgs,
		Annotations:           map[string]string{verbOf: v.name},
		DisableFlagsInUseLine: false,
		ValidArgsFunction:     v.complete(set),
		RunE: func(cmd *cobra.Command, a []string) error {
			pause, err := watchPause(cmd)
			switch {
			case err != nil:
				return err
			case pause > 0:
				return watch(cmd, pause, func() error { return v.once(cmd, set, a) })
			}
			return v.once(cmd, set, a)
		},
	}
	v.words.flags(c.Flags())
	if v.flags != nil {
		v.flags(c.Flags())
	}
	completeFlags(c, v.fields())
	return c
}

// once runs v with the arguments of a command line.
func (v *verb) once(cmd *cobra.Command, set daemonSet, args []string) error {
	signaled := cmd.Context()
	call, err := newCall(cmd, v, set, args)
	if err != nil {
		return err
	}
	defer call.cancel()
	if err = v.run(call); err != nil && signaled.Err() != nil {
		return interruptedError{cmp.Or(v.interrupted, "nothing was changed")}
	}
	return err
}

// help is the long help: with the fields, where they can be chosen.
func (v *verb) help(set daemonSet) string {
	long := v.long
	if long == "" {
		long = v.short + "."
	}
	if v.bare {
		long += "\n\nThe noun may be left out: rnbd " + v.name + "."
	}
	if v.noun == nil || !v.words.has(outputWords) {
		return long
	}
	return long + "\n\nFields:\n" + fieldHelp(v.noun.fields) + "\nUsual fields: " + strings.Join(v.noun.usual(set), ",") +
		"\n\nChoose them as a,b or +a,-b or all. After them, or instead, may stand csv, json, xml, yaml or table;\n" +
		"a unit of B, K, M, G, T, P, E; tree or notree, noheaders, nototals."
}

func fieldHelp(fields []report.Info) string {
	var b strings.Builder
	for _, f := range fields {
		fmt.Fprintf(&b, "  %-22s %-14s %s\n", f.Name, f.Header, f.Doc)
	}
	return b.String()
}

// call is one run of a verb.
type call struct {
	cmd *cobra.Command
	*verb
	options
	set    daemonSet
	args   []string // without option words
	cancel func()
}

func newCall(cmd *cobra.Command, v *verb, set daemonSet, args []string) (*call, error) {
	o, err := readFlags(cmd)
	if err != nil {
		return nil, err
	}
	c := &call{cmd: cmd, verb: v, options: o, set: set}
	if c.args, err = c.takeWords(v, args); err != nil {
		return nil, err
	}
	for i, a := range c.args {
		c.args[i] = names.Canonical(a)
	}
	if len(c.args) < v.min {
		return nil, usageError{fmt.Errorf("write: %s %s; see %s --help", cmd.CommandPath(), v.args, cmd.CommandPath())}
	}
	ctx, cancel, err := deadline(cmd)
	if err != nil {
		return nil, err
	}
	if v.atLength {
		cancel()
		ctx, cancel = context.WithCancel(cmd.Context())
	}
	cmd.SetContext(ctx)
	c.cancel = cancel
	return c, nil
}

// arg is argument i, or "".
func (c *call) arg(i int) string {
	if i < len(c.args) {
		return c.args[i]
	}
	return ""
}

// text is the value of a flag of the verb.
func (c *call) text(flag string) string {
	f := c.cmd.Flags().Lookup(flag)
	if f == nil {
		panic("rnbd " + c.name + " has no flag " + flag)
	}
	return f.Value.String()
}

// tell prints one or more lines for people.
func (c *call) tell(format string, args ...any) error {
	_, err := fmt.Fprintf(c.cmd.OutOrStdout(), format+"\n", args...)
	return err
}

// say prints a step for the user of the command.
func (c *call) say(format string, args ...any) {
	if c.verbose {
		fmt.Fprintf(c.cmd.OutOrStdout(), format+"\n", args...)
	}
}
