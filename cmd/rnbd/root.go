package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
)

// usageError is a command line that cannot be run.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func newRoot() *cobra.Command {
	root := group("rnbd", "RDMA network block devices in userspace")
	root.Long = `rnbd exports block devices and files of one host to others, over RTRS.

A server daemon exports, a client daemon maps; both are controlled with this
command over a private unix socket:

  rnbd [client|server] [device|session|path] COMMAND [ARGUMENTS] [OPTIONS]

The mode may be left out: a command that both daemons know asks those that
run. So may the noun, where the command has one only. Every word may be
shortened as long as it is clear, and "rnbd list sessions" is "rnbd session
list".`
	root.Example = `  rnbd map disk.img from 10.0.0.1
  rnbd list
  rnbd session list +hostname json
  rnbd unmap rnbd0`
	root.SilenceErrors, root.SilenceUsage = true, true
	// This check comes before anything is done: a command must not map a
	// device and then fail to print its name.
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return checkOutput(cmd) }
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return hinted{usageError{flagError(err)}, flagHint(c, err)} })
	f := root.PersistentFlags()
	f.StringP("output", "o", "table", "how to print: "+strings.Join(report.Formats, ", "))
	f.Duration("timeout", 30*time.Second, "longest time a command may take")
	f.String("socket", "", "control socket of the daemon, or the folder of client.sock and server.sock (default $RNBD_SOCKET, else /run/rnbd or the user's own)")
	remoteFlags(f)
	f.BoolP("verbose", "v", false, "print what is done")
	root.AddGroup(&cobra.Group{ID: groupModes, Title: "Daemons:"})
	for _, m := range modes {
		c := group(m.name, m.short)
		c.GroupID = groupModes
		run := newRun[m.name]()
		completeFlags(run, nil)
		c.AddCommand(run)
		addVerbs(c, m.set)
		root.AddCommand(c)
	}
	completeFlags(root, nil)
	addVerbs(root, onBoth)
	root.AddCommand(newBundle(), newConfig(), newDiscover(), newDoctor(), newExplain(), newPSK(), newVersion(), newExitCodes(), newMan())
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	return root
}

// flagError names a wrong value without the function that has read it.
func flagError(err error) error {
	var number *strconv.NumError
	if !errors.As(err, &number) {
		return err
	}
	return errors.New(strings.Replace(err.Error(), number.Error(), fmt.Sprintf("%q: %v", number.Num, number.Err), 1))
}

var newRun = map[string]func() *cobra.Command{"client": newClientRun, "server": newServerRun}

// execute runs a command line.
func execute(ctx context.Context, root *cobra.Command, args []string) error {
	if len(args) > 0 && (args[0] == cobra.ShellCompRequestCmd || args[0] == cobra.ShellCompNoDescRequestCmd) {
		args = resolveCompletion(root, args)
	} else {
		var err error
		if len(args) == 1 && args[0] == "--version" {
			args = []string{"version"}
		}
		if args, err = resolve(root, args); err != nil {
			return err
		}
	}
	root.SetArgs(append([]string{}, args...)) // cobra takes nil for the process's own
	err := root.ExecuteContext(ctx)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) { // a daemon that was starting
		return interruptedError{"nothing was started"}
	}
	return err
}

func checkOutput(cmd *cobra.Command) error {
	o, err := cmd.Flags().GetString("output")
	if err != nil {
		return err
	}
	if !slices.Contains(report.Formats, o) {
		return usageError{fmt.Errorf("--output %q: use one of %s", o, strings.Join(report.Formats, ", "))}
	}
	return nil
}

// errorFormat returns the format for printing an error. It reads the command
// line once more, since the error may be there.
func errorFormat(args []string) string {
	for i, a := range args {
		value, isFlag := strings.CutPrefix(foreignFlag(a), "--output=")
		short, isShort := strings.CutPrefix(a, "-o")
		switch {
		case isFlag:
		case isShort:
			value = strings.TrimPrefix(short, "=")
		case i == 0:
			continue
		case args[i-1] != "-o" && args[i-1] != "--output" && strings.HasPrefix(args[i-1], "-"):
			continue // the value of another flag
		}
		if slices.Contains(report.Formats, value) && (report.Options{Format: value}).Machine() {
			return value
		}
	}
	return "table"
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

var errNumber = errors.New("is not a number")
