// Command rnbd runs the daemons of RNBD and talks to them.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := execute(ctx, newRoot(), os.Args[1:])
	if err != nil {
		printError(os.Stderr, err, errorFormat(os.Args[1:]))
	}
	os.Exit(exitCode(err))
}
