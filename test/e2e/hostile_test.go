package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// hostile is a storage plugin that tries what a device's name says: WHAT:ARGUMENT,
// with | in place of slashes. The device opens if the attempt succeeds. The test binary is the plugin.
type hostile struct{}

func (hostile) Describe() plugin.Info {
	return plugin.Info{Name: "hostile", Version: "1.0", Crash: plugin.LosesAll, Names: plugin.NamesOpaque}
}

func (hostile) Open(_ context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	what, arg, _ := strings.Cut(strings.ReplaceAll(r.Name, "|", "/"), ":")
	try, known := attempts[what]
	if !known {
		return nil, fmt.Errorf("attempt %q: %w", what, blk.EINVAL)
	}
	if err := try(arg); err != nil {
		var errno syscall.Errno
		if !errors.As(err, &errno) {
			err = fmt.Errorf("%w: %w", err, blk.EIO)
		}
		return nil, err
	}
	return hostileDisk{}, nil
}

func (hostile) Serve(q *plugin.Queue) error {
	batch := make([]plugin.Request, 16)
	for !q.Closed() {
		n := q.Next(batch)
		for _, r := range batch[:n] {
			q.Complete(r.Tag, blk.EIO)
		}
		q.Publish()
		if n == 0 {
			q.Wait()
		}
	}
	return nil
}

type hostileDisk struct{}

func (hostileDisk) Limits() blk.Limits { return blk.Limits{Size: 1 << 20, LogicalBlockSize: 512} }
func (hostileDisk) Close() error       { return nil }

// hostPID is the number of the host of this process.
func hostPID() int { return os.Getppid() }

var attempts = map[string]func(arg string) error{
	"nothing": func(string) error { return nil },
	"read":    func(path string) error { return openAndClose(path, os.O_RDONLY) },
	"write":   func(path string) error { return openAndClose(path, os.O_WRONLY) },
	"memory":  func(string) error { return openAndClose(fmt.Sprintf("/proc/%d/mem", hostPID()), os.O_RDWR) },
	"shell":   func(string) error { return exec.Command("/bin/sh", "-c", "true").Run() },
	"signal":  func(string) error { return syscall.Kill(hostPID(), 0) },
	"ptrace": func(string) error {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // the end of the thread lets the daemon go
			done <- unix.PtraceSeize(hostPID())
		}()
		return <-done
	},
	"dial": func(arg string) error {
		network, addr, _ := strings.Cut(arg, "=")
		c, err := net.Dial(network, addr)
		if err == nil {
			c.Close()
		}
		return err
	},
}

func openAndClose(path string, flags int) error {
	f, err := os.OpenFile(filepath.Clean(path), flags, 0)
	if err == nil {
		f.Close()
	}
	return err
}
