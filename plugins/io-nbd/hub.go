package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
)

// DATA PATH. One pump serves all queues and all connections of the process, so a
// connection may carry requests of any queue, and a server without multi-conn gets one
// connection alone. In the order in which a request meets them:
//
//	intake.Poll    takes requests out of a queue
//	disk.submit    chooses a connection (disk.go)
//	conn.flush     sends (send.go)
//	sockets.Poll   finds connections with replies
//	conn.receive   places the payload of reads and finishes requests (receive.go)

// hub is the pump and what it polls. All fields but pump belong to its thread.
type hub struct {
	pump     *pump.Pump
	sockets  *sockets
	intakes  []*intake // by the upper half of a cookie; nil: the queue has ended
	dirty    []*conn   // connections with requests that are not sent
	statuses map[uint64]*op
	lastCall uint64 // cookie of the last call, see call
}

func newHub() (*hub, error) {
	p, err := pump.New(pump.Config{Name: "nbd", CPU: -1})
	if err != nil {
		return nil, err
	}
	s, err := newSockets()
	if err == nil {
		err = p.Add(s)
	}
	if err != nil {
		p.Stop()
		return nil, err
	}
	h := &hub{pump: p, sockets: s, statuses: map[uint64]*op{}}
	p.Start()
	return h, nil
}

// stop ends the pump. Disks may still be closed after it.
func (h *hub) stop() { h.pump.Stop() }

// op is a request on its way: one of a queue, whose tag is its index, or a call.
type op struct {
	req    plugin.Request
	disk   *disk
	intake *intake // nil: it is a call
	call   *call
	conn   *conn // it is sent there; nil: it waits
	next   *op   // in an opList
	cookie uint64
	header [28]byte
	sent   int    // bytes of header and payload that are sent
	got    uint32 // bytes of payload that came in chunks
	epoch  uint64 // of a flush: disk.acked when it was sent
	errno  blk.Errno
	busy   bool
}

// call is a request of the control path: BLOCK_STATUS, or a flush before connections are
// replaced.
type call struct {
	command uint16
	off     uint64
	n       uint32
	entries []byte // of BLOCK_STATUS
	err     error
	done    chan struct{}
}

// callCookie is set in the cookies of calls.
const callCookie = 1 << 63

// opList is a list of ops in the order of their arrival.
type opList struct{ head, tail *op }

func (l *opList) push(o *op) {
	o.next = nil
	if l.tail == nil {
		l.head = o
	} else {
		l.tail.next = o
	}
	l.tail = o
}

func (l *opList) pop() *op {
	o := l.head
	if l.head = o.next; l.head == nil {
		l.tail = nil
	}
	o.next = nil
	return o
}

// intake is a queue as a source of the pump.
type intake struct {
	*plugin.Queue
	hub      *hub
	ops      []op // by tag
	batch    [64]plugin.Request
	answered bool // the queue has answers that are not published
	ended    bool
	done     chan struct{} // closed when it has ended
}

// serve answers the requests of q until it is closed.
func (h *hub) serve(q *plugin.Queue) error {
	in := &intake{Queue: q, hub: h, ops: make([]op, q.Depth()), done: make(chan struct{})}
	h.pump.Call(func() {
		number := uint64(len(h.intakes))
		h.intakes = append(h.intakes, in)
		for i := range in.ops {
			in.ops[i] = op{intake: in, cookie: number<<32 | uint64(i)}
		}
	})
	if err := h.pump.Add(in); err != nil {
		return fmt.Errorf("serve queue %d: %w", q.Pump(), err)
	}
	<-in.done
	return nil
}

// Poll takes new requests, sends them, and publishes the answers of old ones.
func (in *intake) Poll() int {
	if in.ended {
		return 0
	}
	n := in.Next(in.batch[:])
	for i := range in.batch[:n] {
		in.begin(&in.batch[i])
	}
	in.hub.flush()
	if in.answered {
		in.answered = false
		in.Publish()
	}
	if n == 0 && in.Closed() {
		in.end()
	}
	return n
}

// Arm returns false only if there is work. An intake that has ended has none.
func (in *intake) Arm() bool { return in.ended || in.Queue.Arm() }

