package main

import (
	"errors"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

const (
	bufferSize = 64 << 10 // of replies and small payloads that are read together, in bytes
	iovMax     = 128
)

var (
	errQueueEnded = errors.New("the host has closed the queue")
	errClosed     = errors.New("the disk is closed")
	errEOF        = errors.New("the server has closed the connection")
)

// conn is one connection in transmission. It belongs to the thread of the hub.
type conn struct {
	hub    *hub
	disk   *disk
	export nbdwire.Export
	fd     int
	number int32 // in sockets.conns
	tunnel *tunnel

	sending  opList
	inFlight int
	dirty    bool // in hub.dirty
	blocked  bool // the socket takes nothing now
	hungUp   bool // the server sends nothing after what the socket has
	ended    bool
	drained  chan struct{} // not nil: it gets no more requests; closed when it has none

	// Received bytes that are not handled: buf[at:have].
	buf      []byte
	at, have int
	// The payload that comes next: of cur, into, which may be empty.
	cur  *op
	into []byte
	last bool // the reply to cur ends with it

	iov [iovMax]unix.Iovec
}

func newConn(d *disk, fd int, e nbdwire.Export, t *tunnel) *conn {
	return &conn{hub: d.hub, disk: d, fd: fd, export: e, tunnel: t, buf: make([]byte, bufferSize)}
}

// events are the epoll events of the connection. Room in the socket is reported only while
// it is waited for: a unix socket reports it after every read of the server.
func (c *conn) events() uint32 {
	events := uint32(unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET)
	if c.blocked {
		events |= unix.EPOLLOUT
	}
	return events
}

func (c *conn) setBlocked(blocked bool) {
	c.blocked = blocked
	ev := unix.EpollEvent{Events: c.events(), Fd: c.number}
	if err := unix.EpollCtl(c.hub.sockets.epoll, unix.EPOLL_CTL_MOD, c.fd, &ev); err != nil {
		c.lost(err)
	}
}

func (c *conn) onEvents(events uint32) {
	if c.blocked && events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		c.setBlocked(false)
		c.flush()
	}
	c.hungUp = c.hungUp || events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0
	if !c.ended {
		c.receive()
	}
	if c.drained != nil && c.inFlight == 0 && !c.ended {
		c.signalDrained()
	}
	c.hub.flush() // requests that a lost connection has left
	c.hub.publish()
}

// drain ends the supply of requests. The channel is closed when none is in flight.
func (c *conn) drain() <-chan struct{} {
	done := make(chan struct{})
	c.drained = done
	if c.inFlight == 0 {
		c.signalDrained()
	}
	return done
}

func (c *conn) signalDrained() {
	close(c.drained)
	c.drained = nil
}

// push sends o with the next flush.
func (c *conn) push(o *op) {
	o.conn = c
	c.inFlight++
	c.sending.push(o)
	c.hub.markDirty(c)
}

func (h *hub) markDirty(c *conn) {
	if !c.dirty {
		c.dirty = true
		h.dirty = append(h.dirty, c)
	}
}

// done answers a request that the server has answered.
func (c *conn) done(o *op, e blk.Errno) {
	c.inFlight--
	if o.call == nil {
		o.disk.answered(o, &e)
	}
	o.finish(e)
}

// lost ends the connection. Its requests are sent again elsewhere, or fail.
func (c *conn) lost(err error) {
	if c.ended {
		return
	}
	c.close()
	c.disk.withoutConn(c)
	again := 0
	for _, in := range c.hub.intakes {
		for i := range in.ops {
			if o := &in.ops[i]; o.busy && o.conn == c {
				again += c.disk.retry(o, err)
			}
		}
	}
	for _, o := range c.hub.statuses {
		if o.conn == c {
			o.finish(blk.EIO)
		}
	}
	if c.drained != nil {
		c.signalDrained()
	}
	c.disk.lost(err, c.inFlight, again)
}

// close closes the socket, and nothing more.
func (c *conn) close() {
	c.ended = true
	c.hub.sockets.remove(c)
	c.sending, c.cur, c.into = opList{}, nil, nil
	if err := unix.Close(c.fd); err != nil {
		slog.Debug("close a connection", "err", err)
	}
	if c.tunnel != nil {
		c.tunnel.close()
	}
	if i := slices.Index(c.hub.dirty, c); i >= 0 {
		c.hub.dirty = slices.Delete(c.hub.dirty, i, i+1)
	}
}

// disconnect says goodbye and closes. Nothing is in flight.
func (c *conn) disconnect() {
	if c.ended {
		return
	}
	var b [nbdwire.RequestSize]byte
	nbdwire.PutRequest(b[:], 0, nbdwire.CmdDisc, 0, 0, 0)
	_, _ = unix.Write(c.fd, b[:]) // without it the server sees the end of the connection
	c.close()
}
