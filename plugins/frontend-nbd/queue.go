package main

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/tally"
)

const (
	maxConns  = 256 // connections per queue
	popBatch  = 128
	eventsMax = 64
	iovMax    = 256
)

// submitRing is this side of a queue's ring: plugin.FrontQueue, or shm.Submitter in
// tests. Entries are passed by pointers into the queue, so nothing escapes.
type submitRing interface {
	Fits(sent int) bool
	Push(*shm.SQE) bool
	Publish()
	Pop([]shm.CQE) int
	Arm() bool
	Disarm()
	FD() int
}

// queue is one pump's work: a ring and the connections that belong to it. It
// implements pump.Source; all methods but kick run on the pump's thread.
type queue struct {
	ring   submitRing
	epoll  int         // the sockets (edge triggered) and the doorbells
	wake   int         // eventfd, see kick; -1 after close
	alarm  atomic.Bool // kicked by the guard's timer
	kicked atomic.Bool // wake is readable: call epoll
	guard  starvationGuard
	kickMu sync.Mutex // keeps wake open while others kick
	log    *slog.Logger
	do     func(func()) // runs a function on the queue's thread; any thread

	table   [maxConns]*conn // by index in epoll events
	conns   []*conn
	turn    int          // counts calls of Poll; selects the connection that is served first
	shares  []*slotShare // by device
	parked  opList       // wait for a conflicting write, see claims
	backlog []*slotShare // shares with ops that wait for room in the ring

	events   int  // events handled in this round
	answered bool // replies were sent in this round
	again    bool // a slot or request was given back: retry the stalled connections
	large    bool
	holds    bool // connections are paused, see transfer.go
	left     bool // another process has the connections; further ones are closed

	sqe  shm.SQE
	cqes [popBatch]shm.CQE
	evs  [eventsMax]unix.EpollEvent
	iov  [iovMax]unix.Iovec
	list [extents.Max]extents.Extent // of the reply that is made, see status.go

	stats queueStats
	seat  pump.Seat

	// Both set, or both nil: a clock in nanoseconds, and the function that
	// records the duration of each request. See plugin.FrontQueue.Served.
	now    func() int64
	served func(device uint32, op blk.Op, ns int64)
}

// queueStats are counters; written by the queue's thread only.
type queueStats struct {
	requests         tally.Count // commands received
	errors           tally.Count // answered with an error
	placedBytes      tally.Count // payload bytes copied by place
	strayCompletions tally.Count // dropped: no such request
}

func newQueue(r submitRing, log *slog.Logger) (*queue, error) {
	q := &queue{ring: r, log: log, epoll: -1, wake: -1, guard: starvationGuard{patience: patience}}
	if err := q.open(); err != nil {
		q.close()
		return nil, err
	}
	return q, nil
}

func (q *queue) open() (err error) {
	if q.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("create epoll: %w", err)
	}
	if q.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create eventfd: %w", err)
	}
	if err = q.watchFD(q.wake, bellWake, unix.EPOLLIN); err != nil {
		return err
	}
	return q.watchFD(q.ring.FD(), bellRing, unix.EPOLLIN|unix.EPOLLET)
}

// Doorbells among the epoll events; connections have indices from 0.
const (
	bellWake = -1
	bellRing = -2
)

func (q *queue) watchFD(fd, index int, events uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: int32(index)}
	if err := unix.EpollCtl(q.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("watch descriptor: %w", err)
	}
	return nil
}

// watchRoom sets whether epoll reports room in the send buffer. A unix socket reports
// it after every read of the client, and each report wakes the pump.
func (q *queue) watchRoom(c *conn, on bool) {
	events := uint32(unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET)
	if on {
		events |= unix.EPOLLOUT
	}
	ev := unix.EpollEvent{Events: events, Fd: int32(c.index)}
	if err := unix.EpollCtl(q.epoll, unix.EPOLL_CTL_MOD, c.fd, &ev); err != nil {
		c.closeSocket(err)
	}
}

// close ends the remaining connections after the pump has stopped.
func (q *queue) close() {
	for _, c := range q.conns {
		c.closeSocket(errShutdown)
		q.removeConn(c)
	}
	q.conns = nil
	q.kickMu.Lock()
	defer q.kickMu.Unlock()
	for _, fd := range []*int{&q.epoll, &q.wake} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
}

