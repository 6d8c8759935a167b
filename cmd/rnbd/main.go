// Command rnbd runs the daemons of RNBD and talks to them.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/loopdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == confine.Argument {
		confine.Exec() // this process becomes a plugin
	}
	if len(os.Args) > 1 && os.Args[1] == loopdev.Argument {
		loopdev.Main(os.Args[2:])
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := execute(ctx, newRoot(), os.Args[1:])
	if err != nil {
		printError(stderr, err, errorFormat(os.Args[1:]))
	}
	flushStderr()
	os.Exit(exitCode(err))
}
