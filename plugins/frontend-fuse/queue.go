package main

import (
	"fmt"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/tally"
)

const (
	popBatch   = 128
	eventBatch = 64
	iovRoom    = 1024
	maxIndex   = 1 << 16 // bounds the table by device index
)

// ring is this side of a queue's ring: plugin.FrontQueue, or shm.Submitter in tests.
type ring interface {
	Fits(sent int) bool
	Push(*shm.SQE) bool
	Publish()
	Pop([]shm.CQE) int
	Arm() bool
	Disarm()
	FD() int
}

// queue is one pump's work: a ring of the daemon, and the devices that belong to the
// pump. It implements pump.Source. All methods run on the pump's thread.
type queue struct {
	pump  int
	ring  ring
	epoll int // descriptors of the devices (edge triggered) and of the ring
	log   *slog.Logger
	do    func(func()) // runs a function on the queue's thread; any thread

	devices []*device // served here
	table   []*device // by index
	backlog []*device // with ops that wait for room in the ring
	events  int       // handled in this round
	again   bool      // a slot or request became free: look at all devices once more
	large   bool

	entry   shm.SQE
	answers [popBatch]shm.CQE
	ready   [eventBatch]unix.EpollEvent
	iov     [iovRoom]unix.Iovec
	header  [outHeaderSize]byte
	body    [attrOutSize]byte

	stats struct{ requests, errors, placedBytes, malformed, stray tally.Count }

	// Both set, or both nil: a clock in nanoseconds, and the function that records the
	// duration of each request. See plugin.FrontQueue.Served.
	now    func() int64
	served func(device uint32, op blk.Op, ns int64)
}

func newQueue(r ring, log *slog.Logger) (*queue, error) {
	q := &queue{ring: r, log: log}
	var err error
	if q.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	if err := q.watch(r.FD(), ringEvent); err != nil {
		unix.Close(q.epoll)
		return nil, err
	}
	return q, nil
}

// ringEvent is the ring among the events of epoll; devices have indices from 0.
const ringEvent = -1

func (q *queue) watch(fd int, index int32) error {
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: index}
	if err := unix.EpollCtl(q.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("watch descriptor: %w", err)
	}
	return nil
}

// close leaves the remaining devices after the pump has stopped.
func (q *queue) close() {
	for _, d := range slices.Clone(q.devices) {
		q.leave(d)
	}
	unix.Close(q.epoll)
}

// add begins to serve a device.
func (q *queue) add(d *device, takenOver bool) error {
	if err := q.watch(d.fd, int32(d.index)); err != nil {
		return err
	}
	for len(q.table) <= int(d.index) {
		q.table = append(q.table, nil)
	}
	q.table[d.index] = d
	q.devices = append(q.devices, d)
	q.backlog = slices.Grow(q.backlog, len(q.devices)) // each at most once: enqueue allocates nothing
	if takenOver {
		d.resend()
	}
	return nil
}

// leave ends the service of a device without slots in use. The daemon's descriptor keeps
// the mount.
func (q *queue) leave(d *device) {
	unix.Close(d.fd)
	q.devices = slices.DeleteFunc(q.devices, func(other *device) bool { return other == d })
	q.table[d.index] = nil
	close(d.ended)
}

// Poll does one round: completions, requests of the kernel, one publish. It returns the
// number of events that it handled.
func (q *queue) Poll() int {
	q.events, q.again, q.large = 0, false, false
	q.popAnswers()
	q.retryBacklog()
	q.lookForRequests()
	for i := 0; i < len(q.devices); i++ {
		d := q.devices[i]
		if d.readable && !d.removing {
			q.receive(d)
		}
		if d.removing && d.isIdle() {
			q.leave(d)
			q.events++
			i--
		}
	}
	q.ring.Publish()
	if q.again {
		q.events++
	}
	return q.events
}

// lookForRequests marks the devices that have requests.
func (q *queue) lookForRequests() {
	n, err := unix.EpollWait(q.epoll, q.ready[:], 0)
	if err != nil {
		return
	}
	for _, ev := range q.ready[:n] {
		if ev.Fd != ringEvent && int(ev.Fd) < len(q.table) && q.table[ev.Fd] != nil {
			q.table[ev.Fd].readable = true
		}
	}
}

// retryBacklog pushes ops that wait for room in the ring. The devices take turns: each
// has the first try in one of the rounds.
func (q *queue) retryBacklog() {
	waiting := q.backlog[:0]
	for _, d := range q.backlog {
		for !d.backlog.empty() && q.push(d.backlog.head) {
			d.backlog.pop()
			q.events++
		}
		if !d.backlog.empty() {
			waiting = append(waiting, d)
		}
	}
	if n := len(waiting); n > 1 {
		first := waiting[0]
		copy(waiting, waiting[1:])
		waiting[n-1] = first
	}
	q.backlog = waiting
}

// Arm asks for FD to become readable at the next event.
func (q *queue) Arm() bool {
	for _, d := range q.devices {
		if d.readable && !d.removing && d.freeOps >= d.opsPerRequest && d.freeRequests != nil {
			return false
		}
	}
	return q.ring.Arm()
}

func (q *queue) Disarm()       { q.ring.Disarm() }
func (q *queue) FD() int       { return q.epoll }
func (q *queue) LargeIO() bool { return q.large }

// tagOf names a slot of a device in the ring.
func tagOf(device, slot uint32) uint64 { return uint64(device)<<32 | uint64(slot) }

// findOp is the inverse of tagOf. It returns nil for a tag of no slot in use.
func (q *queue) findOp(tag uint64) *op {
	device, slot := tag>>32, uint32(tag)
	if device >= uint64(len(q.table)) || q.table[device] == nil || slot >= uint32(len(q.table[device].ops)) {
		return nil
	}
	return &q.table[device].ops[slot]
}

// opList is a queue of ops linked by next.
type opList struct {
	head, tail *op
}

func (l *opList) empty() bool { return l.head == nil }

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
	l.head = o.next
	if l.head == nil {
		l.tail = nil
	}
	o.next = nil
	return o
}
