package rtrs

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

const (
	// pollBatch is the largest number of completions that a Poll takes from a
	// queue. In each turn, a quiet connection waits behind at most so many of a
	// busy one.
	pollBatch = 32
	// fewPolled is that number after a Poll that took fewer; it doubles with each
	// Poll that takes as many or more. What the first completions lead to is sent,
	// and the peer works on it, while the rest is taken.
	fewPolled = 8
	// cqEntries is the size of a shared completion queue; connections that do
	// not fit share another one.
	cqEntries = 1 << 14
)

// Poller is one pump's share of the transport: the completion queues, one or
// more per device, and the connections on them. One goroutine at a time, the
// owner, calls Poll and Arm. All work of a connection is done in these calls.
// Poll, Arm and FD are the methods of a pump's source.
type Poller struct {
	index int
	epfd  int

	// Owner only.
	wcs    [pollBatch]verbs.WC
	at     [pollBatch]*conn
	asleep bool // Arm was called, and Poll was not called since
	polls  uint32
	cpu    uint32 // the owner's CPU when it was last looked up
	alarms alarmSet
	clock  func() int64 // see UseClock; nil: its own
	timed  bool         // time was read in this turn
	time   int64

	// Loaded by the owner at every Poll. Any goroutine replaces them, under mu.
	cqs   atomic.Pointer[[]*pollerCQ]
	conns atomic.Pointer[[]atomic.Pointer[conn]]

	mail mailbox

	mu     sync.Mutex
	closed bool
	gens   []uint32 // by slot of conns: how often it was used
	free   []uint32 // slots of conns
}

// pollerCQ is one completion queue.
type pollerCQ struct {
	verbs.CQ
	dev  verbs.Device
	used int // entries promised to connections, guarded by Poller.mu
	size int // of the next batch; owner only
}

// NewPoller makes a poller; index names it in logs.
func NewPoller(index int) (*Poller, error) {
	p := &Poller{index: index}
	var err error
	if p.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("poller %d: epoll: %w", index, err)
	}
	if err = p.mail.openEvent(p.epfd); err != nil {
		_ = unix.Close(p.epfd)
		return nil, fmt.Errorf("poller %d: mailbox: %w", index, err)
	}
	if err = p.alarms.openTimer(p.epfd); err != nil {
		p.mail.close()
		_ = unix.Close(p.epfd)
		return nil, fmt.Errorf("poller %d: timer: %w", index, err)
	}
	p.cqs.Store(new([]*pollerCQ))
	p.conns.Store(new([]atomic.Pointer[conn]))
	return p, nil
}

// Index returns the number given to NewPoller.
func (p *Poller) Index() int { return p.index }

// Poll handles everything that is ready, without blocking, and returns the
// number of events it handled. Owner only.
func (p *Poller) Poll() int {
	p.timed = false
	n := 0
	if p.polls++; p.asleep || p.polls%cpuEvery == 0 {
		p.cpu = currentCPU()
	}
	if p.asleep || p.polls%alarmEvery == 0 {
		n = p.alarms.run(time.Now())
	}
	if p.asleep {
		p.asleep = false
		p.mail.disarmWakeup()
	}
	n += p.mail.run()
	for _, q := range *p.cqs.Load() {
		n += p.pollCQ(q)
	}
	return n
}

// Even if it never sleeps, the owner looks up its CPU every cpuEvery polls, and
// its alarms every alarmEvery.
const (
	cpuEvery   = 1024
	alarmEvery = 64
)

// processStart is the zero of Now.
var processStart = time.Now()

// Now is a clock for durations, in nanoseconds. It stands still from its first
// use to the next Poll or Arm, so that one look at the system's clock serves
// all requests of a turn. Owner only.
func (p *Poller) Now() int64 {
	if p.clock != nil {
		return p.clock()
	}
	if !p.timed {
		p.timed, p.time = true, int64(time.Since(processStart))
	}
	return p.time
}

