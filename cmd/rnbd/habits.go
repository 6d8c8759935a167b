package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

// foreignWords are commands of other tools, with what does the same here.
var foreignWords = map[string]string{
	"rm":     "`rnbd unmap DEVICE` takes a device off this host, `rnbd path delete [SESSION] PATH` a path off a session",
	"attach": "`rnbd map DEVICE from SERVER` attaches a device of a server",
	"mount":  "`rnbd map DEVICE from SERVER` makes a block device, which mount(8) then mounts",
	"detach": "`rnbd unmap DEVICE` detaches a device",
	"umount": "`rnbd unmap DEVICE` detaches a device, after umount(8)",
	"info":   "`rnbd show [NAME]` shows all about a device, session, path or the daemons",
	"start":  "`rnbd server run` and `rnbd client run` start the daemons",
	"stop":   "a daemon ends by SIGTERM; `systemctl stop rnbd-client` or `rnbd-server` where systemd runs it",
	"reload": "`rnbd config reload` has the daemons read their configuration again",
}

// foreignFlag returns the flags of this program for one of others.
func foreignFlag(arg string) string {
	if arg == "--json" {
		return "--output=json"
	}
	return arg
}

// flagHint returns what to write instead of a flag that err is about, "" if that is
// not known.
func flagHint(c *cobra.Command, err error) string {
	var missing *pflag.ValueRequiredError
	if errors.As(err, &missing) && missing.GetSpecifiedName() == "f" && c.Flags().Lookup("fields") != nil {
		return "-f chooses fields, as -f state; `rnbd list --watch` and `rnbd events --follow` show what changes"
	}
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return ""
	}
	name, has := unknown.GetSpecifiedName(), func(flag string) bool { return c.Flags().Lookup(flag) != nil }
	switch {
	case name == "f" && has("force"):
		return "write --force"
	case name == "f":
		return "`rnbd events --follow` prints events as they come"
	case name == "w":
		return "`rnbd list --watch` and `rnbd top` print again and again"
	case len(name) > 1:
		if nearest := spell.Nearest(name, flagNames(c)); nearest != "" {
			return "did you mean --" + nearest + "?"
		}
	}
	return fmt.Sprintf("`%s --help` lists the flags", c.CommandPath())
}

func flagNames(c *cobra.Command) (names []string) {
	c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return names
}

// foreignHint returns what does the same as the word of another tool, "" if that is
// not known.
func foreignHint(word string) string { return foreignWords[strings.ToLower(word)] }
