package softverbs

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// DATA PATH. A turn of the owner of a completion queue:
//
//	Pending.Asked    other goroutines have left something: Pending.Take
//	CQ.Events        the sockets with events
//	Ready.Next       the connections with something to do, one by one
//	Ready.Keep       whether the connection stays in the list
//	CQ.Due           deadlines: CQ.Expire
//	CQ.SetAlarm      the last look before the owner sleeps

// Conn is a provider's queue pair. It embeds QP.
type Conn interface {
	comparable
	// Base returns the embedded QP.
	Base() *QP
	// Expire is called when the deadline has passed. The deadline is cleared
	// then.
	Expire(now int64)
	mark() *bool
}

// Kinds of epoll events that concern no socket.
const (
	wakeToken  = -1
	timerToken = -2
)

// CQ is the part of a completion queue that is the same in every fabric. A
// provider embeds it and implements Poll, Flush and Arm. It holds no
// completions: they are made from the queues of the connections when Poll
// asks, so that none can be lost.
type CQ[Q Conn] struct {
	// Turn is held by the owner in Poll, Flush and Arm, and by Release. The
	// three do not block. Registered memory is touched only while it is held.
	// It is taken before every other lock.
	Turn sync.Mutex

	Pending[Q]
	Ready[Q]

	// Slots are the attached connections, the zero value where there is none.
	Slots []Q
	Count int // of attached connections

	next    int64 // earliest deadline, 0: none
	base    time.Time
	epfd    int
	timerfd int
	events  []unix.EpollEvent
}

// Init prepares a queue without descriptors.
func (c *CQ[Q]) Init() {
	c.base, c.epfd, c.fd, c.timerfd = time.Now(), -1, -1, -1
}

// Open opens the descriptors of a queue that takes up to events events at a
// time. After an error Free must be called.
func (c *CQ[Q]) Open(events int) (err error) {
	c.events = make([]unix.EpollEvent, events)
	if c.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll: %w", err)
	}
	if err = c.OpenFD(); err != nil {
		return err
	}
	if c.timerfd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return fmt.Errorf("timerfd: %w", err)
	}
	if err = c.Watch(c.fd, wakeToken, unix.EPOLLIN|unix.EPOLLET); err != nil {
		return err
	}
	return c.Watch(c.timerfd, timerToken, unix.EPOLLIN|unix.EPOLLET)
}

// Watch adds fd to those that make FD readable. Tokens of sockets are not
// negative.
func (c *CQ[Q]) Watch(fd, token int, what uint32) error {
	ev := unix.EpollEvent{Events: what, Fd: int32(token)}
	if err := unix.EpollCtl(c.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("epoll: %w", err)
	}
	return nil
}

// Unwatch removes fd.
func (c *CQ[Q]) Unwatch(fd int) { unix.EpollCtl(c.epfd, unix.EPOLL_CTL_DEL, fd, nil) }

// Free closes the descriptors and forgets the connections.
func (c *CQ[Q]) Free() {
	for _, fd := range []*int{&c.timerfd, &c.fd, &c.epfd} {
		if *fd >= 0 {
			unix.Close(*fd)
		}
		*fd = -1 // the number may be reused by another descriptor
	}
	c.Slots, c.Ready, c.next = nil, Ready[Q]{}, 0
}

// FD implements verbs.CQ.
func (c *CQ[Q]) FD() int { return c.epfd }

// Now returns a monotonic time in nanoseconds. It is never 0.
func (c *CQ[Q]) Now() int64 { return int64(time.Since(c.base)) + 1 }

// Events returns events that wait, as many as fit. It does not block. Those
// with a negative token concern no socket.
func (c *CQ[Q]) Events() []unix.EpollEvent { return c.events[:EpollNow(c.epfd, c.events)] }

// Ready lists the connections with something to do, in the order of service.
type Ready[Q any] struct {
	list, spare []Q
	at, kept    int // in a round: the number served, and how many of them stay
}

// Add appends q unless its mark listed says that it is in the list.
func (r *Ready[Q]) Add(q Q, listed *bool) {
	if !*listed {
		*listed = true
		r.list = append(r.list, q)
	}
}

