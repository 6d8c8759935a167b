package iwarp

import (
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. A turn of the owner:
//
//	Poll        requests of other goroutines; deadlines
//	tryWarm     the sockets to try without epoll
//	collect     epoll: the sockets with events
//	transmit    tx.go: requests posted since
//	serve       progress of the connections with something to do
//	Arm         the last look before the owner sleeps

const (
	// fewQPs is the number of connections up to which Poll tries sockets
	// without asking epoll. epoll costs more than that many empty reads.
	fewQPs = 4
	// coldAfter is a number of polls without anything received or posted.
	// After them the socket of a connection is read only if epoll reports it.
	coldAfter = 256
	// maxEvents is the number of epoll events that are taken at a time.
	maxEvents = 128
	// coldEvery is how many polls apart epoll is asked about such connections
	// while others are in use. A poll with completions counts as busyPoll: it takes
	// that much longer than one that finds nothing.
	coldEvery = 32
	busyPoll  = 4
)

// compQueue implements verbs.CQ.
type compQueue struct {
	softverbs.CQ[*qp]
	dev   *Device
	stats *queueCounters

	// waiting is the number of connections that are not read because a message
	// waits for a receive. Only epoll reports that their peer has gone.
	waiting int
	polls   uint32 // since epoll was asked
}

// CreateCQ makes a completion queue. depth is not used.
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) {
	if d.isClosed() {
		return nil, fmt.Errorf("create completion queue: %w", verbs.ErrClosed)
	}
	c := &compQueue{dev: d, stats: &queueCounters{}}
	c.Init()
	if err := c.Open(maxEvents); err != nil {
		c.Free()
		return nil, fmt.Errorf("create completion queue: %w", err)
	}
	d.stats.Open(c.stats)
	return c, nil
}

// Poll implements verbs.CQ.
func (c *compQueue) Poll(wcs []verbs.WC) int {
	c.Turn.Lock() // no defer: that costs as much as the lock
	n := c.pollOnce(wcs)
	c.Turn.Unlock()
	return n
}

func (c *compQueue) pollOnce(wcs []verbs.WC) int {
	if c.Asked() {
		c.runControl()
	}
	if c.Timed() {
		if now := c.Now(); c.Due(now) {
			c.Expire(now)
		}
	}
	if c.Count > fewQPs || c.tryWarm() || c.waiting > 0 {
		c.collectEvents()
	}
	c.transmitActive()
	n := c.serveActive(wcs)
	if n > 0 {
		c.polls += busyPoll - 1
	}
	return n
}

// Flush implements verbs.CQ.
func (c *compQueue) Flush() {
	c.Turn.Lock()
	defer c.Turn.Unlock()
	c.flushDead()
}

func (c *compQueue) flushDead() {
	if c.Asked() {
		c.runControl()
	}
	c.transmitActive()
}

func (c *compQueue) transmitActive() {
	for _, q := range c.All() {
		if q.Attached && q.hasWork() && !q.tx.blocked {
			q.transmit()
		}
	}
}

// serveActive calls progress of the connections with something to do and returns the
// number of completions. If wcs is full, those that were not reached come first
// the next time.
func (c *compQueue) serveActive(wcs []verbs.WC) int {
	n := 0
	for n < len(wcs) && c.More() {
		q := c.Next()
		n += q.progress(wcs[n:])
		c.Keep(&q.Listed, q.busy())
	}
	c.EndRound()
	return n
}

// progress serves the connection and returns the number of completions.
func (q *qp) progress(wcs []verbs.WC) int {
	if !q.Attached {
		return 0
	}
	n := q.Reap(wcs, q.oldestRequest())
	if q.End.State == softverbs.EndNone {
		n += q.receive(wcs[n:])
	}
	if q.hasWork() && !q.tx.blocked {
		q.transmit()
	}
	if q.End.State == softverbs.EndFlushing {
		n += q.flushRequests(wcs[n:])
	}
	return n
}

// busy reports whether another call of progress would find something to do.
func (q *qp) busy() bool {
	switch {
	case !q.Attached:
		return false
	case q.End.State == softverbs.EndFlushing, q.SQ.Reapable(q.oldestRequest()), q.hasWork() && !q.tx.blocked:
		return true
	case q.End.State != softverbs.EndNone:
		return false
	case q.rnrSince != 0:
		return !q.RQ.Empty()
	}
	return q.more || q.canFill()
}

