// Command rnbd-net runs IP over InfiniBand interfaces, and controls the daemon
// that runs them.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := newRoot().ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(stderr, "rnbd-net:", err)
	}
	flushStderr()
	os.Exit(exitCode(err))
}
