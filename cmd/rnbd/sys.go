package main

import (
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// Words for --sys.
const (
	sysAuto = "auto"
	sysOff  = "off"
)

// mountTree serves a daemon's control files until the function that it returns
// is called. It fails if a folder that the user named does not work; the default
// folder is optional.
func (o *daemonOptions) mountTree(kind, socket string, places map[string]ctltree.Node, log *slog.Logger) (unmount func() error, err error) {
	nothing := func() error { return nil }
	folder := o.Sys
	switch folder {
	case sysOff, "":
		return nothing, nil
	case sysAuto:
		folder = filepath.Join(filepath.Dir(socket), "sys")
	}
	t, err := ctltree.Mount(folder, places, ctltree.Options{Name: "rnbd-" + kind, Logger: log})
	switch {
	case err == nil:
		log.Info("control files are served", "path", folder)
		return t.Close, nil
	case o.Sys == sysAuto:
		log.Warn("there are no control files; everything else works", "err", err)
		return nothing, nil
	}
	return nil, fmt.Errorf("--sys %s: %w", o.Sys, err)
}
