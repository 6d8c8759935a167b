package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// Times after which a host that says nothing is taken for dead.
const (
	keepAliveIdle  = 10 * time.Second
	keepAliveEvery = 5 * time.Second
	keepAliveCount = 3
	userTimeout    = 30 * time.Second
)

// dial makes a connection that is ready for requests. It is not watched yet.
func (d *disk) dial(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := d.connect(ctx)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("%w: %w", err, blk.ETIMEDOUT)
		}
		return nil, fmt.Errorf("open export %q of %s: %w", d.export, d.b.where(), err)
	}
	return c, nil
}

func (d *disk) connect(ctx context.Context) (*conn, error) {
	a := d.b.address()
	dialer := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: keepAliveIdle, Interval: keepAliveEvery, Count: keepAliveCount}}
	dialer.Control = func(network, _ string, c syscall.RawConn) error {
		if network == "unix" {
			return nil
		}
		return c.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
		})
	}
	raw, err := dialer.DialContext(ctx, a.Network, a.Address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })
	use, export, err := nbdwire.Negotiate(raw, nbdwire.Options{Export: d.export, TLS: a.TLS, Structured: true, Allocation: true})
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		raw.Close()
		return nil, err
	}
	if use != raw {
		return d.tunnel(use, export)
	}
	defer raw.Close() // the connection has a descriptor of its own
	fd, err := duplicate(raw)
	if err != nil {
		return nil, err
	}
	return newConn(d, fd, export, nil), nil
}

// duplicate returns another descriptor of a socket, which does not block.
func duplicate(c net.Conn) (fd int, err error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return -1, fmt.Errorf("%T has no descriptor: %w", c, blk.EINVAL)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	cerr := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(cerr, err)
}

// abandon closes a connection that was not put into use.
func (c *conn) abandon() {
	_ = unix.Close(c.fd)
	if c.tunnel != nil {
		c.tunnel.close()
	}
}
