package main

import (
	"log/slog"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
)

func main() {
	f := newFrontend(slog.Default)
	selfstats.Count(selfstats.PayloadCopied, f.placedBytes)
	plugin.ServeFrontend(f)
}
