package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blockdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/fence"
)

// guardNode returns the guard of a node, for one more user. The error is EBUSY
// if another server has the node open for writing. The caller has the node's
// turn.
func (s *Server) guardNode(ctx context.Context, key deviceKey, n *node, p *ioPlugin) (*guard, error) {
	s.mu.Lock()
	g := s.guards[key]
	if g != nil {
		g.users++
	}
	s.mu.Unlock()
	if g != nil {
		return g, nil
	}
	g = &guard{users: 1}
	if n.file != nil && p.info().Crash != plugin.LosesAll {
		if err := g.openGuarded(ctx, n, key.readOnly, s.cfg.ServeInUse); err != nil {
			return nil, err
		}
		if (g.file == nil || g.unlocked) && !key.readOnly {
			p.log.Warn("device has no lock of the server: another server may open it while the plugin restarts", "device", n.path)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guards[key] = g
	return g, nil
}

func (s *Server) giveGuard(key deviceKey, g *guard) {
	s.mu.Lock()
	g.users--
	last := g.users == 0
	if last {
		delete(s.guards, key)
	}
	s.mu.Unlock()
	if last && g.file != nil {
		g.file.Close()
	}
}

// leftToPlugin are the errors of a node that a plugin cannot open for writing either. It is
// left to the plugin, since its error has more detail.
var leftToPlugin = []error{syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.ENOENT, syscall.ENXIO, syscall.ENODEV, syscall.ENOMEDIUM}

// withoutLocks are the errors of a file system that has no locks.
var withoutLocks = []error{syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EINVAL}

// isOneOf reports whether err wraps one of list.
func isOneOf(err error, list []error) bool {
	return slices.ContainsFunc(list, func(e error) bool { return errors.Is(err, e) })
}

// openGuarded opens the node again and takes the lock. On a file system without locks g is
// unlocked. Any other error, such as of a lack of descriptors or of locks, is the caller's: the
// next try may get the lock.
func (g *guard) openGuarded(ctx context.Context, n *node, readOnly, inUse bool) error {
	f, err := n.reopenNode(ctx, readOnly, inUse)
	switch {
	case errors.Is(err, syscall.EBUSY):
		return err
	case ctx.Err() != nil && err != nil:
		return context.Cause(ctx)
	case isOneOf(err, leftToPlugin):
		return nil
	case err != nil:
		return fmt.Errorf("the server's own descriptor: %w", err)
	}
	if !readOnly {
		if err := fence.Lock(ctx, f, fence.Owner); err != nil {
			if !isOneOf(err, withoutLocks) || ctx.Err() != nil {
				f.Close()
			}
			if ctx.Err() != nil {
				return fmt.Errorf("another server has it open for writing: %w", syscall.EBUSY)
			}
			if !isOneOf(err, withoutLocks) {
				return fmt.Errorf("the server's lock: %w", err)
			}
			g.unlocked = true
		}
	}
	g.file, g.readOnly = f, readOnly
	return nil
}

// reopenNode opens n for reading, or for writing too. Unless inUse is set, a block device that
// this host uses is EBUSY, and one that is written to is opened exclusively: no mount of it
// succeeds then.
func (n *node) reopenNode(ctx context.Context, readOnly, inUse bool) (*os.File, error) {
	flags, exclusive := os.O_RDWR, unix.O_EXCL
	if readOnly {
		flags, exclusive = os.O_RDONLY, 0
	}
	if n.block && !inUse {
		if err := blockdev.CheckUnused(n.path); errors.Is(err, syscall.EBUSY) {
			return nil, fmt.Errorf("%w; it would be damaged: end that use, or start the server with --serve-in-use", err)
		}
		flags |= exclusive
	}
	f, err := reopenUnused(ctx, n.file, flags)
	if errors.Is(err, syscall.EBUSY) {
		err = fmt.Errorf("another server, or another program of this host, has it open for writing: %w", err)
	}
	return f, err
}

// claimPause is the time between two attempts to open a device exclusively.
const claimPause = 20 * time.Millisecond

// reopenUnused is reopenNode. While a device is open exclusively elsewhere, as in a server
// that ends, it tries again until ctx ends.
func reopenUnused(ctx context.Context, node *os.File, flags int) (*os.File, error) {
	for {
		f, err := reopenNode(ctx, node, flags)
		if !errors.Is(err, syscall.EBUSY) {
			return f, err
		}
		select {
		case <-time.After(claimPause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// reopenNode opens the file behind an O_PATH descriptor. The system call can
// block for ever, for instance on a network file system without its server.
// reopenNode waits for it until ctx ends.
func reopenNode(ctx context.Context, node *os.File, flags int) (*os.File, error) {
	raw, err := node.SyscallConn()
	if err != nil {
		return nil, err
	}
	var path int
	if cerr := raw.Control(func(fd uintptr) { path, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil || err != nil {
		return nil, fmt.Errorf("duplicate: %w", err)
	}
	type result struct {
		fd  int
		err error
	}
	done := make(chan result, 1)
	go func() {
		fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", path), flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		unix.Close(path)
		done <- result{fd, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, r.err
		}
		return os.NewFile(uintptr(r.fd), node.Name()), nil
	case <-ctx.Done():
		go func() {
			if r := <-done; r.err == nil {
				unix.Close(r.fd)
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// syncGuard flushes the node of g, and keeps an error for the node's clients. It returns false
// if ctx ends first; then the flush goes on.
func (s *Server) syncGuard(ctx context.Context, g *guard, id nodeID, name string) bool {
	if g.file == nil || g.readOnly {
		return true
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := g.sync(s.fdatasync); err != nil {
			s.flushFailed(s.historyOf(id), name, fmt.Errorf("write-back has failed: %w", err))
		}
	}()
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return false
	}
}

// sync calls fdatasync for the node. It returns nil where the node has none.
func (g *guard) sync(fdatasync func(fd int) error) error {
	raw, err := g.file.SyscallConn()
	if err != nil {
		return nil // closed: no client has the node open
	}
	err = syscall.EINTR
	for errors.Is(err, syscall.EINTR) {
		if cerr := raw.Control(func(fd uintptr) { err = fdatasync(int(fd)) }); cerr != nil {
			return nil
		}
	}
	if isOneOf(err, []error{unix.EINVAL, unix.ENOSYS, unix.EOPNOTSUPP, unix.EROFS}) {
		return nil
	}
	return err
}
