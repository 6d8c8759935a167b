package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// newMan is for builders of packages: a man page for each command.
func newMan() *cobra.Command {
	return &cobra.Command{Use: "man FOLDER", Short: "write man pages", Hidden: true, Args: argCount(1, 1),
		RunE: func(cmd *cobra.Command, a []string) error {
			if err := os.MkdirAll(a[0], 0o755); err != nil {
				return err
			}
			return writeMan(cmd.Root(), a[0])
		}}
}

// writeMan writes the page of a command and those of the commands below. Daemons
// are in section 8.
func writeMan(c *cobra.Command, folder string) error {
	name, section := strings.ReplaceAll(c.CommandPath(), " ", "-"), 1
	if c.Name() == "run" {
		section = 8
	}
	if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("%s.%d", name, section)), []byte(manPage(c, name, section)), 0o644); err != nil {
		return err
	}
	for _, below := range c.Commands() {
		if !below.IsAvailableCommand() || below.Name() == "help" || below.Name() == "completion" {
			continue
		}
		if err := writeMan(below, folder); err != nil {
			return err
		}
	}
	return nil
}

func manPage(c *cobra.Command, name string, section int) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %s %d \"\" \"rnbd\" \"rnbd\"\n.ad l\n.nh\n.SH NAME\n%s \\- %s\n", strings.ToUpper(escapeRoff(name)), section, escapeRoff(name), escapeRoff(c.Short))
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B %s\n", escapeRoff(c.UseLine()))
	long := c.Long
	if long == "" {
		long = c.Short + "."
	}
	fmt.Fprintf(&b, ".SH DESCRIPTION\n%s\n", escapeRoff(long))
	manFlags(&b, "OPTIONS", c.NonInheritedFlags())
	manFlags(&b, "OPTIONS OF ALL COMMANDS", c.InheritedFlags())
	if c.Example != "" {
		fmt.Fprintf(&b, ".SH EXAMPLES\n.EX\n%s\n.EE\n", escapeRoff(c.Example))
	}
	var below []string
	for _, s := range c.Commands() {
		if s.IsAvailableCommand() && s.Name() != "help" && s.Name() != "completion" {
			below = append(below, fmt.Sprintf(".TP\n.B %s\n%s\n", escapeRoff(s.Name()), escapeRoff(s.Short)))
		}
	}
	if len(below) > 0 {
		b.WriteString(".SH COMMANDS\n" + strings.Join(below, ""))
	}
	if c.HasParent() {
		b.WriteString(".SH SEE ALSO\n.BR rnbd\\-net (1)\n")
	}
	return b.String()
}

func manFlags(b *strings.Builder, title string, flags *pflag.FlagSet) {
	var text strings.Builder
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" {
			return
		}
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		value, usage := pflag.UnquoteUsage(f)
		if f.DefValue != "" && f.DefValue != "[]" && f.DefValue != "0" {
			usage += " (default " + f.DefValue + ")"
		}
		fmt.Fprintf(&text, ".TP\n.B %s\n%s\n", escapeRoff(strings.TrimSpace(name+" "+value)), escapeRoff(usage))
	})
	if text.Len() > 0 {
		b.WriteString(".SH " + title + "\n" + text.String())
	}
}

// escapeRoff returns text that roff(7) prints as it is.
func escapeRoff(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`).Replace(s)
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, ".") {
			lines[i] = `\&` + l
		}
	}
	return strings.Join(lines, "\n")
}
