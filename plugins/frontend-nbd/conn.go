package main

import (
	"errors"
	"io"

	"golang.org/x/sys/unix"
)

// connState is the life of a connection in the transmission phase:
//
//	paused
//	 ▲  │ hand-over, see transfer.go
//	 │  ▼
//	open ──DISC, end of file──► draining ──all answered──┐
//	  │                            │                     ▼
//	  └────error, removal──────────┴───────────────────► dead ──last slot back──► gone
type connState uint8

const (
	connPaused   connState = iota // requests in flight end, nothing is read and no command begins
	connOpen                      // commands are read
	connDraining                  // commands already begun are answered, then the socket is closed
	connDead                      // the socket is closed; slots are still with the device
)

var connStateNames = [...]string{"paused", "open", "draining", "dead"}

func (s connState) String() string { return connStateNames[s] }

const (
	stageSize     = 256 << 10 // staging buffer of a connection, bytes
	bulkSize      = 64 << 10  // payload from here on goes from the socket into the slot
	largeSize     = 256 << 10 // after I/O of this size the pump does not spin
	receiveRounds = 8         // calls per connection and Poll, so that others get their turn
	maxRequests   = 256       // commands under way per connection
)

var (
	errDone     = errors.New("client is done")
	errGarbage  = errors.New("not an NBD request")
	errLateRead = errors.New("device failed a read whose reply had begun")
	errRemoved  = errors.New("device removed")
	errShutdown = errors.New("front end stops")
)

// conn is a connection in the transmission phase. It belongs to one queue.
type conn struct {
	q            *queue
	sh           *slotShare
	exp          *export
	fd           int
	peer         string         // for the log
	listener     string         // the client came by it; empty: not known
	disk         *kernelDisk    // of the kernel's client; nil: another client
	tunnel       *tlsTunnel     // nil: without TLS
	user         *nbdUser       // nil: not reported
	proof        *identityProof // nil: the client has proved no identity
	ended        bool           // the client can send nothing more, see noteEnd
	ending       uint64         // number in claims.ending; 0: not ended, or all commands are taken
	parked       int            // ops in queue.parked
	leaving      error          // why the connection ends when all is answered; nil: it does not
	index        int            // in queue.table
	state        connState
	structured   bool
	allocation   bool // base:allocation is in force
	readOnly     bool // writes are refused
	toldReadOnly bool // to the client, when it came
	lingers      bool // leaving, and all is answered, see closeIfAnswered
	readable     bool // the socket may have bytes
	writable     bool // the socket may take bytes
	hangup       bool // the end of the stream has been announced, and not again
	stalled      bool // waits for a slot or a request; does not read
	drained      bool // the last read emptied the socket, see due
	held         int  // slots
	quiet        int  // empty reads in a row
	passed       int  // turns in which the socket of a saturated client was skipped
	inFlight     inFlightEstimate

	stage []byte // received and not yet taken: stage[r:w]
	r, w  int
	bulk  bool     // the last command was a write with much payload
	cur   *request // its range is being covered
	fill  *op      // its payload is being received

	reqs       []request
	free       []*request
	unanswered int // commands; the last reply of each is not queued yet

	handed *handedConn // of a connection that another process has begun; nil: nothing is left of that

	out     []queuedReply // ring of replies to send
	outHead int
	outLen  int
	outSent int    // bytes of out[outHead] that are sent
	sent    uint64 // bytes of replies in all
	mark    uint64 // of sent, see guard
}

// newConn prepares a connection on a non-blocking socket. The connection owns
// the socket.
func newConn(fd int, peer string, n handshakeResult, sh *slotShare) *conn {
	c := &conn{
		q: sh.q, sh: sh, exp: n.exp, fd: fd, peer: peer, listener: n.listener, state: connOpen, structured: n.structured, allocation: n.allocation, readOnly: n.readOnly, toldReadOnly: n.readOnly,
		stage: make([]byte, stageSize),
		reqs:  make([]request, maxRequests),
		free:  make([]*request, 0, maxRequests),
		out:   make([]queuedReply, maxRequests+len(sh.ops)),
	}
	for i := range c.reqs {
		c.free = append(c.free, &c.reqs[i])
	}
	return c
}