// All returns the connections in the list.
func (r *Ready[Q]) All() []Q { return r.list }

// More reports whether the round is not over.
func (r *Ready[Q]) More() bool { return r.at < len(r.list) }

// Next returns the next connection of the round. Keep must be called for it.
func (r *Ready[Q]) Next() Q { return r.list[r.at] }

// Keep ends the service of the connection that Next returned: it stays in the
// list if busy is true.
func (r *Ready[Q]) Keep(listed *bool, busy bool) {
	q := r.list[r.at]
	var none Q
	r.list[r.at] = none // the list keeps no connection alive that has left it
	if busy {
		r.list[r.kept] = q
		r.kept++
	} else {
		*listed = false
	}
	r.at++
}

// EndRound prepares the next round. Connections that were not reached come
// first in it.
func (r *Ready[Q]) EndRound() {
	if r.at == len(r.list) {
		r.list = r.list[:r.kept]
	} else {
		r.spare = append(append(r.spare[:0], r.list[r.at:]...), r.list[:r.kept]...)
		r.list, r.spare = r.spare, r.list
	}
	r.at, r.kept = 0, 0
}

// SetDeadline sets the time of the next call of q's Expire; 0: never.
func (c *CQ[Q]) SetDeadline(q *QP, t int64) {
	q.Deadline = t
	if t != 0 {
		c.WakeBy(t)
	}
}

// WakeBy makes Due true at t.
func (c *CQ[Q]) WakeBy(t int64) {
	if c.next == 0 || t < c.next {
		c.next = t
	}
}

// Timed reports whether a deadline is set.
func (c *CQ[Q]) Timed() bool { return c.next != 0 }

// Due reports whether Expire has to be called.
func (c *CQ[Q]) Due(now int64) bool { return c.next != 0 && now >= c.next }

// Expire calls Expire of the connections with a deadline in the past.
func (c *CQ[Q]) Expire(now int64) {
	c.next = 0
	var none Q
	for _, q := range c.Slots {
		if q == none {
			continue
		}
		b := q.Base()
		switch {
		case b.Deadline == 0:
		case b.Deadline <= now:
			b.Deadline = 0
			q.Expire(now)
		default:
			c.WakeBy(b.Deadline)
		}
	}
}

// SetAlarm makes FD readable at the earliest deadline. It reports whether the
// owner may sleep: nothing was left by other goroutines.
func (c *CQ[Q]) SetAlarm() bool {
	if c.Asked() {
		return false
	}
	if c.next == 0 {
		return true
	}
	wait := unix.NsecToTimespec(max(c.next-c.Now(), 1))
	return unix.TimerfdSettime(c.timerfd, 0, &unix.ItimerSpec{Value: wait}, nil) == nil
}

// Attach gives q a slot and adds o, the queue, to the users of its domain.
func (c *CQ[Q]) Attach(q Q, o Owner) {
	b := q.Base()
	b.Slot = c.freeSlot()
	c.Slots[b.Slot] = q
	c.Count++
	b.Attached = true
	b.Domain.AddUser(o)
}

func (c *CQ[Q]) freeSlot() int {
	var none Q
	for i, q := range c.Slots {
		if q == none {
			return i
		}
	}
	c.Slots = append(c.Slots, none)
	return len(c.Slots) - 1
}

// Detach undoes Attach. It reports whether q was attached.
func (c *CQ[Q]) Detach(q Q, o Owner) bool {
	b := q.Base()
	if !b.Attached {
		return false
	}
	b.Attached = false
	b.Domain.RemoveUser(o)
	var none Q
	c.Slots[b.Slot] = none
	c.Count--
	for n := len(c.Slots); n > 0 && c.Slots[n-1] == none; n-- {
		c.Slots = c.Slots[:n-1]
	}
	return true
}

// Close frees the queue. It returns an error while connections are attached,
// and when it was closed before.
func (c *CQ[Q]) Close() error {
	if c.Count > 0 {
		return fmt.Errorf("close completion queue: %d connections are still up", c.Count)
	}
	return c.Shut(func() error { c.Free(); return nil })
}
