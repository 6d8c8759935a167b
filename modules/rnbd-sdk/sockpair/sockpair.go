// Package sockpair makes pairs of unix sockets that connect two processes, and
// connections of the ends that a process was given.
package sockpair

import (
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// New returns the end of this process, and the file of the other one. Both are
// close-on-exec. kind is unix.SOCK_STREAM or unix.SOCK_SEQPACKET. Errors about the
// files have their name.
func New(kind int, name string) (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	peer := os.NewFile(uintptr(fds[1]), name)
	conn, err := Conn(os.NewFile(uintptr(fds[0]), name))
	if err != nil {
		_ = peer.Close()
		return nil, nil, err
	}
	return conn, peer, nil
}

// Conn makes a connection of a unix socket, and closes f. ENOTSOCK in the chain: f is
// none. EPROTOTYPE: it is another kind of socket.
func Conn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("descriptor %q is no unix socket: %w", f.Name(), syscall.EPROTOTYPE)
	}
	return u, nil
}
