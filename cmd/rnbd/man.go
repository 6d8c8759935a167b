package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// newMan is for builders of packages: man pages of all commands, of the
// configuration files, and an overview.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use: "man FOLDER", Short: "Write man pages", Hidden: true, Args: args(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, a []string) error {
			if err := os.MkdirAll(a[0], 0o755); err != nil {
				return err
			}
			var errs []error
			for _, p := range manPages() {
				errs = append(errs, os.WriteFile(filepath.Join(a[0], fmt.Sprintf("%s.%d", p.name, p.section)), []byte(p.roff()), 0o644))
			}
			return errors.Join(errs...)
		},
	}
}

// manPage is one page. Users look for the page by name.
type manPage struct {
	name    string
	section int
	short   string
	parts   []manPart
}

// manPart is a part of a page: a heading, and roff behind it.
type manPart struct{ title, text string }

// manPages are all pages.
func manPages() (pages []manPage) {
	root := manRoot()
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, below := range c.Commands() {
			if below.IsAvailableCommand() && below.Name() != "help" {
				walk(below)
			}
		}
		if c != root && !c.HasSubCommands() {
			pages = append(pages, commandPage(c))
		}
	}
	walk(root)
	pages = append(pages, configPage("client"), configPage("server"), accessPage())
	return append(pages, overviewPage(root, pages))
}

// manRoot returns the command tree with each verb once, by its shortest words
// and without a mode.
func manRoot() *cobra.Command {
	root := newRoot()
	for _, c := range root.Commands() {
		for _, below := range c.Commands() {
			if c.GroupID == groupModes && below.Name() != "run" || c.GroupID == groupNouns && isBare(root, c, below) {
				c.RemoveCommand(below)
			}
		}
	}
	return root
}

// isBare reports whether a verb of a noun stands below root without the noun, and
// means the same there.
func isBare(root, noun, verb *cobra.Command) bool {
	for _, n := range nouns() {
		for _, v := range n.verbs {
			if n.name == noun.Name() && v.name == verb.Name() && v.bare {
				return slices.ContainsFunc(root.Commands(), func(c *cobra.Command) bool { return c.Name() == v.name })
			}
		}
	}
	return false
}

// commandPage is the page of a command. Daemons are in section 8.
func commandPage(c *cobra.Command) manPage {
	p := manPage{name: strings.ReplaceAll(c.CommandPath(), " ", "-"), section: 1, short: c.Short}
	if c.Name() == "run" {
		p.section = 8
	}
	p.add("SYNOPSIS", ".B "+escape(c.CommandPath())+"\n"+prose(strings.TrimSpace(strings.TrimPrefix(c.Use, c.Name())+" [OPTIONS]")))
	long := c.Long
	if long == "" {
		long = c.Short + "."
	}
	p.add("DESCRIPTION", prose(long))
	p.add("OPTIONS", manFlags(c.NonInheritedFlags()))
	p.add("OPTIONS OF ALL COMMANDS", manFlags(c.InheritedFlags()))
	if c.Example != "" {
		p.add("EXAMPLES", verbatim(c.Example))
	}
	p.add("SEE ALSO", ".BR rnbd (7)")
	return p
}

func (p *manPage) add(title, text string) {
	if text != "" {
		p.parts = append(p.parts, manPart{title, text})
	}
}

// overviewPage is rnbd(7).
func overviewPage(root *cobra.Command, pages []manPage) manPage {
	p := manPage{name: "rnbd", section: 7, short: root.Short}
	p.add("DESCRIPTION", prose(root.Long))
	var list strings.Builder
	for _, page := range pages {
		fmt.Fprintf(&list, ".TP\n.BR %s (%d)\n%s", escape(page.name), page.section, prose(page.short))
	}
	p.add("PAGES", list.String())
	p.add("EXIT CODES", verbatim("  "+strings.ReplaceAll(strings.TrimSpace(exitCodes()), "\n", "\n  ")))
	p.add("ENVIRONMENT", ".TP\n.B RNBD_SOCKET\n"+prose("Control socket of the daemon, or the folder of both, where --socket is not given.")+
		".TP\n.B NO_COLOR\n"+prose("States have no colours on a terminal.")+
		".TP\n.B COLUMNS\n"+prose("Width of tables on a terminal."))
	p.add("FILES", ".TP\n.I "+systemConfig+"/client.d, "+systemConfig+"/server.d\n"+prose("Configuration of root's daemons.")+
		".TP\n.I "+rootFolder+"\n"+prose("Control sockets and state of root's daemons."))
	p.add("EXAMPLES", verbatim(root.Example))
	return p
}

