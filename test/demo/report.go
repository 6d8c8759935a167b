package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func say(format string, args ...any) { fmt.Printf("  "+format+"\n", args...) }

func bytesOf(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }

// printProcesses lists the processes that take part.
func (d *demo) printProcesses() {
	show := func(role string, pid int) {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err != nil {
			exe = "?"
		}
		say("process   %-14s pid %-8d %s", role, pid, filepath.Base(exe))
	}
	show("server", d.server.PID())
	if p, err := d.server.Plugin("fileio"); err == nil {
		show("storage plugin", int(p.Pid))
	}
	show("client", d.client.PID())
	if p, err := d.client.Plugin("nbd"); err == nil {
		show("NBD front end", int(p.Pid))
	}
}

func (d *demo) printPaths() error {
	l, err := d.client.API.ListSessions(context.Background(), &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	for _, s := range l.Sessions {
		for _, p := range s.Paths {
			say("path      %s -> %s over %s, %d connections, %s", p.Src, p.Dst, p.Fabric, p.Connections, p.State)
		}
	}
	return nil
}

func (d *demo) printLogs() {
	if d.server != nil {
		fmt.Printf("---- server\n%s", d.server.Log())
	}
	if d.client != nil {
		fmt.Printf("---- client\n%s", d.client.Log())
	}
}
