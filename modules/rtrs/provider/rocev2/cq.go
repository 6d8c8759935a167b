package rocev2

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// What an epoll event is about, other than a port's socket.
const (
	wakeToken  = -1
	timerToken = -2
)

const (
	// fetches is how many datagrams one Poll receives, so that the owner gets to
	// its other work.
	fetches = 8 * rxBatch
	// blockedWait is how long a full socket is left alone.
	blockedWait = int64(time.Millisecond)
	// patience is for how many Polls timers that are due let packets go first.
	patience = 32
)

// cq implements verbs.CQ. It holds no completions: those of receives are made
// packet by packet while Poll has room for them, those of sends come from the
// queues of the connections.
type cq struct {
	dev     *Device
	slot    *slot
	epfd    int
	wakefd  int // eventfd: pending or ports has news
	timerfd int
	events  []unix.EpollEvent
	base    time.Time
	stats   *counters

	// turn is held by the owner in Poll, Flush and Arm, and by whoever closes a
	// region (mr.go). It is taken before every other lock.
	turn sync.Mutex

	clock    int64 // of this Poll
	next     int64 // earliest deadline, 0: none
	late     int   // Polls since timers was due
	outs     []*outbox
	stage    stage
	injected []inbound // tests only
	port     int       // in outs, to receive from next
	drained  bool      // no packet is waiting, as far as this Poll saw
	table    []*qp     // attached, by number modulo its size
	attached int       // connections
	onePeer  bool      // all of them are to the same address
	writing  *qp       // whose peer sent a packet of a long WRITE last
	active   []*qp     // those with something to do, in the order of service
	spare    []*qp

	flag atomic.Bool // pending or newPorts is not empty

	mu       sync.Mutex
	pending  []*qp // to be attached, disconnected or destroyed
	newPorts []*outbox
	numbers  []bool // queue pair numbers in use, by table index
	number   uint32 // the last one given
	closed   bool
}

