package main

import (
	"errors"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// A connection with TLS reaches the hub through a socket pair, and is a plain one there.
// Two goroutines carry the bytes. TLS adds nothing to the path of plain connections.

const (
	tunnelBuffer = 128 << 10
	tunnelSocket = 1 << 20 // of each end of the pair, in bytes
	goodbyeTime  = time.Second
)

type tunnel struct {
	tls   net.Conn
	local *net.UnixConn
}

// tunnel makes a connection of one with TLS.
func (d *disk) tunnel(secure net.Conn, e nbdwire.Export) (*conn, error) {
	local, peer, err := sockpair.New(unix.SOCK_STREAM, "tunnel")
	if err != nil {
		secure.Close()
		return nil, err
	}
	fd, err := ownDescriptor(peer)
	if err != nil {
		secure.Close()
		local.Close()
		return nil, err
	}
	_, _ = local.SetReadBuffer(tunnelSocket), local.SetWriteBuffer(tunnelSocket)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, tunnelSocket)
	t := &tunnel{tls: secure, local: local}
	go t.carry(t.tls, t.local)
	go t.carry(t.local, t.tls)
	return newConn(d, fd, e, t), nil
}

// ownDescriptor takes the descriptor out of f.
func ownDescriptor(f *os.File) (int, error) {
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	return fd, err
}

// carry moves bytes until one of the connections ends, and ends the other one then.
func (t *tunnel) carry(to io.Writer, from io.Reader) {
	buf := make([]byte, tunnelBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, werr := to.Write(buf[:n]); werr != nil {
				err = errors.Join(err, werr)
			}
		}
		if err != nil {
			t.local.Close()
			t.tls.Close() // crypto/tls says goodbye
			return
		}
	}
}

// close is called when the hub has closed its end. What it has sent is carried before the
// end of the pair is seen; a server that takes nothing is not waited for.
func (t *tunnel) close() { _ = t.tls.SetDeadline(time.Now().Add(goodbyeTime)) }
