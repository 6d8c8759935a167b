package main

import (
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

// flushTime bounds the wait for the reader of the log at the end of a daemon.
const flushTime = time.Second

// stderr is where this process reports its error. In a daemon it is the Writer of the
// log, behind whose lines the error belongs.
var stderr io.Writer = os.Stderr

// flushStderr waits until what a daemon has written to stderr has arrived.
func flushStderr() {
	if lines, ok := stderr.(*logs.Writer); ok {
		lines.Flush(flushTime)
	}
}

// daemonLog returns the log of a daemon, whose lines go to the standard error of this
// process and wait for no reader.
func daemonLog() *slog.Logger {
	lines := logs.Stderr(func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, nil) })
	stderr = lines
	return slog.New(lines.Handler())
}
