package iwarp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

const (
	// fewQPs is the number of connections up to which Poll tries sockets
	// without asking epoll, which costs more than that many empty reads.
	fewQPs = 4
	// coldAfter is the number of polls without anything received or posted
	// after which a connection is not tried any more: only epoll tells.
	coldAfter = 256
	// coldEvery is how many polls apart epoll is asked about cold
	// connections while there are others.
	coldEvery = 8
)

// What an epoll event is about, other than the slot of a queue pair.
const (
	wakeToken  = -1
	timerToken = -2
)

// cq implements verbs.CQ. It holds no completions: they are made from the
// queues of its connections when Poll asks, so none can be lost.
type cq struct {
	dev     *Device
	epfd    int
	wakefd  int // eventfd: pending has news
	timerfd int
	events  []unix.EpollEvent
	base    time.Time
	stats   *counters

	slots  []*qp // attached connections by epoll token, nil where free
	count  int
	active []*qp // those with something to do, in the order of service
	spare  []*qp
	next   int64 // earliest deadline, 0: none
	// waiting is the number of connections that are not read from because a
	// message waits for a receive: only epoll tells when their peer goes.
	waiting int
	polls   uint32

	flag atomic.Bool // pending or revoked is not empty
	// turns is odd while the owner is inside Poll, Flush or Arm. Nobody touches
	// registered memory outside of them.
	turns atomic.Uint32

	mu      sync.Mutex
	pending []*qp               // to be attached, disconnected or destroyed
	revoked []*softverbs.Region // were closed: their work ends
	closed  bool
}

// CreateCQ makes a completion queue. depth is not used.
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) {
	if d.isClosed() {
		return nil, fmt.Errorf("create completion queue: %w", verbs.ErrClosed)
	}
	c := &cq{dev: d, epfd: -1, wakefd: -1, timerfd: -1, events: make([]unix.EpollEvent, 128), base: time.Now(), stats: d.newCounters()}
	if err := c.open(); err != nil {
		c.free()
		return nil, fmt.Errorf("create completion queue: %w", err)
	}
	return c, nil
}

func (c *cq) open() (err error) {
	if c.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if c.wakefd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return err
	}
	if c.timerfd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return err
	}
	if err = c.watch(c.wakefd, wakeToken, unix.EPOLLIN); err != nil {
		return err
	}
	return c.watch(c.timerfd, timerToken, unix.EPOLLIN)
}

// watch registers fd once, edge triggered.
func (c *cq) watch(fd, token int, what uint32) error {
	ev := unix.EpollEvent{Events: what | unix.EPOLLET, Fd: int32(token)}
	return unix.EpollCtl(c.epfd, unix.EPOLL_CTL_ADD, fd, &ev)
}

// free gives back what c has. Poll finds nothing from then on.
func (c *cq) free() {
	for _, fd := range []*int{&c.timerfd, &c.wakefd, &c.epfd} {
		if *fd >= 0 {
			unix.Close(*fd)
		}
		*fd = -1 // the number may be somebody else's next
	}
	c.slots, c.active, c.spare, c.next = nil, nil, nil, 0
	c.dev.dropCounters(c.stats)
}

// now is a monotonic time in nanoseconds, never 0.
func (c *cq) now() int64 { return int64(time.Since(c.base)) + 1 }

// FD implements verbs.CQ.
func (c *cq) FD() int { return c.epfd }

// Poll implements verbs.CQ.
func (c *cq) Poll(wcs []verbs.WC) int {
	c.turns.Add(1)
	defer c.turns.Add(1)
	if c.flag.Load() {
		c.control()
	}
	if c.next != 0 {
		c.timers()
	}
	if c.count > fewQPs || c.tryWarm() || c.waiting > 0 {
		c.collect()
	}
	c.transmit()
	return c.serve(wcs)
}

// Flush implements verbs.CQ.
func (c *cq) Flush() {
	c.turns.Add(1)
	defer c.turns.Add(1)
	c.flush()
}

func (c *cq) flush() {
	if c.flag.Load() {
		c.control()
	}
	c.transmit()
}

func (c *cq) transmit() {
	for _, q := range c.active {
		if q.attached && q.wants() && !q.tx.blocked {
			q.transmit()
		}
	}
}