// Poll does one round: completions, sockets, one publish, replies. It returns
// the number of events that it handled; 0 is idle.
func (q *queue) Poll() int {
	q.events, q.again = 0, false
	q.popAnswers()
	q.retryBacklog()
	q.retryParked()
	q.markReadable()
	for i := range q.conns {
		c := q.conns[(i+q.turn)%len(q.conns)]
		if c.stalled && c.state != connPaused {
			c.stalled = false
			c.advance()
		}
		c.receive()
	}
	q.ring.Publish()
	for _, c := range q.conns {
		c.flush()
	}
	q.noteLeft()
	q.reapConns()
	if q.again {
		q.events++
	}
	return q.events
}

// noteLeft tells the seat that replies were sent and nothing is in flight. Clients on
// several connections may be on as many CPUs, and none is chosen for them.
func (q *queue) noteLeft() {
	if q.answered && q.seat.Chooses() && len(q.conns) == 1 && q.conns[0].unanswered == 0 && !q.conns[0].hasReplies() {
		q.seat.Left(q.now())
	}
	q.answered = false
}

func (q *queue) popAnswers() {
	for {
		n := q.ring.Pop(q.cqes[:])
		for i := range n {
			q.onCompletion(&q.cqes[i])
		}
		q.events += n
		if n < len(q.cqes) {
			return
		}
	}
}

// retryBacklog pushes ops that wait for room. The shares take turns: each has the first
// try in one of the rounds.
func (q *queue) retryBacklog() {
	waiting := q.backlog[:0]
	for _, s := range q.backlog {
		for !s.backlog.empty() && q.tryPush(s.backlog.head) {
			s.backlog.pop()
			q.events++
		}
		if !s.backlog.empty() {
			waiting = append(waiting, s)
		}
	}
	if n := len(waiting); n > 1 {
		first := waiting[0]
		copy(waiting, waiting[1:])
		waiting[n-1] = first
	}
	q.backlog = waiting
}

// reapConns closes drained connections and removes dead ones that hold no slot.
func (q *queue) reapConns() {
	for i := 0; i < len(q.conns); i++ {
		c := q.conns[i]
		if c.state == connDraining && c.allAnswered() {
			c.closeIfAnswered()
		}
		if c.ending != 0 && c.isTaken() {
			q.endPrecedence(c)
		}
		if c.state == connDead && c.held == 0 {
			q.conns = append(q.conns[:i], q.conns[i+1:]...)
			q.removeConn(c)
			i--
		}
	}
}

// endPrecedence lets other connections of the export take slots again.
func (q *queue) endPrecedence(c *conn) {
	c.exp.claims.endPrecedence(c.ending)
	c.ending = 0
	q.again = true
	q.kickOthers(c.exp)
}

// noteEnds finds the connections of e whose clients have gone.
func (q *queue) noteEnds(e *export) {
	for _, c := range q.conns {
		if c.exp == e && c.isGone() {
			c.noteEnd()
		}
	}
}

// addConn adds a connection. If the queue is full or the device is being removed,
// the connection is closed.
func (q *queue) addConn(c *conn) {
	c.index = -1
	for i := range q.table {
		if q.table[i] == nil {
			c.index = i
			break
		}
	}
	q.conns = append(q.conns, c)
	c.sh.conns = append(c.sh.conns, c)
	if c.index < 0 {
		c.closeSocket(fmt.Errorf("queue has %d connections", maxConns))
		return
	}
	q.table[c.index] = c
	for len(q.shares) <= int(c.exp.index) {
		q.shares = append(q.shares, nil)
	}
	q.shares[c.exp.index] = c.sh
	q.backlog = slices.Grow(q.backlog, len(q.shares)) // each at most once: push allocates nothing
	c.readable, c.writable = true, true
	if q.holds && c.state == connOpen && c.disk == nil {
		c.state = connPaused
	}
	if err := q.watchFD(c.fd, c.index, unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLET); err != nil {
		c.closeSocket(err)
	}
	if q.left && c.disk == nil {
		c.closeSocket(errMoved)
	}
	if c.exp.beingRemoved() {
		c.closeSocket(errRemoved)
	}
}

// removeConn removes a connection that holds no slot any more.
func (q *queue) removeConn(c *conn) {
	if c.index >= 0 {
		q.table[c.index] = nil
	}
	c.sh.removeConn(c)
	c.forgetEnd()
	q.kickOthers(c.exp)
	c.exp.unassignShare(c.sh)
	if c.disk != nil {
		c.disk.onConnLost()
	} else {
		c.exp.removeOpener()
	}
	q.events++
}

