package rocev2

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. A turn of the owner:
//
//	Poll        requests of other goroutines
//	transmit    requester.go, responder.go, outbox.go: packets that can be sent
//	receive     prediction.go, inbox.go: packets from the sockets
//	deliver     find the connection of a packet, and whether it is genuine
//	due         deadlines
//	serve       completions of the connections with something to do
//	Arm         the last look before the owner sleeps

const (
	// fetches bounds the datagrams that one Poll receives, so that the owner
	// gets to its other work.
	fetches = 8 * rxBatch
	// blockedWait is the pause before a full socket is tried again.
	blockedWait = int64(time.Millisecond)
	// patience is for how many Polls a deadline that has passed waits for packets
	// to be taken first.
	patience = 32
	// maxEvents is the number of epoll events that are taken at a time.
	maxEvents = 16
)

// compQueue implements verbs.CQ. Completions of receives are made packet by packet while
// Poll has room for them; those of sends come from the queues of the connections.
type compQueue struct {
	softverbs.CQ[*qp]
	dev   *Device
	slot  *cqSlot
	stats *queueCounters

	clock    int64 // of this Poll
	late     int   // Polls since a deadline has passed
	outs     []*sendBatch
	stage    receiveStage
	injected []receivedPacket // tests only
	port     int              // in outs, to receive from next
	drained  bool             // this Poll has taken all packets
	table    []*qp            // attached connections, by number modulo its size
	onePeer  bool             // all connections are to the same address
	writing  *qp              // the connection with the last packet of a long WRITE; nil: none
	numbers  qpNumbers
}

// CreateCQ makes a completion queue. depth is not used.
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) {
	c := &compQueue{dev: d, stats: &queueCounters{}, table: make([]*qp, queuesPerCQ)}
	c.stage = newStage(c.stats)
	c.numbers.init()
	c.Init()
	if err := c.Open(maxEvents); err != nil {
		c.Free()
		return nil, fmt.Errorf("create completion queue: %w", err)
	}
	if err := d.takeSlot(c); err != nil {
		c.Free()
		return nil, fmt.Errorf("create completion queue: %w", err)
	}
	return c, nil
}

// Poll implements verbs.CQ.
func (c *compQueue) Poll(wcs []verbs.WC) int {
	c.Turn.Lock()
	defer c.Turn.Unlock()
	c.clock = c.Now()
	if c.Asked() {
		c.runControl()
	}
	c.transmitActive()
	n := c.receivePackets(wcs)
	if c.wakeupDue() {
		c.Expire(c.clock)
	}
	c.transmitActive()
	return n + c.serveActive(wcs[n:])
}

// Flush implements verbs.CQ.
func (c *compQueue) Flush() {
	c.Turn.Lock()
	defer c.Turn.Unlock()
	c.flushDead()
}

func (c *compQueue) flushDead() {
	c.clock = c.Now()
	if c.Asked() {
		c.runControl()
	}
	c.transmitActive()
}

// transmitActive sends the packets of the connections with something to send.
func (c *compQueue) transmitActive() {
	for _, o := range c.outs {
		if o.blocked {
			o.flushPackets()
		}
	}
	for _, q := range c.All() {
		if q.hasWork() {
			q.transmit()
		}
	}
	c.flushOuts()
}

func (c *compQueue) flushOuts() {
	for _, o := range c.outs {
		if o.flushPackets(); o.blocked {
			c.WakeBy(c.clock + blockedWait)
		}
	}
}

// receivePackets takes packets from the sockets while there is room for completions,
// and returns the number of these.
func (c *compQueue) receivePackets(wcs []verbs.WC) (n int) {
	silent := 0 // ports in a row without a packet
	for budget := fetches; n < len(wcs); {
		if len(c.injected) > 0 {
			p := c.injected[0]
			c.injected = c.injected[1:]
			n += c.deliverCounted(&p, &wcs[n])
			continue
		}
		if !c.stage.empty() {
			h := c.dev.faults.Load()
			if h != nil && h.inject != nil {
				c.stage.placeRest()
			}
			p := c.stage.nextPacket()
			if h != nil && h.inject != nil {
				c.injected = append(c.injected, h.inject(p)...)
				continue
			}
			n += c.deliverCounted(&p, &wcs[n])
			continue
		}
		if silent == len(c.outs) || budget <= 0 {
			break
		}
		c.port = (c.port + 1) % len(c.outs)
		c.predictNext(c.outs[c.port])
		if got := c.stage.fillFrom(c.outs[c.port]); got > 0 {
			silent = 0
			budget -= got
		} else {
			silent++
		}
	}
	c.drained = silent == len(c.outs) && c.stage.empty() && len(c.injected) == 0
	return n
}

// deliverCounted delivers a packet and counts why it was dropped. It returns the number
// of completions.
func (c *compQueue) deliverCounted(p *receivedPacket, wc *verbs.WC) int {
	c.stats.received.Add(1)
	n, why := c.deliverPacket(p, wc)
	if why != dropNone {
		c.stats.dropped[why].Add(1)
	}
	return n
}

