package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/modules/bond/core"
)

// argChoices returns the possible values of an argument of a command.
type argChoices func(cmd *cobra.Command) []string

// linkNames, bondNames and slaveNames ask the daemon.
func linkNames(cmd *cobra.Command) (names []string) {
	list, _ := fetchList[linkInfo](cmd, "/links", nil) // nothing is completed without a daemon
	for _, l := range list {
		names = append(names, l.Name)
	}
	return names
}

func bondNames(cmd *cobra.Command) (names []string) {
	list, _ := fetchList[bondInfo](cmd, "/bonds", nil)
	for _, b := range list {
		names = append(names, b.Name)
	}
	return names
}

func slaveNames(cmd *cobra.Command) (names []string) {
	list, _ := fetchList[bondInfo](cmd, "/bonds", nil)
	for _, b := range list {
		names = append(names, b.Slaves...)
	}
	return names
}

func optionNames(*cobra.Command) (names []string) {
	for _, o := range core.OptionNames() {
		if core.Settable(o) {
			names = append(names, o)
		}
	}
	return names
}

func fixedChoices(w ...string) argChoices { return func(*cobra.Command) []string { return w } }

// completions are the arguments that the shell completes, by command.
var completions = map[string][]argChoices{
	"link show":    {linkNames},
	"link set":     {linkNames, fixedChoices("mode", "mtu", "umcast")},
	"link del":     {linkNames},
	"link add":     {nil, fixedChoices("link"), linkNames, fixedChoices("pkey", "mode", "mtu", "umcast")},
	"mcg":          {linkNames},
	"peers":        {linkNames},
	"pcap":         {func(cmd *cobra.Command) []string { return append(linkNames(cmd), bondNames(cmd)...) }},
	"bond show":    {bondNames},
	"bond del":     {bondNames},
	"bond enslave": {bondNames, linkNames},
	"bond release": {bondNames, slaveNames},
	"bond set":     {bondNames, optionNames},
}

// addCompletion lets the shell complete arguments.
func addCompletion(root *cobra.Command) {
	for name, args := range completions {
		cmd, _, err := root.Find(strings.Fields(name))
		if err != nil {
			panic(err) // a command that was renamed
		}
		cmd.ValidArgsFunction = func(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(a) >= len(args) || args[len(a)] == nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			cmd.SetContext(ctx)
			return args[len(a)](cmd), cobra.ShellCompDirectiveNoFileComp
		}
	}
}
