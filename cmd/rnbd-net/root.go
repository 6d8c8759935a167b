package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
)

// usageError is the error of a malformed command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "rnbd-net",
		Short: "IP over InfiniBand in user space",
		Long: `rnbd-net makes network interfaces of the type InfiniBand over RoCEv2 in user
space. "rnbd-net run" is the daemon; the other commands talk to it over a private
unix socket. The interfaces end with the daemon.`,
		Example: `  rnbd-net run --port 10.0.0.1=10.0.0.2,10.0.0.3 &
  ip addr add 192.168.50.1/24 dev ib0 && ip link set ib0 up
  rnbd-net link add ib0.8001 link ib0 pkey 0x8001
  rnbd-net link set ib0 mode connected
  rnbd-net link show
  rnbd-net pcap ib0 | tshark -r -`,
		SilenceErrors: true, SilenceUsage: true,
		Args: argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if o, _ := cmd.Flags().GetString("output"); o != "table" && o != "json" {
				return usageError{fmt.Errorf("output %q: want table or json", o)}
			}
			return nil
		},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.PersistentFlags().StringP("output", "o", "table", "how to print: table, json")
	root.PersistentFlags().String("socket", defaultSocket(), "control socket of the daemon")
	link := &cobra.Command{Use: "link", Short: "interfaces", RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }, Args: argCount(0, 0)}
	link.AddCommand(newLinkShow(), newLinkAdd(), newLinkSet(), newLinkDel())
	root.AddCommand(newRun(), link, newMcg(), newPeers(), newPcap(), newBond(), newResolve(), newRegistry(), newMan())
	addCompletion(root)
	return root
}

// argCount checks the number of arguments.
func argCount(low, high int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, a []string) error {
		if len(a) < low || len(a) > high {
			return usageError{fmt.Errorf("%d arguments; usage: %s", len(a), cmd.UseLine())}
		}
		return nil
	}
}

// defaultSocket returns the path of the control socket: in /run/rnbd for root,
// else in the user's own folder.
func defaultSocket() string {
	if os.Geteuid() == 0 {
		return "/run/rnbd/net.sock"
	}
	return filepath.Join(cmp.Or(os.Getenv("XDG_RUNTIME_DIR"), os.TempDir()), "rnbd", "net.sock")
}

// Exit codes, those of the command rnbd.
var exitCodes = []struct {
	code   int
	errnos []syscall.Errno
}{
	{3, []syscall.Errno{syscall.ENOENT, syscall.ENODEV}},
	{4, []syscall.Errno{syscall.EEXIST, syscall.ENOTUNIQ, syscall.EADDRINUSE}},
	{5, []syscall.Errno{syscall.EBUSY}},
	{6, []syscall.Errno{syscall.EPERM, syscall.EACCES}},
	{7, []syscall.Errno{syscall.ECONNREFUSED}},
	{2, []syscall.Errno{syscall.EINVAL}},
}

func exitCode(err error) int {
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		return 2
	case errors.Is(err, errNoDaemon):
		return 7
	case errors.Is(err, context.Canceled):
		return 130
	}
	for _, row := range exitCodes {
		for _, e := range row.errnos {
			if errors.Is(err, e) {
				return row.code
			}
		}
	}
	return 1
}
