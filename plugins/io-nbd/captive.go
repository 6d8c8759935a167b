package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// A captive server is started by the plugin and is its own. It gets SIGKILL when the plugin
// dies. It inherits a lock, which is free when the plugin, the server, and all processes
// that the server has started are dead: the next process of the plugin waits for that
// before it starts a server, so no write of the dead one comes late.

const (
	lockPause   = 20 * time.Millisecond
	socketPause = 10 * time.Millisecond
	endTime     = 5 * time.Second // after SIGTERM
)

// captive is a running server.
type captive struct {
	cmd    *exec.Cmd
	dir    *os.File // has the socket
	socket string   // its path for this process
	lock   *os.File
	ending atomic.Bool
	done   chan struct{} // closed when it has ended
	err    error         // after done
}

// startCaptive takes the lock, starts the server, and waits until it listens. ended is
// called if the server ends before end is called.
func startCaptive(ctx context.Context, run, lock string, ended func(error)) (*captive, error) {
	f, err := takeLock(ctx, lock)
	if err != nil {
		return nil, err
	}
	c := &captive{lock: f, done: make(chan struct{})}
	if c.dir, err = makeFolder(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	// The folder of a plugin has a long path, and that of a socket has at most 107 bytes.
	c.socket = fmt.Sprintf("/proc/self/fd/%d/nbd.sock", c.dir.Fd())
	c.cmd = exec.Command("/bin/sh", "-c", "exec "+run)
	c.cmd.Env = append(os.Environ(), "socket=/proc/self/fd/4/nbd.sock")
	c.cmd.Stdout, c.cmd.Stderr = os.Stderr, os.Stderr // the host's log
	c.cmd.ExtraFiles = []*os.File{f, c.dir}           // 3 and 4
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	started := make(chan error)
	go c.watch(started, ended)
	if err := <-started; err != nil {
		return nil, errors.Join(err, c.clean())
	}
	if err := c.listens(ctx); err != nil {
		return nil, errors.Join(err, c.end())
	}
	return c, nil
}

// makeFolder makes and opens a temporary folder.
func makeFolder() (*os.File, error) {
	path, err := os.MkdirTemp("", "io-nbd")
	if err != nil {
		return nil, err
	}
	return os.Open(path)
}

// takeLock locks a file or folder. It waits while an earlier server has the lock.
func takeLock(ctx context.Context, path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-time.After(lockPause):
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("lock %s: another server, or a dead plugin's, has it: %w", path, blk.EBUSY)
		}
	}
}

// watch starts the server and waits for its end. The thread stays: its end would be that
// of the server (PR_SET_PDEATHSIG).
func (c *captive) watch(started chan<- error, ended func(error)) {
	runtime.LockOSThread()
	err := c.cmd.Start()
	if started <- err; err != nil {
		close(c.done)
		return
	}
	c.err = c.cmd.Wait()
	close(c.done)
	if !c.ending.Load() {
		ended(fmt.Errorf("%v", c.cmd.ProcessState))
	}
}

// listens waits until the server takes connections.
func (c *captive) listens(ctx context.Context) error {
	for {
		conn, err := net.Dial("unix", c.socket)
		if err == nil {
			return conn.Close()
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		select {
		case <-time.After(socketPause):
		case <-c.done:
			return fmt.Errorf("it ended before it listened: %v: %w", c.cmd.ProcessState, blk.EIO)
		case <-ctx.Done():
			return fmt.Errorf("it does not listen on %s: %w", c.socket, blk.ETIMEDOUT)
		}
	}
}

// kill ends the server at once; ended is called then.
func (c *captive) kill() { _ = unix.Kill(-c.cmd.Process.Pid, unix.SIGKILL) }

// end ends the server, by force if it takes long, and frees the lock.
func (c *captive) end() error {
	c.ending.Store(true)
	_ = c.cmd.Process.Signal(unix.SIGTERM)
	select {
	case <-c.done:
	case <-time.After(endTime):
	}
	c.kill() // also processes that it has left
	<-c.done
	return c.clean()
}

func (c *captive) clean() error {
	return errors.Join(c.lock.Close(), c.dir.Close(), os.RemoveAll(c.dir.Name()))
}
