package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

// usageError is a command line that cannot be run.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "rnbd",
		Short: "RDMA network block devices in userspace",
		Long: `rnbd exports block devices and files of one host to others, over RTRS.

A server daemon exports, a client daemon maps; both are controlled with this
command over a private unix socket.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		// Before anything is done: a device must not be mapped by a command
		// that then cannot tell its name.
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return checkOutput(cmd) },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.PersistentFlags().String("output", "table", "how to print: table or json")
	root.PersistentFlags().Duration("timeout", 30*time.Second, "longest time a command may take")
	root.AddCommand(newServer(), newClient(), newVersion(), newExitCodes())
	return root
}

// outputOf is the form of output asked for, as far as it could be read.
func outputOf(cmd *cobra.Command) string {
	v, err := cmd.PersistentFlags().GetString("output")
	if err != nil {
		return "table"
	}
	return v
}

func checkOutput(cmd *cobra.Command) error {
	switch outputOf(cmd.Root()) {
	case "table", "json":
		return nil
	}
	return usageError{errUnknownOutput}
}

// args wraps a check of arguments, so that a wrong number is a usage error.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, a []string) error {
		if err := check(cmd, a); err != nil {
			return usageError{fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())}
		}
		return nil
	}
}

// group is a command that only holds others.
func group(use, short string, sub ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{
		Use: use, Short: short,
		RunE: func(cmd *cobra.Command, a []string) error {
			if len(a) > 0 {
				return usageError{fmt.Errorf("unknown command %q for %q; see %s --help", a[0], cmd.CommandPath(), cmd.CommandPath())}
			}
			return cmd.Help()
		},
	}
	c.AddCommand(sub...)
	return c
}

var errUnknownOutput = errors.New("--output is table or json")
