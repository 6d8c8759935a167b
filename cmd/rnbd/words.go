package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

// wordSet are the kinds of options that a verb takes as words after its
// arguments. Each is a flag, too.
type wordSet uint8

const (
	outputWords wordSet = 1 << iota // fields, formats, units, tree, ...
	forceWord
	accessWords
	missingWord
	statsWord
	acceptWord
)

func (s wordSet) has(one wordSet) bool { return s&one != 0 }

// options are the values of words and flags.
type options struct {
	report.Options
	chosen  string // fields
	access  string
	force   bool
	missing bool
	accept  bool
	stats   bool
	verbose bool
}

// optionWord is an option in the form of a word.
type optionWord struct {
	kind wordSet // 0: of every verb
	name string
	doc  string
	set  func(*options)
}

var optionWordTable = []optionWord{
	{outputWords, "tree", "with the paths of each session", func(o *options) { o.NoTree = false }},
	{outputWords, "notree", "without the paths of each session", func(o *options) { o.NoTree = true }},
	{outputWords, "noheaders", "without headers", func(o *options) { o.NoHeaders = true }},
	{outputWords, "nototals", "without the line of totals", func(o *options) { o.NoTotals = true }},
	{forceWord, "force", "even if it is in use or works", func(o *options) { o.force = true }},
	{accessWords, "ro", "map it read-only", func(o *options) { o.access = "ro" }},
	{accessWords, "rw", "map it for reading and writing", func(o *options) { o.access = "rw" }},
	{accessWords, "migration", "map it where another may write too", func(o *options) { o.access = "migration" }},
	{missingWord, "add-missing", "add the paths that other sessions with the server have", func(o *options) { o.missing = true }},
	{acceptWord, "accept-new", "also where the name leads to another volume by now", func(o *options) { o.accept = true }},
	{statsWord, "stats", "with the time of requests, by stage and operation", func(o *options) { o.stats = true }},
	{0, "verbose", "print what is done", func(o *options) { o.verbose = true }},
}

// flags defines the words as flags.
func (s wordSet) flags(f *pflag.FlagSet) {
	if s.has(outputWords) {
		f.StringP("fields", "f", "", "fields to print: a,b or +a,-b or all")
		f.StringP("unit", "u", "", "unit of sizes: B, K, M, G, T, P or E")
		f.Bool("notree", false, "without the paths of each session")
		f.Bool("noheaders", false, "without headers")
		f.Bool("nototals", false, "without the line of totals")
	}
	if s.has(forceWord) {
		f.Bool("force", false, "even if it is in use or works; requests under way fail")
	}
	if s.has(accessWords) {
		f.String("access", "rw", "ro, rw or migration")
	}
	if s.has(statsWord) {
		f.Bool("stats", false, "with the time of requests, by stage and operation")
	}
	if s.has(acceptWord) {
		f.Bool("accept-new", false, "also where the name leads to another volume by now")
	}
	if s.has(missingWord) {
		f.Bool("add-missing", false, "add the paths that other sessions with the server have")
	}
}

// readFlags reads those that the command has.
func readFlags(cmd *cobra.Command) (o options, err error) {
	f := cmd.Flags()
	text := func(name string) string {
		if l := f.Lookup(name); l != nil {
			return l.Value.String()
		}
		return ""
	}
	on := func(name string) bool { return text(name) == "true" }
	o.Format = text("output")
	screen(cmd, &o.Options)
	o.chosen, o.access = text("fields"), text("access")
	o.NoTree, o.NoHeaders, o.NoTotals = on("notree"), on("noheaders"), on("nototals")
	o.force, o.missing, o.accept, o.stats, o.verbose = on("force"), on("add-missing"), on("accept-new"), on("stats"), on("verbose")
	if u := text("unit"); u != "" {
		var ok bool
		if o.Unit, ok = report.ParseUnit(u); !ok {
			return o, usageError{fmt.Errorf("--unit %q: use one of B, K, M, G, T, P, E", u)}
		}
	}
	return o, nil
}

// takeWords sets the options among args and returns the rest. The first
// v.min arguments are none.
func (o *options) takeWords(v *verb, args []string) (rest []string, err error) {
	for _, w := range args {
		switch {
		case v.mayBeOption(rest, w) && o.takeWord(v, w):
		case v.max >= 0 && len(rest) >= v.max:
			return nil, usageError{fmt.Errorf("%s does not take %q%s", v.name, w, spell.Suggest(w, v.knownWords()))}
		default:
			rest = append(rest, w)
		}
	}
	return rest, nil
}

// mayBeOption reports whether w may be an option: it is none of the first
// arguments and does not follow a keyword.
func (v *verb) mayBeOption(before []string, w string) bool {
	n := len(before)
	announced := v.keyword != "" && n > 0 && before[n-1] == v.keyword
	return n >= v.min && !announced || strings.HasPrefix(w, ",-")
}

func (o *options) takeWord(v *verb, w string) bool {
	for _, known := range optionWordTable {
		if w == known.name && (known.kind == 0 || v.words.has(known.kind)) {
			known.set(o)
			return true
		}
	}
	if !v.words.has(outputWords) {
		return false
	}
	if slices.Contains(report.Formats, w) {
		if o.Format = w; w == report.Wide {
			o.Width = 0
		}
		return true
	}
	if unit, ok := report.ParseUnit(w); ok && w == strings.ToUpper(w) {
		o.Unit = unit
		return true
	}
	if v.isFields(w) {
		o.chosen += "," + w
		return true
	}
	return false
}

// isFields reports whether w chooses fields. Of several kinds only all of them
// can be chosen, unless one object is shown.
func (v *verb) isFields(w string) bool {
	fields := v.fields()
	if len(fields) == 0 {
		return w == report.All
	}
	return report.IsSpec(fields, w)
}

// fields are those that v prints.
func (v *verb) fields() []report.Info {
	if v.noun != nil {
		return v.noun.fields
	}
	return v.anyFields
}

// knownWords returns all option words of v.
func (v *verb) knownWords() (out []string) {
	for _, known := range optionWordTable {
		if known.kind == 0 || v.words.has(known.kind) {
			out = append(out, known.name)
		}
	}
	if v.words.has(outputWords) {
		out = append(append(out, report.Formats...), report.All)
		for _, f := range v.fields() {
			out = append(out, f.Name)
		}
	}
	return out
}

// listSpec turns an argument that looks like a flag into a word: "-state"
// removes a field and is no flag of cmd. It returns the word with an empty name
// in front, so that it is not parsed as a flag.
func listSpec(cmd *cobra.Command, arg string) (word string, ok bool) {
	if len(arg) < 3 || arg[0] != '-' || arg[1] == '-' || cmd.Flags().Lookup("fields") == nil {
		return "", false
	}
	short := cmd.Flags().ShorthandLookup(arg[1:2])
	if short == nil {
		short = cmd.InheritedFlags().ShorthandLookup(arg[1:2])
	}
	if short != nil && !strings.Contains(cmd.Long, "\n  "+strings.SplitN(arg[1:], ",", 2)[0]+" ") {
		return "", false
	}
	return "," + arg, true
}
