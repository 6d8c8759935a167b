package main

import (
	"slices"

	"golang.org/x/sys/unix"
)

// fewConns is the number of connections up to which each is read in every turn, as in
// the product. Of more, those are read that epoll reports.
const fewConns = 4

// conns are the connections of the front end, one source of its pump.
type conns struct {
	epoll  int
	list   []*conn
	byFD   map[int32]*conn
	events [128]unix.EpollEvent
	after  func() // is called after each turn
}

func (c *conns) open() (err error) {
	c.byFD = map[int32]*conn{}
	c.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	return err
}

func (c *conns) add(n *conn) {
	n.closed = func() { c.remove(n) }
	c.list = append(c.list, n)
	c.byFD[int32(n.fd)] = n
	if err := unix.EpollCtl(c.epoll, unix.EPOLL_CTL_ADD, n.fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&(1<<32-1), Fd: int32(n.fd)}); err != nil {
		fail("connection", err)
	}
}

func (c *conns) remove(n *conn) {
	c.list = slices.DeleteFunc(c.list, func(o *conn) bool { return o == n })
	delete(c.byFD, int32(n.fd))
	unix.Close(n.fd)
}

// look asks epoll.
func (c *conns) look() {
	for _, e := range c.events[:epollNow(c.epoll, c.events[:])] {
		if conn := c.byFD[e.Fd]; conn != nil {
			conn.quiet = false
		}
	}
}

// Poll receives and sends.
func (c *conns) Poll() (n int) {
	many := len(c.list) > fewConns
	if many {
		c.look()
	}
	for i := len(c.list) - 1; i >= 0; i-- { // backward: a connection that ends is removed
		conn := c.list[i]
		conn.skip = conn.quiet && many
		n += conn.Poll()
	}
	c.after()
	return n
}

// Arm returns false if there is something to do, or to send: epoll does not report room
// in a socket. Events of sockets that were read without epoll may be old, so each socket
// that may have something is asked.
func (c *conns) Arm() bool {
	c.look()
	return !slices.ContainsFunc(c.list, func(n *conn) bool { return n.n > 0 || !n.quiet && !n.Arm() })
}

func (c *conns) FD() int { return c.epoll }
