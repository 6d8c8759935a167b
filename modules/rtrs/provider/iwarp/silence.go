package iwarp

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// If the packets of a TCP connection are lost while those of others pass, the
// kernel repeats its segments for 15 minutes before it reports an error. A user
// timeout (RFC 5482) bounds that, and the probes of a window that the peer keeps
// closed. Keep-alive probes do the same for a connection with nothing in flight.

// limitSilence sets the user timeout of a socket that is about to connect or to
// listen.
func (c *Config) limitSilence(_, _ string, raw syscall.RawConn) (err error) {
	if c.PeerTimeout < 0 {
		return nil
	}
	ms := int(max(c.PeerTimeout/time.Millisecond, 1))
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms)
	}); cerr != nil {
		return cerr
	}
	return err
}

// keepAlive returns a configuration that probes an idle connection after half of
// PeerTimeout. The kernel ignores the number of probes if there is a user
// timeout.
func (c *Config) keepAlive() net.KeepAliveConfig {
	if c.PeerTimeout < 0 {
		return net.KeepAliveConfig{Enable: true}
	}
	idle := max((c.PeerTimeout / 2).Truncate(time.Second), time.Second)
	probe := max((c.PeerTimeout / 4).Round(time.Second), time.Second)
	return net.KeepAliveConfig{Enable: true, Idle: idle, Interval: probe}
}
