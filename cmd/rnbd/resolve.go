package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

// resolve turns a command line into the form that cobra expects: full words,
// the noun before the verb, commands before flags.
//
// A word may be shortened as long as it fits one command. If it fits several,
// the word after it decides: "cl dev" is the client, since no other command
// that starts with "cl" has a word that starts with "dev".
func resolve(root *cobra.Command, args []string) ([]string, error) {
	r := resolver{node: root}
	if err := r.walk(args); err != nil {
		return nil, err
	}
	return append(r.words, r.rest...), nil
}

type resolver struct {
	node  *cobra.Command
	words []string // that lead to node
	rest  []string // flags and arguments
}

func (r *resolver) walk(args []string) error {
	for i := 0; i < len(args); i++ {
		a := args[i]
		if a == "--" {
			r.rest = append(r.rest, args[i:]...)
			return nil
		}
		if strings.HasPrefix(a, "-") && a != "-" {
			a = foreignFlag(a)
			if spec, ok := listSpec(r.node, a); ok {
				a = spec
			}
			r.rest = append(r.rest, a)
			if takesValue(r.node, a) && i+1 < len(args) {
				i++
				r.rest = append(r.rest, args[i])
			}
			continue
		}
		if !r.node.HasSubCommands() {
			return r.arguments(args[i:])
		}
		next, err := find(r.node, a, nextWord(r.node, args[i+1:]))
		if err != nil {
			return err
		}
		r.descend(next)
		if next.Name() == "help" {
			return r.topic(args[i+1:])
		}
	}
	return nil
}

func (r *resolver) descend(c *cobra.Command) {
	r.node = c
	r.words = append(r.words, c.Name())
}

// arguments resolves the words after a verb. The noun may be the first, and
// "help" the last.
func (r *resolver) arguments(args []string) error {
	if n := r.nounAfter(args); n != nil {
		r.words = append(r.words[:len(r.words)-1], n.Parent().Name(), n.Name())
		r.node, args = n, args[1:]
	}
	if r.node.Annotations[verbOf] != "" && asksForHelp(args) {
		r.rest = append(r.rest, "--help")
		return nil
	}
	for i, a := range args {
		if a == "--" {
			r.rest = append(r.rest, args[i:]...)
			return nil
		}
		isValue := i > 0 && strings.HasPrefix(args[i-1], "-") && takesValue(r.node, args[i-1])
		if !isValue {
			a = foreignFlag(a)
			if spec, ok := listSpec(r.node, a); ok {
				a = spec
			}
		}
		r.rest = append(r.rest, a)
	}
	return nil
}

// asksForHelp reports whether args end in "help", "help fields" or "help all".
func asksForHelp(args []string) bool {
	n := len(args)
	if n > 1 && (args[n-1] == "all" || args[n-1] == "fields") {
		n--
	}
	return n > 0 && args[n-1] == "help"
}

// nounAfter returns the command for "VERB NOUN", or nil if the word after the
// verb is no noun. Only list accepts a shortened noun, because list has no
// arguments of its own.
func (r *resolver) nounAfter(args []string) *cobra.Command {
	verb := r.node.Annotations[verbOf]
	if verb == "" || r.node.GroupID != groupVerbs || len(args) == 0 {
		return nil
	}
	for _, n := range r.node.Parent().Commands() {
		if n.GroupID != groupNouns {
			continue
		}
		whole := args[0] == n.Name() || n.HasAlias(args[0])
		short := verb == "list" && args[0] != "" && strings.HasPrefix(n.Aliases[0], args[0])
		if short || whole && len(args) > 1 {
			for _, c := range n.Commands() {
				if c.Name() == verb {
					return c
				}
			}
		}
	}
	return nil
}

// topic resolves the words after help as far as they are commands.
func (r *resolver) topic(args []string) error {
	about := resolver{node: r.node.Root()}
	if err := about.walk(args); err != nil {
		return err
	}
	r.rest = append(about.words, r.rest...)
	return nil
}

// resolveCompletion resolves a request of a shell. The first word is the
// request itself. The last one is not complete yet.
func resolveCompletion(root *cobra.Command, args []string) []string {
	if len(args) < 3 {
		return args
	}
	last := len(args) - 1
	line, err := resolve(root, args[1:last])
	if err != nil {
		return args
	}
	return append(append(args[:1:1], line...), args[last])
}

// find returns the command below node for word.
func find(node *cobra.Command, word, next string) (*cobra.Command, error) {
	fits := matching(node, word)
	if len(fits) == 1 {
		return fits[0], nil
	}
	if len(fits) == 0 {
		return nil, unknownCommand(node, word)
	}
	var sure []*cobra.Command
	for _, c := range fits {
		if next != "" && len(matching(c, next)) > 0 {
			sure = append(sure, c)
		}
	}
	if len(sure) == 1 {
		return sure[0], nil
	}
	var names []string
	for _, c := range fits {
		for _, n := range append([]string{c.Name()}, c.Aliases...) {
			if strings.HasPrefix(n, word) {
				names = append(names, n)
				break
			}
		}
	}
	slices.Sort(names)
	return nil, usageError{fmt.Errorf("%q is short for several commands: %s", word, strings.Join(names, ", "))}
}

// matching returns the commands below node that are named word, or begin with
// it. Groups of newer nouns are left out where an older command fits, so that its short
// forms stay what they were.
func matching(node *cobra.Command, word string) (fits []*cobra.Command) {
	if word == "" {
		return nil
	}
	for _, c := range node.Commands() {
		if c.Name() == word || c.HasAlias(word) {
			return []*cobra.Command{c}
		}
		if c.Hidden {
			continue
		}
		if slices.ContainsFunc(append([]string{c.Name()}, c.Aliases...), func(n string) bool { return strings.HasPrefix(n, word) }) {
			fits = append(fits, c)
		}
	}
	older := slices.DeleteFunc(slices.Clone(fits), func(c *cobra.Command) bool { return c.Annotations[newerNoun] != "" })
	if len(older) > 0 {
		return older
	}
	return fits
}

func unknownCommand(node *cobra.Command, word string) error {
	var names []string
	for _, c := range node.Commands() {
		if !c.Hidden {
			names = append(append(names, c.Name()), c.Aliases...)
		}
	}
	slices.Sort(names)
	hint := foreignHint(word)
	suggestion := ""
	if hint == "" {
		suggestion = spell.Suggest(word, names)
	}
	return hinted{usageError{fmt.Errorf("unknown command %q for %q%s; see %s --help", word, node.CommandPath(), suggestion, node.CommandPath())}, hint}
}

// nextWord is the first of args that is no flag.
func nextWord(node *cobra.Command, args []string) string {
	for i := 0; i < len(args); i++ {
		switch a := args[i]; {
		case !strings.HasPrefix(a, "-"):
			return a
		case takesValue(node, a):
			i++
		}
	}
	return ""
}

// takesValue reports whether the value of a flag is the next argument.
func takesValue(node *cobra.Command, arg string) bool {
	name := strings.TrimLeft(arg, "-")
	if strings.Contains(arg, "=") || name == "" {
		return false
	}
	var f *pflag.Flag
	for _, set := range []*pflag.FlagSet{node.Flags(), node.PersistentFlags(), node.InheritedFlags()} {
		switch {
		case f != nil:
		case strings.HasPrefix(arg, "--"):
			f = set.Lookup(name)
		case len(name) == 1:
			f = set.ShorthandLookup(name)
		}
	}
	return f != nil && f.NoOptDefVal == ""
}
