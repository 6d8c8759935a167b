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
	root := newRoot()
	err := root.ExecuteContext(ctx)
	if err != nil {
		printError(os.Stderr, err, outputOf(root))
	}
	os.Exit(exitCode(err))
}