// CreateCQ makes a completion queue. depth is not used.
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) {
	c := &cq{
		dev: d, epfd: -1, wakefd: -1, timerfd: -1, events: make([]unix.EpollEvent, 16), base: time.Now(), stats: &counters{},
		table: make([]*qp, queuesPerCQ), numbers: make([]bool, queuesPerCQ), number: rand.Uint32(),
	}
	c.stage = newStage(c.stats)
	if err := c.open(); err != nil {
		c.closeFDs()
		return nil, fmt.Errorf("create completion queue: %w", err)
	}
	if err := d.takeSlot(c); err != nil {
		c.closeFDs()
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
	if err = c.watch(c.wakefd, wakeToken, unix.EPOLLIN|unix.EPOLLET); err != nil {
		return err
	}
	return c.watch(c.timerfd, timerToken, unix.EPOLLIN|unix.EPOLLET)
}

func (c *cq) watch(fd, token int, what uint32) error {
	ev := unix.EpollEvent{Events: what, Fd: int32(token)}
	return unix.EpollCtl(c.epfd, unix.EPOLL_CTL_ADD, fd, &ev)
}

func (c *cq) closeFDs() {
	for _, fd := range []int{c.timerfd, c.wakefd, c.epfd} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// now is a monotonic time in nanoseconds, never 0.
func (c *cq) now() int64 { return int64(time.Since(c.base)) + 1 }

// FD implements verbs.CQ.
func (c *cq) FD() int { return c.epfd }

// Poll implements verbs.CQ.
func (c *cq) Poll(wcs []verbs.WC) int {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.clock = c.now()
	if c.flag.Load() {
		c.control()
	}
	c.transmit()
	n := c.receive(wcs)
	if c.due() {
		c.timers()
	}
	c.transmit()
	return n + c.serve(wcs[n:])
}

// Flush implements verbs.CQ.
func (c *cq) Flush() {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.flush()
}

func (c *cq) flush() {
	c.clock = c.now()
	if c.flag.Load() {
		c.control()
	}
	c.transmit()
}

// transmit lets every active connection send.
func (c *cq) transmit() {
	for _, o := range c.outs {
		if o.blocked {
			o.flush()
		}
	}
	for _, q := range c.active {
		if q.wants() {
			q.transmit()
		}
	}
	c.flushOuts()
}

func (c *cq) flushOuts() {
	for _, o := range c.outs {
		if o.flush(); o.blocked {
			c.wakeBy(c.clock + blockedWait)
		}
	}
}

// receive takes packets from the sockets while there is room for what they
// complete.
func (c *cq) receive(wcs []verbs.WC) (n int) {
	silent := 0 // ports in a row without a packet
	for budget := fetches; n < len(wcs); {
		if len(c.injected) > 0 {
			p := c.injected[0]
			c.injected = c.injected[1:]
			n += c.packet(&p, &wcs[n])
			continue
		}
		if !c.stage.empty() {
			h := c.dev.faults.Load()
			if h != nil && h.inject != nil {
				c.stage.settle()
			}
			p := c.stage.next()
			if h != nil && h.inject != nil {
				c.injected = append(c.injected, h.inject(p)...)
				continue
			}
			n += c.packet(&p, &wcs[n])
			continue
		}
		if silent == len(c.outs) || budget <= 0 {
			break
		}
		c.port = (c.port + 1) % len(c.outs)
		c.foresee(c.outs[c.port])
		if got := c.stage.fill(c.outs[c.port]); got > 0 {
			silent = 0
			budget -= got
		} else {
			silent++
		}
	}
	c.drained = silent == len(c.outs) && c.stage.empty() && len(c.injected) == 0
	return n
}

// packet judges a packet as far as that is possible without knowing its
// connection, and hands it over. It returns the number of completions.
func (c *cq) packet(p *inbound, wc *verbs.WC) int {
	c.stats.received.Add(1)
	n, why := c.deliver(p, wc)
	if why != dropNone {
		c.stats.dropped[why].Add(1)
	}
	return n
}

func (c *cq) deliver(p *inbound, wc *verbs.WC) (int, drop) {
	b := bth(p.b)
	if len(b) < bthLen+icrcLen || len(b) > maxPacket {
		return 0, dropLength
	}
	if b.version() != 0 || b.opcode() >= opcodesOfRC || shapes[b.opcode()].class == classNone {
		return 0, dropHeader
	}
	shape := &shapes[b.opcode()]
	if len(b) < shape.size+b.pad()+icrcLen {
		return 0, dropLength
	}
	if b.pkey()&pkeyBase != pkeyBase {
		return 0, dropPKey
	}
	q := c.find(b.qpn())
	switch {
	case q == nil:
		c.misdelivered(p)
		return 0, dropQPN
	case q.peer != p.addr || q.out != p.out:
		return 0, dropAddress
	}
	q.fromPeer.setSourcePort(p.sport)
	if !q.fromPeer.check(b, p.place, p.id) {
		return 0, dropICRC
	}
	if q.end.state != endNone {
		return 0, dropState
	}
	q.hear()
	payload := p.place
	if payload == nil {
		payload = b[shape.size : len(b)-icrcLen-b.pad()]
	}
	switch shape.class {
	case classAck:
		return 0, q.onAck(b)
	case classResponse:
		return 0, q.onResponse(b, shape, payload)
	}
	return q.onRequest(b, shape, payload, wc), dropNone
}

// find returns the attached connection with a queue pair number. The one it is
// meant for may still wait to be attached.
func (c *cq) find(qpn uint32) *qp {
	for range 2 {
		if q := c.table[qpn>>slotBits%queuesPerCQ]; q != nil && q.qpn == qpn {
			return q
		}
		if !c.flag.Load() {
			break
		}
		c.control()
	}
	return nil
}

// misdelivered looks at a packet for none of our queue pairs: the kernel may
// have merged it to one that is for us.
func (c *cq) misdelivered(p *inbound) {
	if s := bth(p.b).qpn() & (1<<slotBits - 1); p.id > 0 && s != c.slot.index {
		p.out.port.stopMerging()
	}
}

// serve returns completions of the active connections. When wcs is full the
// ones that were not reached come first the next time.
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
		clear(c.active[keep:])
		c.active = c.active[:keep]
	} else {
		c.spare = append(append(c.spare[:0], c.active[i:]...), c.active[:keep]...)
		c.active, c.spare = c.spare, c.active
	}
	return n
}

// activate puts q on the list of those with something to do. Owner only.
func (c *cq) activate(q *qp) {
	if !q.listed {
		q.listed = true
		c.active = append(c.active, q)
	}
}