// configPage is the page of a daemon's configuration files.
func configPage(kind string) manPage {
	p := manPage{name: "rnbd-" + kind + ".yaml", section: 5, short: "configuration of the " + kind + " daemon of rnbd"}
	run, _ := clientRun()
	if kind == "server" {
		run, _ = serverRun()
	}
	p.add("DESCRIPTION", prose("The daemon reads the file that --config names, then the files *.yaml of the folder "+systemConfig+"/"+kind+
		".d in the order of their names. Of a key that stands in several files the last counts; flags on the command line win. "+
		"A key that does not exist is an error. The keys are the flags of rnbd "+kind+" run."))
	var keys strings.Builder
	run.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" && f.Name != "config" && f.Name != "config-dir" {
			fmt.Fprintf(&keys, ".TP\n.B %s:\n%s", escape(f.Name), prose(flagText(f)))
		}
	})
	p.add("KEYS", keys.String())
	if kind == "client" {
		var list strings.Builder
		for _, key := range slices.Sorted(mapKeys(mappingKeys)) {
			fmt.Fprintf(&list, ".TP\n.B %s:\n%s", escape(key), prose(mappingKeys[key]))
		}
		p.add("MAPPINGS", prose("The key mappings has a list of what the client keeps mapped. Each has these keys:")+list.String())
		p.add("EXAMPLES", verbatim("  loss: queue:30s\n  mappings:\n    - device: vg0/db\n      server: [10.0.0.1, 10.1.0.1]\n      name: db"))
	} else {
		p.add("EXAMPLES", verbatim("  search-path: /srv/images\n  listen:\n    - iwarp://10.0.0.1:1234\n  queue-depth: 512"))
	}
	also := fmt.Sprintf(".BR rnbd-%s-run (8),\n.BR rnbd-config-check (1),\n", kind)
	if kind == "server" {
		also += ".BR rnbd-access (5),\n"
	}
	p.add("SEE ALSO", also+".BR rnbd (7)")
	return p
}

func mapKeys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// manFlags describes flags. Defaults that depend on the machine that writes the
// page are left out.
func manFlags(flags *pflag.FlagSet) string {
	var b strings.Builder
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		b.WriteString(".TP\n")
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if f.Value.Type() != "bool" && f.NoOptDefVal == "" {
			name += " " + strings.ToUpper(strings.TrimSuffix(strings.TrimSuffix(f.Value.Type(), "Array"), "ToString"))
		}
		b.WriteString(".B " + escape(name) + "\n" + prose(flagText(f)))
	})
	return b.String()
}

// flagText returns the usage of a flag with its default.
func flagText(f *pflag.Flag) string {
	switch def := f.DefValue; {
	case def == defaultPluginDir():
		return f.Usage + " (default: that of rnbd)"
	case f.Name == "device-links": // its default depends on the user that writes the page
		return f.Usage + " (default of root's daemon: " + rootLinkDir + ")"
	case def == "" || def == "false" || def == "[]" || def == "0" || strings.Contains(f.Usage, "(default"):
		return f.Usage
	default:
		return f.Usage + " (default: " + def + ")"
	}
}

// roff is the source of the page.
func (p manPage) roff() string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %s %d \"\" \"rnbd\" \"rnbd\"\n.SH NAME\n%s \\- %s\n", strings.ToUpper(escape(p.name)), p.section, escape(p.name), escape(p.short))
	for _, part := range p.parts {
		fmt.Fprintf(&b, ".SH %s\n%s", part.title, part.text)
		if !strings.HasSuffix(part.text, "\n") {
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// prose returns text with filled lines. Indented lines stay as they are.
func prose(s string) string {
	var b strings.Builder
	inside := false // an indented block
	for i, line := range strings.Split(strings.Trim(s, "\n"), "\n") {
		indented := strings.HasPrefix(line, "  ")
		switch {
		case indented && !inside:
			b.WriteString(".PP\n.EX\n")
		case !indented && inside:
			b.WriteString(".EE\n")
			if line != "" {
				b.WriteString(".PP\n")
			}
		}
		inside = indented
		switch {
		case line == "" && i > 0:
			b.WriteString(".PP\n")
		case line != "":
			b.WriteString(guard(escape(line)) + "\n")
		}
	}
	if inside {
		b.WriteString(".EE\n")
	}
	return strings.ReplaceAll(b.String(), ".PP\n.PP\n", ".PP\n")
}

// verbatim returns text with its lines as they are.
func verbatim(s string) string {
	var b strings.Builder
	b.WriteString(".EX\n")
	for _, line := range strings.Split(strings.Trim(s, "\n"), "\n") {
		b.WriteString(guard(escape(line)) + "\n")
	}
	return b.String() + ".EE\n"
}

// guard keeps a line from being taken for a request.
func guard(line string) string {
	if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
		return `\&` + line
	}
	return line
}

// escape writes text so that roff prints it as it is.
func escape(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '\\':
			b.WriteString(`\e`)
		case r == '-':
			b.WriteString(`\-`)
		case r == '\'':
			b.WriteString(`\(aq`)
		case r == '`':
			b.WriteString(`\(ga`)
		case r == '"':
			b.WriteString(`\(dq`)
		case r == '^':
			b.WriteString(`\(ha`)
		case r == '~':
			b.WriteString(`\(ti`)
		case r > 126:
			fmt.Fprintf(&b, `\[u%04X]`, r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}