// deliverPacket checks a packet and gives it to its connection. It returns the number
// of completions, and the reason if the packet was dropped.
func (c *compQueue) deliverPacket(p *receivedPacket, wc *verbs.WC) (int, dropReason) {
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
	q := c.findQP(b.qpn())
	switch {
	case q == nil:
		c.onUnknownQueue(p)
		return 0, dropQPN
	case !verbs.SamePartition(b.pkey(), q.pkey):
		return 0, dropPKey
	case q.peer != p.addr || q.out != p.out:
		return 0, dropAddress
	}
	q.fromPeer.setSourcePort(p.sport)
	if !q.fromPeer.checkPacket(b, p.place, p.id) {
		return 0, dropICRC
	}
	if q.End.State != softverbs.EndNone {
		return 0, dropState
	}
	q.notePeerAlive()
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

// findQP returns the attached connection with a queue pair number, or nil. It
// attaches connections that wait for that first.
func (c *compQueue) findQP(qpn uint32) *qp {
	for range 2 {
		if q := c.table[qpn>>slotBits%queuesPerCQ]; q != nil && q.qpn == qpn {
			return q
		}
		if !c.Asked() {
			break
		}
		c.runControl()
	}
	return nil
}

// onUnknownQueue handles a packet for an unknown queue pair: the kernel may have
// merged it with a packet for this queue.
func (c *compQueue) onUnknownQueue(p *receivedPacket) {
	if s := bth(p.b).qpn() & (1<<slotBits - 1); p.id > 0 && s != c.slot.index {
		p.out.port.stopMerging()
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

// activate adds q to the connections with something to do.
func (c *compQueue) activate(q *qp) { c.Add(q, &q.Listed) }

// Arm implements verbs.CQ.
func (c *compQueue) Arm() bool {
	c.Turn.Lock()
	defer c.Turn.Unlock()
	c.flushDead()
	if !c.stage.empty() || len(c.injected) > 0 {
		return false
	}
	for _, q := range c.All() {
		if q.busy() {
			return false
		}
	}
	return len(c.Events()) == 0 && c.SetAlarm()
}

// wakeupDue reports whether connections have to be told that their deadline has
// passed: once all packets that have arrived were taken, since the one that they
// wait for may be among them, or else after some Polls.
func (c *compQueue) wakeupDue() bool {
	if !c.Due(c.clock) {
		return false
	}
	if c.late++; !c.drained && c.late < patience {
		return false
	}
	c.late = 0
	return true
}

// setDeadline sets the time of the next call of Expire; 0: never.
func (q *qp) setDeadline(t int64) { q.cq.SetDeadline(&q.QP, t) }

// addPort gives c the socket of its slot at a port. Device.mu is held.
func (c *compQueue) addPort(p *udpPort) {
	o := newOutbox(p, p.socks[c.slot.index], c.stats)
	c.Call(func() {
		if err := c.Watch(o.fd, len(c.outs), unix.EPOLLIN); err != nil {
			c.dev.cfg.Logger.Error("rocev2 completion queue cannot watch a socket", "address", o.port.addr, "err", err)
		}
		c.outs = append(c.outs, o)
	})
}

// runControl handles the requests of other goroutines.
func (c *compQueue) runControl() {
	for _, q := range c.Take() {
		if !q.Attached && q.Is(softverbs.Up) {
			c.attachConn(q)
		}
		if q.Attached {
			q.runControl()
		}
	}
}

// attachConn begins to serve a connection that is established, or that waits for the
// first packet of its peer.
func (c *compQueue) attachConn(q *qp) {
	for _, o := range c.outs {
		if o.port == q.conn.port {
			q.out = o
		}
	}
	c.table[q.qpn>>slotBits%queuesPerCQ] = q
	c.Attach(q, c)
	c.updateOnePeer()
	c.activate(q)
	c.dev.cfg.Logger.Info("rocev2 connection up", "local", q.LocalAddr(), "remote", q.RemoteAddr(), "qpn", q.qpn, "path_mtu", q.mtu)
}

// detachConn removes a connection that has ended.
func (c *compQueue) detachConn(q *qp) {
	if !q.Attached {
		return
	}
	c.table[q.qpn>>slotBits%queuesPerCQ] = nil
	if c.writing == q {
		c.writing = nil
	}
	if c.stage.ahead.qpn == q.qpn {
		c.stage.placeRest() // Region.Close does not wait for this queue from here on
	}
	c.Detach(q, c)
	c.updateOnePeer()
	c.giveNumber(q)
}

// qpNumbers are the queue pair numbers of a completion queue. The low byte is the
// slot; above it is a count, so that a number is not used again soon.
type qpNumbers struct {
	mu   sync.Mutex
	used []bool // by table index
	last uint32
}

func (n *qpNumbers) init() { n.used, n.last = make([]bool, queuesPerCQ), rand.Uint32() }

// takeNumber returns the number of a new queue pair.
func (c *compQueue) takeNumber() (uint32, error) {
	if c.Closed() {
		return 0, verbs.ErrClosed
	}
	n := &c.numbers
	n.mu.Lock()
	defer n.mu.Unlock()
	for range 2 * queuesPerCQ {
		n.last = (n.last + 1) & (1<<(24-slotBits) - 1)
		if n.last != 0 && !n.used[n.last%queuesPerCQ] {
			n.used[n.last%queuesPerCQ] = true
			return n.last<<slotBits | c.slot.index, nil
		}
	}
	return 0, fmt.Errorf("all %d queue pairs of the completion queue are in use: destroy some or use another one", queuesPerCQ)
}

// giveNumber frees the number of q, once.
func (c *compQueue) giveNumber(q *qp) {
	if !q.numberGiven.Swap(true) {
		c.numbers.mu.Lock()
		defer c.numbers.mu.Unlock()
		c.numbers.used[q.qpn>>slotBits%queuesPerCQ] = false
	}
}

// Close implements verbs.CQ.
func (c *compQueue) Close() error {
	c.Turn.Lock()
	defer c.Turn.Unlock()
	c.runControl()
	if err := c.CQ.Close(); err != nil {
		return err
	}
	c.dev.giveSlot(c)
	return nil
}