// serve lets every active connection make progress. When wcs is full the ones
// that were not reached come first the next time.
func (c *cq) serve(wcs []verbs.WC) int {
	n, i, keep := 0, 0, 0
	for ; i < len(c.active) && n < len(wcs); i++ {
		q := c.active[i]
		n += q.progress(wcs[n:])
		if q.busy() {
			c.active[keep] = q
			keep++
		} else {
			q.listed = false
		}
	}
	if i == len(c.active) {
		c.active = c.active[:keep]
		return n
	}
	c.spare = append(append(c.spare[:0], c.active[i:]...), c.active[:keep]...)
	c.active, c.spare = c.spare, c.active
	return n
}

// progress does what there is to do for one connection.
func (q *qp) progress(wcs []verbs.WC) int {
	if !q.attached {
		return 0
	}
	n := q.reap(wcs)
	if q.end.state == endNone {
		n += q.receive(wcs[n:])
	}
	if q.wants() && !q.tx.blocked {
		q.transmit()
	}
	if q.end.state == endFlushing {
		n += q.flush(wcs[n:])
	}
	return n
}

// busy tells whether another call of progress would find something.
func (q *qp) busy() bool {
	switch {
	case !q.attached:
		return false
	case q.end.state == endFlushing, q.reapable(), q.wants() && !q.tx.blocked:
		return true
	case q.end.state != endNone:
		return false
	case q.rnrSince != 0:
		return q.rqHead != q.rqTail
	}
	return q.more || q.readable
}

// activate puts q on the list of those with something to do. Owner only.
func (c *cq) activate(q *qp) {
	if !q.listed {
		q.listed = true
		c.active = append(c.active, q)
	}
}

// tryWarm makes the connections that are in use look at their sockets, or tells
// that it is time to ask epoll, which knows of these and of the others.
func (c *cq) tryWarm() (ask bool) {
	c.polls++
	warm, cold := false, false
	for _, q := range c.slots {
		if q != nil {
			warm = warm || q.quiet < coldAfter
			cold = cold || q.quiet >= coldAfter
		}
	}
	if cold && (!warm || c.polls%coldEvery == 0) {
		return true
	}
	for _, q := range c.slots {
		if q != nil && q.quiet < coldAfter {
			q.quiet++
			q.readable, q.tx.blocked = true, false
			c.activate(q)
		}
	}
	return false
}

// collect asks epoll which connections have news, and returns how many events
// there were.
func (c *cq) collect() int {
	n := softverbs.EpollNow(c.epfd, c.events)
	for i := range c.events[:n] {
		ev := &c.events[i]
		if ev.Fd < 0 || int(ev.Fd) >= len(c.slots) || c.slots[ev.Fd] == nil {
			continue
		}
		q := c.slots[ev.Fd]
		if ev.Events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			q.readable = true
		}
		if ev.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			q.hangup = true
			if q.rnrSince != 0 {
				q.waitLess()
			}
		}
		if ev.Events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			q.tx.blocked = false
		}
		c.activate(q)
	}
	return n
}

// Arm implements verbs.CQ.
func (c *cq) Arm() bool {
	c.turns.Add(1)
	defer c.turns.Add(1)
	c.flush()
	for _, q := range c.active {
		if q.busy() {
			return false
		}
	}
	if c.collect() > 0 || c.flag.Load() {
		return false
	}
	if c.next != 0 {
		wait := unix.NsecToTimespec(max(c.next-c.now(), 1))
		if err := unix.TimerfdSettime(c.timerfd, 0, &unix.ItimerSpec{Value: wait}, nil); err != nil {
			return false
		}
	}
	return true
}

// setDeadline sets the time at which q wants to be looked at; 0: none.
func (q *qp) setDeadline(t int64) {
	q.deadline = t
	if c := q.cq; t != 0 && (c.next == 0 || t < c.next) {
		c.next = t
	}
}

// timers looks after the connections whose time has come.
func (c *cq) timers() {
	now := c.now()
	if now < c.next {
		return
	}
	c.next = 0
	for _, q := range c.slots {
		if q == nil || q.deadline == 0 {
			continue
		}
		if due := q.deadline; due <= now {
			q.deadline = 0
			q.expire(now)
		} else {
			q.setDeadline(due)
		}
	}
}

// pokeWaits is how long a foreign responder may be silent before the next
// empty Write; the last one repeats.
var pokeWaits = [...]time.Duration{20 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond, time.Second}

