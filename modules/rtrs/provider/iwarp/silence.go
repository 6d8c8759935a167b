package iwarp

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A TCP connection whose packets are lost somewhere, while others of the same
// peer pass, says nothing: the kernel repeats its segments for 15 minutes. A
// user timeout (RFC 5482) bounds that, and with it the probes of a window that
// the peer keeps closed. Probes do the same for a connection with nothing on
// the way.

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

// keepAlive starts to probe an idle connection in the middle of PeerTimeout. The
// number of probes is not looked at where there is a user timeout.
func (c *Config) keepAlive() net.KeepAliveConfig {
	if c.PeerTimeout < 0 {
		return net.KeepAliveConfig{Enable: true}
	}
	idle := max((c.PeerTimeout / 2).Truncate(time.Second), time.Second)
	probe := max((c.PeerTimeout / 4).Round(time.Second), time.Second)
	return net.KeepAliveConfig{Enable: true, Idle: idle, Interval: probe}
}
