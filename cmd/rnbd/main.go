// Command rnbd runs the daemons of RNBD and talks to them.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ends := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // by nohup
		ends = append(ends, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	defer stop()
	err := execute(ctx, newRoot(), os.Args[1:])
	if err != nil {
		printError(os.Stderr, err, errorFormat(os.Args[1:]))
	}
	os.Exit(exitCode(err))
}