func (q *qp) expire(now int64) {
	switch {
	case q.end.state == endTerminating:
		q.hangUp(q.end.status, q.end.cause)
	case q.end.state != endNone:
	case q.rnrSince != 0 && q.rqHead != q.rqTail:
		q.cq.activate(q) // the receive is there
	case q.rnrSince != 0 && q.hangup:
		q.peerGone(io.EOF)
	case q.rnrSince != 0:
		q.tx.off.setHeader(q.rx.head[:])
		q.terminate(termNoBuffer)
	case q.terms.poke:
		q.tx.poke = true
		q.pokeStep = min(q.pokeStep+1, len(pokeWaits)-1)
		q.setDeadline(now + int64(pokeWaits[q.pokeStep]))
		q.cq.activate(q)
	}
}

// submit asks the owner to look at q. Any goroutine.
func (c *cq) submit(q *qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || q.queued {
		return
	}
	q.queued = true
	c.pending = append(c.pending, q)
	c.wake()
}

// wake makes the owner call control. mu is held.
func (c *cq) wake() {
	c.flag.Store(true)
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	unix.Write(c.wakefd, one[:]) // EAGAIN means that it is readable anyhow
}

// Release implements softverbs.Owner.
func (c *cq) Release(r *softverbs.Region) {
	c.revoke(r)
	c.passTurn()
}

// revoke asks the owner to end the connections with work that names r. Any
// goroutine.
func (c *cq) revoke(r *softverbs.Region) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.revoked = append(c.revoked, r)
		c.wake()
	}
}

// passTurn returns when the owner has seen what was asked of it, or will see it
// before it touches memory. It waits while the owner is inside a call, none of
// which blocks. Any goroutine.
func (c *cq) passTurn() {
	turn := c.turns.Load()
	if turn%2 == 0 {
		return
	}
	for n := 0; c.turns.Load() == turn; n++ {
		if n < 100 {
			runtime.Gosched()
		} else {
			time.Sleep(20 * time.Microsecond)
		}
	}
}

// control does what other goroutines asked for.
func (c *cq) control() {
	c.mu.Lock()
	list, revoked := c.pending, c.revoked
	c.pending, c.revoked = nil, nil
	c.flag.Store(false)
	for _, q := range list {
		q.queued = false
	}
	c.mu.Unlock()
	for _, r := range revoked {
		for _, q := range c.slots {
			if q != nil && q.pd == r.Domain && q.names(r) {
				q.hangUp(verbs.StatusLocalProt, errRevoked)
			}
		}
	}
	for _, q := range list {
		if !q.attached && q.is(phaseUp) {
			c.attach(q)
		}
		switch {
		case !q.attached:
		case q.destroyed.Load():
			q.abandon()
		case q.disconnect.Load():
			q.leave()
		}
	}
}

// attach takes over a connection that has finished its start-up.
func (c *cq) attach(q *qp) {
	q.slot = c.freeSlot()
	c.slots[q.slot] = q
	c.count++
	q.attached, q.readable = true, true
	c.activate(q)
	q.pd.Join(c)
	if !q.inPlace() {
		q.hangUp(verbs.StatusLocalProt, errRevoked)
		return
	}
	if err := c.watch(q.fd, q.slot, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP); err != nil {
		q.hangUp(verbs.StatusFatal, fmt.Errorf("epoll: %w", err))
		return
	}
	if q.terms.poke {
		q.setDeadline(c.now() + int64(pokeWaits[0]))
	}
	q.dev.cfg.Logger.Info("iwarp connection up", "local", q.LocalAddr(), "remote", q.RemoteAddr(), "crc", q.terms.crc)
}

func (c *cq) freeSlot() int {
	for i, q := range c.slots {
		if q == nil {
			return i
		}
	}
	c.slots = append(c.slots, nil)
	return len(c.slots) - 1
}

// forget stops watching the socket of q.
func (c *cq) forget(q *qp) {
	unix.EpollCtl(c.epfd, unix.EPOLL_CTL_DEL, q.fd, nil)
}

// detach lets go of a connection that has ended.
func (c *cq) detach(q *qp) {
	if !q.attached {
		return
	}
	q.attached = false
	q.pd.Leave(c)
	c.slots[q.slot] = nil
	c.count--
	for n := len(c.slots); n > 0 && c.slots[n-1] == nil; n-- {
		c.slots = c.slots[:n-1]
	}
}

// Close implements verbs.CQ.
func (c *cq) Close() error {
	c.control()
	if c.count > 0 {
		return fmt.Errorf("close completion queue: %d connections are still up", c.count)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errors.New("close completion queue: closed before")
	}
	c.closed = true
	c.free()
	return nil
}