// UseClock makes Now use the given clock, such as that of a pump. Call it
// before the first Poll.
func (p *Poller) UseClock(now func() int64) { p.clock = now }

// pollCQ handles one batch. Receives of a connection with prepost are posted again
// before its first completion is processed, those of other connections after the
// batch.
func (p *Poller) pollCQ(q *pollerCQ) int {
	n := q.pollCQ(&p.wcs)
	if n == 0 {
		return 0
	}
	conns := *p.conns.Load()
	for i := range n {
		p.at[i] = lookupConn(conns, p.wcs[i].QP)
		if c := p.at[i]; c != nil && c.prepost {
			c.noteRecv(&p.wcs[i])
		}
	}
	for i := range n {
		if c := p.at[i]; c != nil {
			if c.prepost {
				c.flushRecv()
			}
			c.found++
			c.onCompletion(&p.wcs[i])
		}
	}
	for i := range n {
		if c := p.at[i]; c != nil {
			c.flushRecv()
			c.countLook()
			p.at[i] = nil
		}
	}
	return n
}

// pollCQ takes completions from the queue and returns their number.
func (q *pollerCQ) pollCQ(wcs *[pollBatch]verbs.WC) int {
	n := q.Poll(wcs[:q.size])
	if n < fewPolled {
		q.size = fewPolled
	} else {
		q.size = min(2*q.size, pollBatch)
	}
	return n
}

// lookupConn finds a connection by the context of its queue pair: its slot in the
// lower half, the generation of the slot in the upper.
func lookupConn(conns []atomic.Pointer[conn], ctx uint64) *conn {
	slot := uint32(ctx)
	if int(slot) >= len(conns) {
		return nil
	}
	if c := conns[slot].Load(); c != nil && c.ctx == ctx {
		return c
	}
	return nil
}

// Arm makes FD readable at the next event. It returns false when there is
// something to do already: call Poll instead of sleeping. Owner only.
func (p *Poller) Arm() bool {
	p.asleep, p.timed = true, false
	if !p.alarms.armTimer() || !p.mail.armWakeup() {
		return false
	}
	for _, q := range *p.cqs.Load() {
		if !q.Arm() {
			return false
		}
	}
	return true
}

// FD returns the descriptor to sleep on. After Arm it is readable when Poll may
// have something to do.
func (p *Poller) FD() int { return p.epfd }

// Do has the owner run f soon, in the order of the calls. f must not block. Do is
// for the control path. Any goroutine may call it. If the owner has stopped, f is
// never run.
func (p *Poller) Do(f func()) { p.mail.putFunc(f) }

// Call is Do, and waits until f has run or ctx is done. The owner must not call it.
func (p *Poller) Call(ctx context.Context, f func()) error {
	done := make(chan struct{})
	p.Do(func() { f(); close(done) })
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("poller %d: %w", p.index, context.Cause(ctx))
	}
}

// spinTime is how long Run looks for work before it sleeps.
const spinTime = 50 * time.Microsecond

// Run is a simple owner for users without a pump. Until ctx is done it polls, and
// sleeps after it has found nothing for spinTime.
func (p *Poller) Run(ctx context.Context) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer context.AfterFunc(ctx, func() { p.Do(func() {}) })()
	idleSince := time.Now()
	for ctx.Err() == nil {
		switch {
		case p.Poll() > 0:
			idleSince = time.Now()
		case time.Since(idleSince) < spinTime:
			runtime.Gosched()
		case p.Arm():
			p.sleepOnce()
			idleSince = time.Now()
		}
	}
}

func (p *Poller) sleepOnce() {
	var events [1]unix.EpollEvent
	_, _ = unix.EpollWait(p.epfd, events[:], -1) // EINTR means nothing
}

