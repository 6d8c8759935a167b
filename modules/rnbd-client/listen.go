package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// listen opens "unix:PATH" (mode 0600) or "tcp:ADDRESS:PORT".
func listen(spec string) (socket, error) {
	network, addr, ok := strings.Cut(spec, ":")
	if !ok || addr == "" || network != "unix" && network != "tcp" {
		return socket{}, fmt.Errorf("listen on %q: write unix:PATH or tcp:ADDRESS:PORT: %w", spec, syscall.EINVAL)
	}
	if network == "tcp" {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return socket{}, fmt.Errorf("listen on %q: %w", spec, err)
		}
		defer l.Close()
		f, err := l.(*net.TCPListener).File()
		return socket{name: "tcp:" + l.Addr().String(), file: f}, err
	}
	return listenUnix(addr)
}

// listenUnix makes the socket at path, in a folder that only its owner can
// change. It replaces a stale socket.
func listenUnix(path string) (socket, error) {
	dir, err := private.Folder(filepath.Dir(path))
	if err != nil {
		return socket{}, fmt.Errorf("listen on unix:%s: %w", path, err)
	}
	defer dir.Close()
	if isServed(path) {
		return socket{}, fmt.Errorf("listen on unix:%s: somebody serves there: %w", path, syscall.EADDRINUSE)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return socket{}, fmt.Errorf("listen on unix:%s: %w", path, err)
		}
	}
	old := syscall.Umask(0o177)
	l, err := net.Listen("unix", path)
	syscall.Umask(old)
	if err != nil {
		return socket{}, fmt.Errorf("listen on unix:%s: %w", path, err)
	}
	defer l.Close()
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	f, err := u.File()
	return socket{name: "unix:" + path, path: path, file: f}, err
}

// orphanEnds is the time within which the plugin of a killed daemon ends by
// itself. Until then it serves its socket.
const orphanEnds = 3 * time.Second

// isServed reports whether a process serves the socket and does not end within
// orphanEnds.
func isServed(path string) bool {
	for end := time.Now().Add(orphanEnds); ; time.Sleep(100 * time.Millisecond) {
		c, err := net.Dial("unix", path)
		if err != nil {
			return false
		}
		c.Close()
		if time.Now().After(end) {
			return true
		}
	}
}

// socket is a listening socket of the daemon.
type socket struct {
	name string // as configured
	path string // of a unix socket that this process made
	kept bool   // another process made it and keeps it
	file *os.File
}

// hide removes the socket's name once. Later the name may belong to another
// daemon.
func (s *socket) hide() {
	if s.path != "" {
		os.Remove(s.path)
		s.path = ""
	}
}

// close removes the socket's name before it stops listening, so that the next
// daemon can make its own.
func (s *socket) close() {
	s.hide()
	s.file.Close()
}

// listen opens the sockets of the front end. Those that another process made
// are taken first.
func (f *frontend) listen() error {
	for _, file := range f.cfg.Sockets {
		s, err := inherit(file)
		if err != nil {
			return err
		}
		f.sockets = append(f.sockets, s)
	}
	for _, l := range f.cfg.Listen {
		if slices.ContainsFunc(f.sockets, func(s socket) bool { return s.name == l }) {
			continue
		}
		s, err := listen(l)
		if err != nil {
			return err
		}
		f.sockets = append(f.sockets, s)
	}
	return nil
}

// inherit returns a socket that another process made. Its name is not ours to
// remove.
func inherit(f *os.File) (socket, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return socket{}, fmt.Errorf("descriptor %q does not listen: %w", f.Name(), err)
	}
	defer l.Close()
	return socket{name: l.Addr().Network() + ":" + l.Addr().String(), kept: true, file: f}, nil
}

// leaveUsers kills the process if users of a socket may wait for the next
// daemon: it would accept users that are cut off and connect again, and tell
// them that their device is gone.
func (f *frontend) leaveUsers() {
	if slices.ContainsFunc(f.sockets, func(s socket) bool { return s.kept }) {
		f.abandon()
	}
}

// giveSockets gives the process the sockets, once, and not before users are
// served.
func (f *frontend) giveSockets(ctx context.Context, h *host) error {
	f.giving.Lock()
	defer f.giving.Unlock()
	if f.hold || h.given {
		return nil
	}
	h.given = true
	for _, s := range f.sockets {
		if err := h.AddListener(ctx, s.name, s.file); err != nil {
			return fmt.Errorf("front end %s: socket %s: %w", f.cfg.Name, s.name, err)
		}
	}
	return nil
}

// ServeUsers gives the front ends the sockets that Config.HoldUsers has kept
// from them.
func (c *Client) ServeUsers(ctx context.Context) {
	for _, f := range c.frontends {
		f.giving.Lock()
		f.hold = false
		f.giving.Unlock()
		h, _ := f.now()
		if h == nil || len(f.sockets) == 0 {
			continue // its next process gets them
		}
		if err := f.giveSockets(ctx, h); err != nil {
			h.Kill(err)
			continue
		}
		for _, d := range c.Devices() {
			if d.fe.Load() == f {
				d.setLocation(f.status(ctx, d).Location)
			}
		}
	}
}
