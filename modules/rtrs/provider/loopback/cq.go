package loopback

import (
	"fmt"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// pendingWC is a WC on its way to the owner.
type pendingWC struct {
	wc         verbs.WC
	qp         *queuePair
	num        uint64 // of the request, if send
	send, recv bool   // polling it makes room in a queue
}

type compQueue struct {
	net    *Network
	fd     int
	busy   atomic.Bool // the owner is inside
	ready  atomic.Bool // Poll may have something to do
	posted atomic.Bool // requests wait for transmit

	// Guarded by net.mu.
	qps      []*queuePair // connected
	uses     int          // queue pairs not destroyed
	armed    bool
	signaled bool // fd is readable
	closed   bool
	done     []pendingWC
	head     int // done[head:] is for the owner
}

func (d *loopDevice) CreateCQ(depth int) (verbs.CQ, error) {
	if d.isClosed() {
		return nil, fmt.Errorf("loopback: create completion queue: %w", verbs.ErrClosed)
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("loopback: create completion queue: eventfd: %w", err)
	}
	return &compQueue{net: d.net, fd: fd, done: make([]pendingWC, 0, max(depth, 1))}, nil
}

// enterOwner panics when two goroutines use the queue at a time: only its owner
// may.
func (c *compQueue) enterOwner() {
	if !c.busy.CompareAndSwap(false, true) {
		panic("loopback: a completion queue is used by two goroutines at a time")
	}
}

func (c *compQueue) leaveOwner() { c.busy.Store(false) }

func (c *compQueue) FD() int { return c.fd }

func (c *compQueue) Poll(wcs []verbs.WC) int {
	c.enterOwner()
	defer c.leaveOwner()
	if !c.ready.Load() && !c.posted.Load() {
		return 0
	}
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.ready.Store(false)
	c.transmitAll()
	for i := 0; i < len(c.qps); {
		q := c.qps[i]
		q.receiveMessages()
		if q.state == stateUp { // else it left the list
			i++
		}
	}
	return c.popCompletions(wcs)
}

// popCompletions hands completions to the owner.
func (c *compQueue) popCompletions(wcs []verbs.WC) int {
	n := 0
	for ; n < len(wcs) && c.head < len(c.done); n++ {
		d := &c.done[c.head]
		c.head++
		wcs[n] = d.wc
		switch {
		case d.send:
			d.qp.sendFree = d.num + 1
		case d.recv:
			d.qp.recvFree++
		}
	}
	if c.head == len(c.done) {
		c.done, c.head = c.done[:0], 0
	} else {
		c.ready.Store(true)
	}
	return n
}

func (c *compQueue) pushCompletion(d pendingWC) {
	if c.head > 0 && len(c.done) == cap(c.done) {
		c.done = c.done[:copy(c.done, c.done[c.head:])]
		c.head = 0
	}
	c.done = append(c.done, d)
	c.ready.Store(true)
}

// transmitAll puts all posted requests on their links.
func (c *compQueue) transmitAll() {
	if !c.posted.Swap(false) {
		return
	}
	for i := 0; i < len(c.qps); {
		q := c.qps[i]
		q.transmitPosted()
		if i < len(c.qps) && c.qps[i] == q {
			i++
		} else {
			i = 0 // a tap cut connections: the list has moved
		}
	}
}

func (c *compQueue) Flush() {
	c.enterOwner()
	defer c.leaveOwner()
	if c.posted.Load() {
		c.net.mu.Lock()
		defer c.net.mu.Unlock()
		c.transmitAll()
	}
}

func (c *compQueue) Arm() bool {
	c.enterOwner()
	defer c.leaveOwner()
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.transmitAll()
	if c.ready.Load() || c.posted.Load() {
		return false
	}
	if c.signaled {
		var b [8]byte
		unix.Read(c.fd, b[:])
		c.signaled = false
	}
	c.armed = true
	return true
}

// kickOwner tells the owner that Poll may have something to do.
func (c *compQueue) kickOwner() {
	c.ready.Store(true)
	if c.armed && !c.closed {
		c.armed, c.signaled = false, true
		one := [8]byte{1} // any number does, so the byte order does not matter
		unix.Write(c.fd, one[:])
	}
}

func (c *compQueue) Close() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	switch {
	case c.closed:
		return fmt.Errorf("loopback: close completion queue: %w", verbs.ErrClosed)
	case c.uses > 0:
		return fmt.Errorf("loopback: close completion queue: %d queue pairs left: %w", c.uses, syscall.EBUSY)
	}
	c.closed = true
	return unix.Close(c.fd)
}