// Arm implements verbs.CQ.
func (c *cq) Arm() bool {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.flush()
	if !c.stage.empty() || len(c.injected) > 0 {
		return false
	}
	for _, q := range c.active {
		if q.busy() {
			return false
		}
	}
	if softverbs.EpollNow(c.epfd, c.events) > 0 || c.flag.Load() {
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

// wakeBy makes timers run at t.
func (c *cq) wakeBy(t int64) {
	if c.next == 0 || t < c.next {
		c.next = t
	}
}

// due tells whether timers has to run: when all that has arrived was looked at,
// since it may be what they wait for, or else after some Polls.
func (c *cq) due() bool {
	if c.next == 0 || c.clock < c.next {
		return false
	}
	if c.late++; !c.drained && c.late < patience {
		return false
	}
	c.late = 0
	return true
}

// timers looks after the connections whose time has come.
func (c *cq) timers() {
	c.next = 0
	for left, i := c.attached, 0; left > 0; i++ {
		q := c.table[i]
		if q == nil {
			continue
		}
		left--
		if q.deadline != 0 && q.deadline <= c.clock {
			q.deadline = 0
			q.expire()
		} else if q.deadline != 0 {
			c.wakeBy(q.deadline)
		}
	}
}

// setDeadline sets the time at which q wants to be looked at; 0: none.
func (q *qp) setDeadline(t int64) {
	q.deadline = t
	if t != 0 {
		q.cq.wakeBy(t)
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

// addPort gives c its socket at a port. Device.mu is held.
func (c *cq) addPort(p *port) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.newPorts = append(c.newPorts, newOutbox(p, p.socks[c.slot.index], c.stats))
	c.wake()
}

// wake makes the owner look at what others left for it; c.mu is held.
func (c *cq) wake() {
	c.flag.Store(true)
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	unix.Write(c.wakefd, one[:]) // EAGAIN means that it is readable anyhow
}

// control does what other goroutines asked for.
func (c *cq) control() {
	c.mu.Lock()
	list, outs := c.pending, c.newPorts
	c.pending, c.newPorts = nil, nil
	c.flag.Store(false)
	for _, q := range list {
		q.queued = false
	}
	c.mu.Unlock()
	for _, o := range outs {
		if err := c.watch(o.fd, len(c.outs), unix.EPOLLIN); err != nil {
			c.dev.cfg.Logger.Error("rocev2 completion queue cannot watch a socket", "addr", o.port.addr, "err", err)
		}
		c.outs = append(c.outs, o)
	}
	for _, q := range list {
		if !q.attached && q.is(phaseUp) {
			c.attach(q)
		}
		if q.attached {
			q.asked()
		}
	}
}

// attach takes over a connection that is established, or waits for its peer to
// say so.
func (c *cq) attach(q *qp) {
	for _, o := range c.outs {
		if o.port == q.conn.port {
			q.out = o
		}
	}
	c.table[q.qpn>>slotBits%queuesPerCQ] = q
	c.attached++
	q.attached = true
	c.survey()
	c.activate(q)
	q.pd.Join(c)
	c.dev.cfg.Logger.Info("rocev2 connection up", "local", q.LocalAddr(), "remote", q.RemoteAddr(), "qpn", q.qpn, "path_mtu", q.mtu)
}

// detach lets go of a connection that has ended.
func (c *cq) detach(q *qp) {
	if !q.attached {
		return
	}
	q.attached = false
	c.table[q.qpn>>slotBits%queuesPerCQ] = nil
	c.attached--
	if c.writing == q {
		c.writing = nil
	}
	if c.stage.ahead.qpn == q.qpn {
		c.stage.settle() // payload may be received in regions that nobody waits for any more
	}
	q.pd.Leave(c)
	c.survey()
	c.giveNumber(q)
}

// takeNumber chooses the queue pair number of a new queue pair: the slot in
// the low byte, a count above it, so that numbers rest before they come back.
func (c *cq) takeNumber() (uint32, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, verbs.ErrClosed
	}
	for range 2 * queuesPerCQ {
		c.number = (c.number + 1) & (1<<(24-slotBits) - 1)
		if c.number != 0 && !c.numbers[c.number%queuesPerCQ] {
			c.numbers[c.number%queuesPerCQ] = true
			return c.number<<slotBits | c.slot.index, nil
		}
	}
	return 0, fmt.Errorf("all %d queue pairs of the completion queue are in use", queuesPerCQ)
}

func (c *cq) giveNumber(q *qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !q.numberGiven {
		q.numberGiven = true
		c.numbers[q.qpn>>slotBits%queuesPerCQ] = false
	}
}

// Close implements verbs.CQ.
func (c *cq) Close() error {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.control()
	if c.attached > 0 {
		return fmt.Errorf("close completion queue: %d connections are still up", c.attached)
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return errors.New("close completion queue: closed before")
	}
	c.closed = true
	c.closeFDs()
	c.mu.Unlock()
	c.dev.leaveSlot(c)
	return nil
}