// Close frees the poller after its owner has stopped and its sessions are
// closed.
func (p *Poller) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	var err error
	for _, q := range *p.cqs.Load() {
		if e := q.Close(); e != nil && err == nil {
			err = fmt.Errorf("poller %d: close completion queue of %s: %w", p.index, q.dev.Info().Name, e)
		}
	}
	p.cqs.Store(new([]*pollerCQ))
	p.mail.close()
	p.alarms.close()
	_ = unix.Close(p.epfd)
	return err
}

// reserveCQ returns a completion queue of dev and reserves entries in it.
func (p *Poller) reserveCQ(dev verbs.Device, entries int) (*pollerCQ, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	for _, q := range *p.cqs.Load() {
		if q.dev == dev && q.used+entries <= cqEntries {
			q.used += entries
			return q, nil
		}
	}
	return p.addCQ(dev, entries)
}

func (p *Poller) addCQ(dev verbs.Device, entries int) (*pollerCQ, error) {
	cq, err := dev.CreateCQ(max(cqEntries, entries))
	if err != nil {
		return nil, fmt.Errorf("completion queue on %s: %w", dev.Info().Name, err)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(cq.FD())}
	if err := unix.EpollCtl(p.epfd, unix.EPOLL_CTL_ADD, cq.FD(), &ev); err != nil {
		_ = cq.Close()
		return nil, fmt.Errorf("watch completion queue on %s: %w", dev.Info().Name, err)
	}
	q := &pollerCQ{CQ: cq, dev: dev, used: entries, size: fewPolled}
	cqs := append(slices.Clone(*p.cqs.Load()), q)
	p.cqs.Store(&cqs)
	p.Do(func() {}) // the owner may sleep on the old set
	return q, nil
}

func (p *Poller) releaseCQ(q *pollerCQ, entries int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q.used -= entries; p.isSpare(q) {
		p.Do(func() { p.closeSpare(q) })
	}
}

// isSpare reports whether q is unused and its device has another queue. mu is
// held.
func (p *Poller) isSpare(q *pollerCQ) bool {
	return q.used == 0 && slices.ContainsFunc(*p.cqs.Load(), func(o *pollerCQ) bool { return o != q && o.dev == q.dev })
}

// closeSpare closes q if it is still spare. A queue costs a look in every Poll, and
// devices have a limited number of them. Owner only.
func (p *Poller) closeSpare(q *pollerCQ) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || !p.isSpare(q) || q.Close() != nil {
		return // the queue is used again, or closed with p
	}
	cqs := slices.DeleteFunc(slices.Clone(*p.cqs.Load()), func(o *pollerCQ) bool { return o == q })
	p.cqs.Store(&cqs)
}

// Release closes the completion queues of a device that no connection uses. The
// device's addresses are free for another process after its Close then. Any
// goroutine but the owner.
func (p *Poller) Release(ctx context.Context, dev verbs.Device) error {
	return p.Call(ctx, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		unused := func(q *pollerCQ) bool { return q.dev == dev && q.used == 0 && q.Close() == nil }
		cqs := slices.DeleteFunc(slices.Clone(*p.cqs.Load()), unused)
		p.cqs.Store(&cqs)
	})
}

// addConn gives c a slot and a context.
func (p *Poller) addConn(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) == 0 {
		p.growConns()
	}
	slot := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	p.gens[slot]++
	c.ctx = uint64(p.gens[slot])<<32 | uint64(slot)
	(*p.conns.Load())[slot].Store(c)
}

func (p *Poller) growConns() {
	old := *p.conns.Load()
	table := make([]atomic.Pointer[conn], max(16, 2*len(old)))
	for i := range old {
		table[i].Store(old[i].Load())
	}
	for slot := len(table) - 1; slot >= len(old); slot-- {
		p.free = append(p.free, uint32(slot))
	}
	p.gens = append(p.gens, make([]uint32, len(table)-len(old))...)
	p.conns.Store(&table)
}

// removeConn gives back the slot of c. Completions that still name c are dropped.
func (p *Poller) removeConn(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	slot := uint32(c.ctx)
	(*p.conns.Load())[slot].Store(nil)
	p.free = append(p.free, slot)
}
