package client

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// Sockets on which front ends listen. The daemon opens and keeps them.

// listenSocket is a listening socket of the daemon.
type listenSocket struct {
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

// openListen opens "unix:PATH" (mode 0600) or "tcp:ADDRESS:PORT". If another process of
// the daemon has opened it before, that socket is taken: file.
func openListen(spec string, file *os.File) (s listenSocket, err error) {
	if file == nil {
		s, err = openSpec(spec)
	} else if s, err = inheritSocket(file); err == nil {
		s.kept = false
		if path, isUnix := strings.CutPrefix(spec, "unix:"); isUnix {
			s.name, s.path = spec, path // a long path is not the address of the socket
		}
	}
	s.arg = spec
	return s, err
}

func openSpec(spec string) (listenSocket, error) {
	network, addr, ok := strings.Cut(spec, ":")
	if !ok || addr == "" || network != "unix" && network != "tcp" {
		return listenSocket{}, fmt.Errorf("listen on %q: write unix:PATH or tcp:ADDRESS:PORT: %w", spec, syscall.EINVAL)
	}
	if network == "tcp" {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return listenSocket{}, fmt.Errorf("listen on %q: %w", spec, err)
		}
		defer l.Close()
		f, err := l.(*net.TCPListener).File()
		return listenSocket{name: "tcp:" + l.Addr().String(), file: f, addr: l.Addr()}, err
	}
	return listenUnix(addr)
}

// orphanEnds is the time within which the plugin of a killed daemon ends by
// itself. Until then it serves its socket.
const orphanEnds = 3 * time.Second

// listenUnix makes the socket at path, in a folder that only its owner can
// change. It replaces a stale socket.
func listenUnix(path string) (listenSocket, error) {
	l, err := private.Listen(path, orphanEnds)
	if errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("somebody serves there: %w", syscall.EADDRINUSE)
	}
	if err != nil {
		return listenSocket{}, fmt.Errorf("listen on unix:%s: %w", path, err)
	}
	defer l.Close()
	f, err := l.File()
	return listenSocket{name: "unix:" + path, path: path, file: f, addr: l.Addr()}, err
}

// inheritSocket returns a socket that another process made. Its name is not ours to
// remove.
func inheritSocket(f *os.File) (listenSocket, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return listenSocket{}, fmt.Errorf("descriptor %q does not listen: %w", f.Name(), err)
	}
	defer l.Close()
	return listenSocket{name: l.Addr().Network() + ":" + l.Addr().String(), kept: true, file: f, addr: l.Addr()}, nil
}

// removeName removes the socket's name once. Later the name may belong to another
// daemon.
func (s *listenSocket) removeName() {
	if s.path != "" {
		os.Remove(s.path)
		s.path = ""
	}
}

// close removes the socket's name before it stops listening, so that the next
// daemon can make its own.
func (s *listenSocket) close() {
	s.removeName()
	s.file.Close()
}