// activate adds q to the connections with something to do.
func (c *compQueue) activate(q *qp) { c.Add(q, &q.Listed) }

// tryWarm marks the sockets of connections in use as readable, so that they are
// tried. It reports whether to ask epoll, too: about the others.
func (c *compQueue) tryWarm() (ask bool) {
	c.polls++
	warm, cold := false, false
	for _, q := range c.Slots {
		if q == nil {
			continue
		}
		if q.quiet >= coldAfter {
			cold = true
			continue
		}
		warm = true
		q.quiet++
		q.readable, q.tx.blocked = true, false
		c.activate(q)
	}
	if ask = cold && (!warm || c.polls >= coldEvery); ask {
		c.polls = 0
	}
	return ask
}

// collectEvents takes events from epoll and returns their number.
func (c *compQueue) collectEvents() int {
	events := c.Events()
	for i := range events {
		ev := &events[i]
		if ev.Fd < 0 || int(ev.Fd) >= len(c.Slots) || c.Slots[ev.Fd] == nil {
			continue
		}
		q := c.Slots[ev.Fd]
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
	return len(events)
}

// Arm implements verbs.CQ.
func (c *compQueue) Arm() bool {
	c.Turn.Lock()
	defer c.Turn.Unlock()
	c.flushDead()
	for _, q := range c.All() {
		if q.busy() {
			return false
		}
	}
	return c.collectEvents() == 0 && c.SetAlarm()
}

// pokeWaits are the waits before the empty Writes to a foreign responder that
// is silent. The last one repeats.
var pokeWaits = [...]time.Duration{20 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond, time.Second}

// Expire implements softverbs.Conn.
func (q *qp) Expire(now int64) {
	switch {
	case q.End.State == softverbs.EndNotified:
		q.hangUp(q.End.Status, q.End.Cause)
	case q.End.State != softverbs.EndNone:
	case q.rnrSince != 0 && !q.RQ.Empty():
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

// Release implements softverbs.Owner. The owner ends the connections with work
// that names r, at the latest before it touches memory again.
func (c *compQueue) Release(r *softverbs.Region) {
	c.Call(func() { c.revokeRegion(r) })
	c.Turn.Lock() // the turn that the owner may be in has ended
	defer c.Turn.Unlock()
}

// revokeRegion ends the connections with work that names r.
func (c *compQueue) revokeRegion(r *softverbs.Region) {
	for _, q := range c.Slots {
		if q != nil && q.Domain == r.Domain && q.usesRegion(r) {
			q.hangUp(verbs.StatusLocalProt, errRevoked)
		}
	}
}

// runControl handles the requests of other goroutines.
func (c *compQueue) runControl() {
	for _, q := range c.Take() {
		if !q.Attached && q.Is(softverbs.Up) {
			c.attachConn(q)
		}
		switch {
		case !q.Attached:
		case q.Destroyed():
			q.endDestroyed()
		case q.Disconnecting():
			q.onDisconnect()
		}
	}
}

// attachConn begins to serve a connection after its start-up.
func (c *compQueue) attachConn(q *qp) {
	c.Attach(q, c)
	q.readable = true
	c.activate(q)
	if !q.inPlace() {
		q.hangUp(verbs.StatusLocalProt, errRevoked)
		return
	}
	if err := c.Watch(q.fd, q.Slot, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET); err != nil {
		q.hangUp(verbs.StatusFatal, err)
		return
	}
	if q.terms.poke {
		q.setDeadline(c.Now() + int64(pokeWaits[0]))
	}
	log := q.dev.cfg.Logger
	if s := q.Security(); s.Protocol != "" {
		log = log.With("identity", s.Peer, "cipher", s.Cipher)
	}
	log.Info("iwarp connection up", "local", q.LocalAddr(), "remote", q.RemoteAddr(), "crc", q.terms.crc)
}

// setDeadline sets the time of the next call of Expire; 0: never.
func (q *qp) setDeadline(t int64) { q.cq.SetDeadline(&q.QP, t) }

// detachConn removes a connection that has ended.
func (c *compQueue) detachConn(q *qp) { c.Detach(q, c) }

// Close implements verbs.CQ.
func (c *compQueue) Close() error {
	c.runControl()
	if err := c.CQ.Close(); err != nil {
		return err
	}
	c.dev.stats.Close(c.stats)
	return nil
}