// evictExport closes the connections of an export.
func (q *queue) evictExport(e *export) {
	for _, c := range q.conns {
		if c.exp == e {
			c.closeSocket(errRemoved)
		}
	}
}

// claimRange reports whether no other write conflicts with o, and claims o's range
// if so; see claims.
func (q *queue) claimRange(o *op) bool {
	e := o.sh.exp
	if e.claims.ended.Load() != 0 && !q.followsWrites(o) {
		return false
	}
	if !o.req.op.Modifies() {
		return true
	}
	if o.step != stepReadBlock {
		if o.plain = e.claims.beginWrite(o.tag, o.off, o.off+uint64(o.n), e.block); !o.plain {
			q.alertQueues(e) // begin has withdrawn a range, and the other claim may have waited for it
		}
		return o.plain
	}
	block := o.off / e.block
	o.claimed = o.claimed || e.claims.claimBlock(block)
	return o.claimed && e.claims.writesDrained(block, e.block)
}

// followsWrites reports whether o overtakes no write of a connection that has ended. If
// it does, the range that o may have published is withdrawn.
func (q *queue) followsWrites(o *op) bool {
	c := &o.sh.exp.claims
	if o.claimed || o.req.op == blk.Flush || o.req.op == blk.Extents {
		return true
	}
	if c.followsWrites(o.tag, o.off, o.off+uint64(o.n), o.sh.exp.block) {
		return true
	}
	if c.endWrite(o.tag) {
		q.alertQueues(o.sh.exp)
	}
	return false
}

// unclaimRange releases o's claim and wakes the writes that it blocked.
func (q *queue) unclaimRange(o *op) {
	e := o.sh.exp
	switch {
	case o.claimed:
		e.claims.unclaimBlock(o.off / e.block)
	case o.plain:
		e.claims.endWrite(o.tag)
	default:
		return
	}
	o.claimed, o.plain = false, false
	if e.claims.waiting.Load() > 0 {
		q.again = true
		q.alertQueues(e)
	}
}

// alertQueues makes the other queues retry their parked requests to e.
func (q *queue) alertQueues(e *export) {
	if e.claims.waiting.Load() != 0 {
		q.kickOthers(e)
	}
}

// kickOthers makes the other queues of e run a round.
func (q *queue) kickOthers(e *export) {
	for _, s := range e.shares {
		if s.q != q {
			s.q.kickParked()
		}
	}
}

// park keeps an op until the conflicting write has ended. That write may have
// ended before it could see that o waits, so the queue runs one more round.
func (q *queue) park(o *op) {
	o.sh.exp.claims.waiting.Add(1)
	o.conn.parked++
	q.parked.push(o)
	q.again = true
}

func (q *queue) retryParked() {
	list := q.parked
	q.parked = opList{}
	for !list.empty() {
		o := list.pop()
		dead := o.conn.state == connDead
		if !dead && !q.claimRange(o) {
			q.parked.push(o)
			continue
		}
		o.sh.exp.claims.waiting.Add(-1)
		o.conn.parked--
		q.events++
		if dead {
			q.dropParked(o)
		} else {
			q.submit(o)
		}
	}
}

// dropParked ends a parked op whose connection is dead. No client gets the answer.
func (q *queue) dropParked(o *op) {
	if !o.claimed {
		o.plain = o.sh.exp.claims.endWrite(o.tag)
	}
	o.conn.onDone(o, blk.EIO)
}

// kickParked makes the queue retry its parked ops and check its alarm. Any thread may
// call it. It is called only when writes of one block conflict on two queues,
// or when a connection starves.
func (q *queue) kickParked() {
	q.kickMu.Lock()
	defer q.kickMu.Unlock()
	if q.wake >= 0 {
		one := [8]byte{1}
		unix.Write(q.wake, one[:])
		q.kicked.Store(true) // not before: the queue may look at once
	}
}

func (q *queue) Disarm() { q.ring.Disarm() }
func (q *queue) FD() int { return q.epoll }

// tagOf names a slot of a device in the ring.
func tagOf(device, slot uint32) uint64 { return uint64(device)<<32 | uint64(slot) }

// opOf is the inverse of tagOf. It returns nil for a tag of no request of q.
func (q *queue) opOf(tag uint64) *op {
	device, slot := tag>>32, uint32(tag)
	if device >= uint64(len(q.shares)) || q.shares[device] == nil {
		return nil
	}
	s := q.shares[device]
	if slot-s.first >= uint32(len(s.ops)) {
		return nil
	}
	return &s.ops[slot-s.first]
}
