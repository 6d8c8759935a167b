package main

import (
	"log/slog"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

func main() { plugin.ServeFrontend(newFrontend(slog.Default)) }
