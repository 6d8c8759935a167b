package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// newMan is for those who build packages: man pages of all commands.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use: "man FOLDER", Short: "Write man pages", Hidden: true, Args: args(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, a []string) error {
			if err := os.MkdirAll(a[0], 0o755); err != nil {
				return err
			}
			return doc.GenManTree(manRoot(), &doc.GenManHeader{Title: "RNBD", Section: "8", Source: "rnbd", Manual: "rnbd"}, a[0])
		},
	}
}

// manRoot is the command tree with each verb once: with its noun, without a
// mode.
func manRoot() *cobra.Command {
	root := newRoot()
	bare := map[string]bool{}
	for _, n := range nouns() {
		for _, v := range n.verbs {
			bare[v.name] = bare[v.name] || v.bare
		}
	}
	for _, c := range root.Commands() {
		switch {
		case c.GroupID == groupModes:
			for _, below := range c.Commands() {
				if below.Name() != "run" {
					c.RemoveCommand(below)
				}
			}
		case c.GroupID == groupVerbs && bare[c.Name()]:
			root.RemoveCommand(c)
		}
	}
	indentTables(root)
	return root
}

// indentTables makes what is indented in help a block that Markdown, which man
// pages are made of, does not fill.
func indentTables(c *cobra.Command) {
	var out []string
	for _, line := range strings.Split(c.Long, "\n") {
		if strings.HasPrefix(line, "  ") {
			if n := len(out); n > 0 && out[n-1] != "" && !strings.HasPrefix(out[n-1], "  ") {
				out = append(out, "")
			}
			line = "  " + line
		}
		out = append(out, line)
	}
	c.Long = strings.Join(out, "\n")
	for _, below := range c.Commands() {
		indentTables(below)
	}
}