func (c *conn) setState(to connState) {
	if to <= c.state {
		panic("nbd: connection goes from " + c.state.String() + " to " + to.String())
	}
	c.state = to
}

// sendBlocked reports whether the client does not take its replies.
func (c *conn) sendBlocked() bool { return c.hasReplies() && !c.writable }

// hasReplies reports whether there are replies to send.
func (c *conn) hasReplies() bool { return c.outLen > 0 || c.handed != nil && len(c.handed.unsent) > 0 }

// stageRoom moves the rest of the staging buffer, less than a header, to its
// beginning and returns the room behind it.
func (c *conn) stageRoom() []byte {
	c.w = copy(c.stage, c.stage[c.r:c.w])
	c.r = 0
	return c.stage[c.w:]
}

func (c *conn) takeRequest() *request {
	if len(c.free) == 0 {
		return nil
	}
	r := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	return r
}

func (c *conn) giveRequest(r *request) {
	*r = request{}
	c.free = append(c.free, r)
	c.q.again = true
}

// allAnswered reports whether every command is answered.
func (c *conn) allAnswered() bool {
	return c.cur == nil && len(c.free) == len(c.reqs) && !c.hasReplies()
}

// givenUp reports whether the kernel has closed its end and sends the
// unanswered commands again on other connections of the disk. Bytes that it
// sent before the end can still be read.
func (c *conn) givenUp() bool {
	if c.disk == nil || !c.exp.claims.exclusive.Load() {
		return false
	}
	return c.state == connDead || hungUp(c.fd)
}

// noteEnd is called when the client can send nothing more. From now on other
// connections do not overtake the requests that c has left, see claims.
func (c *conn) noteEnd() {
	if c.ended {
		return
	}
	c.ended = true
	c.ending = c.exp.claims.addEnded()
}

// forgetEnd undoes noteEnd when the last request of c has ended.
func (c *conn) forgetEnd() {
	if c.ending != 0 {
		c.exp.claims.endPrecedence(c.ending)
	}
	if c.ended {
		c.exp.claims.ended.Add(-1)
	}
	c.ended, c.ending = false, 0
}

// isTaken reports whether no further command of c begins, and the ranges of its
// writes are published.
func (c *conn) isTaken() bool { return c.state >= connDraining && c.cur == nil && c.parked == 0 }

// isGone reports whether the client can send nothing more. It takes a system call.
func (c *conn) isGone() bool {
	return c.ended || c.state >= connDraining || shutDown(c.fd) || c.tunnel != nil && c.tunnel.isGone()
}

// onEOF handles the end of the stream. Between commands it is a disconnect.
func (c *conn) onEOF() {
	if c.cur != nil || c.w != c.r {
		c.closeSocket(io.ErrUnexpectedEOF)
		return
	}
	c.setState(connDraining)
	c.noteEnd()
}

// closeSocket closes the socket at once. Slots that are with the device come back
// later.
func (c *conn) closeSocket(cause error) {
	if c.state == connDead {
		return
	}
	c.setState(connDead)
	c.noteEnd()
	unix.Close(c.fd)
	if c.tunnel != nil {
		c.tunnel.onQueueClosed(cause == errDone || cause == c.leaving)
	}
	c.q.log.Info("connection closed", "export", c.exp.name, "peer", c.peer, "cause", cause)
	c.user.closes(c.exp.name, c.readOnly, cause, cause == c.leaving)
	c.dropCurrent()
	c.handed = nil
	for ; c.outLen > 0; c.outLen-- {
		c.releaseReply(&c.out[c.outHead])
		c.outHead = (c.outHead + 1) % len(c.out)
	}
}

// dropCurrent ends a command that was received in part.
func (c *conn) dropCurrent() {
	r := c.cur
	if r == nil {
		return
	}
	c.cur = nil
	c.sh.allowGather(r)
	r.next = r.end
	if o := c.fill; o != nil {
		c.fill = nil
		r.pending--
		c.sh.putSlot(o)
	}
	if r.pending == 0 {
		c.finish(r)
	}
}
