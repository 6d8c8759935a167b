package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
)

// Exit codes. They are stable: scripts may rely on them.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitExists      = 4
	exitBusy        = 5
	exitDenied      = 6
	exitUnreachable = 7
	exitTimeout     = 8

	// exitInterrupted is that of shells for a command that SIGINT ended.
	exitInterrupted = 130
)

var exitTable = []struct {
	code   int
	what   string
	errnos []syscall.Errno
}{
	{exitNotFound, "no such device, session, path or file", []syscall.Errno{syscall.ENOENT, syscall.ENXIO, syscall.ENODEV, syscall.ENOTBLK}},
	{exitExists, "it is there already", []syscall.Errno{syscall.EEXIST, syscall.EALREADY, syscall.EADDRINUSE}},
	{exitBusy, "it is in use", []syscall.Errno{syscall.EBUSY, syscall.ENOTEMPTY}},
	{exitDenied, "not permitted", []syscall.Errno{syscall.EPERM, syscall.EACCES, syscall.EROFS}},
	{exitUnreachable, "the daemon or the server cannot be reached", []syscall.Errno{syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.ENOTCONN, syscall.EHOSTUNREACH, syscall.ENETUNREACH}},
	{exitTimeout, "it took longer than allowed", []syscall.Errno{syscall.ETIMEDOUT}},
	{exitUsage, "the command line or the configuration is wrong", []syscall.Errno{syscall.EINVAL, syscall.EADDRNOTAVAIL}},
}

func exitCode(err error) int {
	var usage usageError
	var stopped interruptedError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &stopped):
		return exitInterrupted
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, context.DeadlineExceeded):
		return exitTimeout
	case errors.Is(err, fs.ErrPermission), errors.As(err, &refusedError{}):
		return exitDenied
	case errors.Is(err, errNoDaemon):
		return exitUnreachable
	}
	for _, row := range exitTable {
		for _, errno := range row.errnos {
			if errors.Is(err, errno) {
				return row.code
			}
		}
	}
	if strings.HasPrefix(err.Error(), "unknown command") || strings.HasPrefix(err.Error(), "required flag") {
		return exitUsage
	}
	return exitFailure
}

// printError writes the error, and the remedy where that is known: an object
// in the formats for programs, else text.
func printError(w io.Writer, err error, output string) {
	hint := hintOf(err)
	switch output {
	case "json":
		json.NewEncoder(w).Encode(map[string]any{
			"error": err.Error(), "causes": control.Causes(err), "errno": uint16(errnoOf(err)), "code": exitCode(err), "hint": hint,
		})
		return
	case "yaml", "xml":
		if report.Show(w, report.Options{Format: output}, report.Build("errors", "failure", failureFields, []error{err})) == nil {
			return
		}
	}
	fmt.Fprintln(w, "rnbd:", err)
	if hint != "" {
		fmt.Fprintln(w, "hint:", hint)
	}
}

// failureFields are those of an error, as in its JSON object.
var failureFields = []report.Field[error]{
	report.F("error", "Error", "the whole text", func(err error) any { return err.Error() }),
	report.F("causes", "Causes", "its parts, the root last", func(err error) any { return control.Causes(err) }),
	report.F("code", "Code", "exit code", func(err error) any { return uint64(exitCode(err)) }),
	report.F("errno", "Errno", "0: none", func(err error) any { return uint64(errnoOf(err)) }),
	report.F("hint", "Hint", "what to do", func(err error) any { return hintOf(err) }),
}

// interruptedError is the end of a command by a signal. left describes the
// state that the command leaves behind.
type interruptedError struct{ left string }

func (e interruptedError) Error() string { return "interrupted: " + e.left }

func errnoOf(err error) blk.Errno {
	var e syscall.Errno
	if errors.As(err, &e) {
		return blk.Errno(e)
	}
	return blk.OK
}

// hinted is an error with a remedy.
type hinted struct {
	error
	hint string
}

func (e hinted) Unwrap() error { return e.error }

func hintOf(err error) string {
	var h hinted
	switch {
	case errors.As(err, &h):
		return h.hint
	case errors.Is(err, errNoDaemon) && errors.Is(err, fs.ErrPermission):
		return "run it as root or as the user of the daemon; members of its --control-group may list and show"
	case errors.Is(err, errNoDaemon):
		return "start it with `rnbd server run` or `rnbd client run`, or name its socket with --socket"
	case unimplemented(err):
		return "the socket is that of the other kind of daemon, or the daemon is older than this command"
	case errors.Is(err, errAmbiguous):
		return "name its session too, or start with `rnbd client` or `rnbd server`"
	case errors.Is(err, syscall.EADDRINUSE):
		return "something else listens there; choose another address or stop it"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "no interface of this host has that address; `ip address` lists those that there are"
	case errors.Is(err, syscall.EBUSY) && strings.Contains(err.Error(), "--force"): // it says what to do
		return ""
	case errors.Is(err, syscall.EBUSY):
		return "disconnect its users first, or use --force"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nothing listens there: check the address and port, and that the server runs with that --listen"
	case errors.Is(err, syscall.ECONNRESET) && (strings.Contains(err.Error(), "INFO_RSP") || strings.Contains(err.Error(), "another client has the name")): // a server has answered
		return "give the mapping a --session name of its own; `rnbd server session list` on the server shows who has which name"
	case tlsFault(err.Error()) != "":
		return tlsFault(err.Error())
	case errors.Is(err, syscall.ECONNRESET):
		return "no rnbd server answered there: check address and port, and the server's --listen; a Linux kernel server takes a RoCE fabric, not iwarp"
	}
	return ""
}

// exitCodes is the table for people.
func exitCodes() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d  success\n%d  any other failure\n", exitOK, exitFailure)
	for code := exitUsage; code <= exitTimeout; code++ {
		for _, row := range exitTable {
			if row.code == code {
				fmt.Fprintf(&b, "%d  %s\n", code, row.what)
			}
		}
	}
	fmt.Fprintf(&b, "%d  interrupted by a signal\n", exitInterrupted)
	return b.String()
}

func newExitCodes() *cobra.Command {
	return &cobra.Command{
		Use:   "exit-codes",
		Short: "List the exit codes",
		Long:  "The exit codes of every command. They are stable.\n\n  " + strings.ReplaceAll(strings.TrimSpace(exitCodes()), "\n", "\n  "),
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := io.WriteString(cmd.OutOrStdout(), exitCodes())
			return err
		},
	}
}
