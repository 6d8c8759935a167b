package client

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// Sockets on which front ends listen. The daemon opens and keeps them.

// socket is a listening socket of the daemon.
type socket struct {
	name string // of its address
	arg  string // in the configuration; empty: another process made it
	path string // of a unix socket that this process made
	kept bool   // another process made it and keeps it
	file *os.File
	addr net.Addr
	// trusted: the operator says that the network is protected in another way.
	trusted bool
}

// trusted marks such a socket in the configuration.
const trusted = ",trusted"

// listen opens "unix:PATH" (mode 0600) or "tcp:ADDRESS:PORT". If another process of
// the daemon has opened it before, that socket is taken: file.
func listen(spec string, file *os.File) (s socket, err error) {
	if file == nil {
		s, err = open(spec)
	} else if s, err = inherit(file); err == nil {
		s.kept = false
		s.path, _ = strings.CutPrefix(s.name, "unix:")
		if s.path == s.name {
			s.path = ""
		}
	}
	s.arg = spec
	return s, err
}

func open(spec string) (socket, error) {
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
		return socket{name: "tcp:" + l.Addr().String(), file: f, addr: l.Addr()}, err
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
	defer private.Hold(dir)()
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
	return socket{name: "unix:" + path, path: path, file: f, addr: l.Addr()}, err
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

// inherit returns a socket that another process made. Its name is not ours to
// remove.
func inherit(f *os.File) (socket, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return socket{}, fmt.Errorf("descriptor %q does not listen: %w", f.Name(), err)
	}
	defer l.Close()
	return socket{name: l.Addr().Network() + ":" + l.Addr().String(), kept: true, file: f, addr: l.Addr()}, nil
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