func (in *intake) Disarm() {
	if !in.ended {
		in.Queue.Disarm()
	}
}

func (in *intake) begin(r *plugin.Request) {
	o := &in.ops[r.Tag]
	o.req, o.busy = *r, true
	o.disk, _ = r.Disk.(*disk)
	o.restart()
	o.disk.submit(o)
}

// restart prepares o to be sent from its first byte.
func (o *op) restart() { o.conn, o.sent, o.got, o.errno = nil, 0, 0, blk.OK }

// end takes the queue out of the pump. Requests that are in flight then, because the host
// is gone, keep no connection: nothing touches their memory after that.
func (in *intake) end() {
	for i := range in.ops {
		if o := &in.ops[i]; o.busy && o.conn != nil {
			o.conn.lost(errQueueEnded)
		}
	}
	for i := range in.ops {
		if o := &in.ops[i]; o.busy { // it waits for a connection
			o.disk.forget(o)
			o.finish(blk.EIO)
		}
	}
	in.Publish()
	in.ended = true
	in.hub.pump.Remove(in)
	close(in.done)
}

// finish answers o.
func (o *op) finish(e blk.Errno) {
	o.busy, o.conn = false, nil
	if c := o.call; c != nil {
		delete(o.disk.hub.statuses, o.cookie)
		c.err = e.Err()
		close(c.done)
		return
	}
	o.intake.answered = true
	o.disk = nil
	tag := o.req.Tag
	o.req = plugin.Request{}
	o.intake.Complete(tag, e)
}

// flush sends what the connections have to send.
func (h *hub) flush() {
	for len(h.dirty) > 0 {
		c := h.dirty[len(h.dirty)-1]
		h.dirty = h.dirty[:len(h.dirty)-1]
		c.dirty = false
		c.flush()
	}
}

// publish shows the hosts the answers that came out of the order of the polls.
func (h *hub) publish() {
	for _, in := range h.intakes {
		if in.answered && !in.ended {
			in.answered = false
			in.Publish()
		}
	}
}

// find returns the op of a reply on c, nil if the server has no such request.
func (h *hub) find(c *conn, cookie uint64) *op {
	var o *op
	if cookie&callCookie != 0 {
		o = h.statuses[cookie]
	} else if in, tag := cookie>>32, cookie&(1<<32-1); in < uint64(len(h.intakes)) && tag < uint64(len(h.intakes[in].ops)) {
		o = &h.intakes[in].ops[tag]
	}
	if o == nil || !o.busy || o.conn != c || o.sent < o.size() {
		return nil
	}
	return o
}

// eventsMax is the number of connections that are looked at in one turn.
const eventsMax = 64

// sockets are the connections as a source of the pump.
type sockets struct {
	epoll int
	conns map[int32]*conn // by number
	last  int32
	found int // events that Arm has found
	evs   [eventsMax]unix.EpollEvent
}

func newSockets() (*sockets, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	return &sockets{epoll: fd, conns: map[int32]*conn{}}, nil
}

// Poll handles the events of the connections.
func (s *sockets) Poll() int {
	n := s.found
	if s.found = 0; n == 0 {
		n = epollNow(s.epoll, s.evs[:])
	}
	for i := range s.evs[:n] {
		if c := s.conns[s.evs[i].Fd]; c != nil {
			c.onEvents(s.evs[i].Events)
		}
	}
	return n
}

func (s *sockets) Arm() bool {
	s.found = epollNow(s.epoll, s.evs[:])
	return s.found == 0
}

func (s *sockets) FD() int { return s.epoll }

func (s *sockets) add(c *conn) error {
	s.last++
	c.number = s.last
	ev := unix.EpollEvent{Events: c.events(), Fd: c.number}
	if err := unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, c.fd, &ev); err != nil {
		return fmt.Errorf("watch a connection: %w", err)
	}
	s.conns[c.number] = c
	return nil
}

func (s *sockets) remove(c *conn) {
	delete(s.conns, c.number)
	_ = unix.EpollCtl(s.epoll, unix.EPOLL_CTL_DEL, c.fd, nil) // closing it would do the same
}
