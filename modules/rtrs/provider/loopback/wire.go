package loopback

import (
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The functions stand in the order in which a message meets them: transmit at
// the sender, receive at the receiver, acknowledge at the sender.

type msgKind uint8

const (
	msgRequest  msgKind = iota // a request of the sender's send queue
	msgReadData                // answer to an OpRead
	msgBye                     // the sender has ended the connection
)

// message is the unit on the wire. data belongs to it.
type message struct {
	kind     msgKind
	op       verbs.Opcode
	status   verbs.Status // msgBye: why, for request num
	released bool         // let through by Step
	lost     bool         // to be sent again
	imm      uint32
	key      uint32
	addr     uint64
	num      uint64 // number of the request, also in its answer
	seq      uint64 // order of sending in the network
	size     int    // of data, or requested by an OpRead
	data     []byte
	due      time.Time // not before, if not zero
}

// pipe is one direction of a connection.
type pipe struct {
	link  *link
	shut  bool // nothing arrives, see StallConn
	msgs  []message
	head  int
	acked uint64 // requests below were executed by the receiver
	// Bytes of all messages that were sent and that were received.
	sent, received int
}

// streamRoom is how many bytes a stream takes before the peer reads, as the buffers
// of two sockets do.
const streamRoom = 4 << 20

func (p *pipe) len() int        { return len(p.msgs) - p.head }
func (p *pipe) first() *message { return &p.msgs[p.head] }
func (p *pipe) last() *message  { return &p.msgs[len(p.msgs)-1] }

// passes reports whether m may arrive now. m is in p.
func (p *pipe) passes(m *message) bool { return !p.shut && p.link.passes(m) }

func (p *pipe) push(m message) {
	if p.head > 0 && len(p.msgs) == cap(p.msgs) {
		p.msgs = p.msgs[:copy(p.msgs, p.msgs[p.head:])]
		p.head = 0
	}
	p.msgs = append(p.msgs, m)
	p.sent += len(m.data)
}

func (p *pipe) pop() {
	p.received += len(p.first().data)
	*p.first() = message{}
	if p.head++; p.head == len(p.msgs) {
		p.msgs, p.head = p.msgs[:0], 0
	}
}

// conn is a connection. It lives until both ends are dead.
type conn struct {
	net    *Network
	fabric Fabric
	ends   [2]*queuePair // active, passive
	pipes  [2]pipe       // pipes[i] carries the messages of ends[i]
}

// join connects the queue pairs of a request and its answer.
func (n *Network) join(active, passive *queuePair) {
	c := &conn{net: n, ends: [2]*queuePair{active, passive}}
	a, p := passive.remote, passive.local
	c.pipes[0].link = n.link(a.Addr(), p.Addr())
	c.pipes[1].link = n.link(p.Addr(), a.Addr())
	c.fabric = c.pipes[0].link.fabric
	active.conn, active.side = c, 0
	passive.conn, passive.side = c, 1
	n.conns = append(n.conns, c)
}

// send puts m on the link of side and wakes the other end.
func (c *conn) send(side int, m message) {
	n, p, peer := c.net, &c.pipes[side], c.ends[1-side]
	if peer.state == stateDead {
		n.putBuf(m.data)
		return
	}
	m.seq = n.nextSeq
	n.nextSeq++
	if d := p.link.delay; d > 0 {
		m.due = time.Now().Add(d)
		time.AfterFunc(d, func() { n.kickLater(peer.cq) })
	}
	if c.fabric == Datagrams && m.kind == msgRequest {
		m.lost = p.shut || p.link.stalled || p.len() > 0 && p.last().lost
	}
	p.push(m)
	peer.cq.kick()
}

func (c *conn) sendBye(side int) { c.send(side, message{kind: msgBye}) }

// reap frees messages that will not be received any more.
func (c *conn) reap() {
	for side := range c.ends {
		if p := &c.pipes[side]; c.ends[1-side].state == stateDead {
			for p.len() > 0 {
				c.net.putBuf(p.first().data)
				p.pop()
			}
		}
	}
	if c.ends[0].state == stateDead && c.ends[1].state == stateDead {
		if i := slices.Index(c.net.conns, c); i >= 0 {
			c.net.conns = slices.Delete(c.net.conns, i, i+1)
		}
	}
}

// transmit puts posted requests on the link.
func (q *queuePair) transmit() {
	n := q.cq.net
	for q.state == stateUp && q.sendSent < q.sendPosted {
		num := q.sendSent
		if num > q.sendDone && q.sends[(num-1)%uint64(len(q.sends))].status != verbs.StatusOK {
			return // that one ends the connection
		}
		e := &q.sends[num%uint64(len(q.sends))]
		if !q.holdsAll(e) {
			e.status = verbs.StatusLocalProt
			q.sendSent++
			q.cq.ready.Store(true)
			return
		}
		m := q.encode(e, num)
		if n.tap.Load() != nil {
			n.emitUnlocked(e.event(q, m.data))
			if q.state != stateUp { // the tap cut it
				n.putBuf(m.data)
				return
			}
		}
		q.sendSent++
		if isLocal(e.wr.Op) {
			q.runLocal(e)
		} else {
			q.conn.send(q.side, m)
			e.end = q.conn.pipes[q.side].sent
			if q.conn.fabric == Stream {
				q.cq.ready.Store(true) // it may be complete
			}
		}
	}
	q.watchProgress()
}

// watchProgress ends q if none of its requests completes for the network's ackTimeout.
func (q *queuePair) watchProgress() {
	n := q.cq.net
	if n.ackTimeout == 0 || q.watched || q.state != stateUp {
		return
	}
	before, waits := q.progress()
	if !waits {
		return
	}
	q.watched = true
	time.AfterFunc(n.ackTimeout, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		q.watched = false
		if q.state == stateUp {
			if now, waits := q.progress(); waits && now == before {
				q.kill(verbs.StatusFatal)
				return
			}
		}
		q.watchProgress()
	})
}

// progress returns a number that changes when the peer has something more of what
// q has sent, and reports whether q waits for that.
func (q *queuePair) progress() (at uint64, waits bool) {
	if q.conn.fabric != Stream {
		return q.sendDone, q.sendDone < q.sendSent
	}
	p := &q.conn.pipes[q.side]
	if p.len() == 0 || p.passes(p.first()) {
		return 0, false
	}
	return p.first().seq, true
}

// holdsAll reports whether the elements of e are still registered.
func (q *queuePair) holdsAll(e *sendEntry) bool {
	for i := range e.sges {
		if !q.pd.holds(e.sges[i].LKey, e.sges[i].Buf) {
			return false
		}
	}
	return true
}

// encode copies the payload of e into a message.
func (q *queuePair) encode(e *sendEntry, num uint64) message {
	m := message{op: e.wr.Op, imm: e.wr.Imm, key: e.wr.RKey, addr: e.wr.RemoteAddr, num: num, size: e.size}
	if e.wr.Op != verbs.OpRead && !isLocal(e.wr.Op) {
		m.data = q.cq.net.getBuf(e.size)
		at := 0
		for i := range e.sges {
			at += copy(m.data[at:], e.sges[i].Buf)
		}
	}
	return m
}

func isLocal(op verbs.Opcode) bool { return op == verbs.OpLocalInv || op == verbs.OpRegMR }

func (q *queuePair) runLocal(e *sendEntry) {
	ok := false
	if e.wr.Op == verbs.OpLocalInv {
		ok = q.pd.invalidate(e.wr.RKey)
	} else {
		ok = q.pd.register(e.wr.RKey)
	}
	if !ok {
		e.status = verbs.StatusLocalProt
	}
	q.cq.ready.Store(true)
}

// receive takes the peer's messages, then reports the requests that the peer
// has executed.
func (q *queuePair) receive() {
	for q.state == stateUp && q.receiveOne() {
	}
	if q.state != stateUp {
		return
	}
	if in := &q.conn.pipes[1-q.side]; !in.shut && !in.link.stalled || q.conn.fabric == Stream {
		q.acknowledge()
	}
}

// receiveOne takes one message and reports whether there may be more.
func (q *queuePair) receiveOne() bool {
	p := &q.conn.pipes[1-q.side]
	if p.len() == 0 || !p.passes(p.first()) {
		return false
	}
	m := p.first()
	if m.lost && !q.resend(m) {
		q.cq.net.putBuf(m.data)
		p.pop()
		return true
	}
	if m.kind == msgRequest && consumesRecv(m.op) && q.recvDone == q.recvPosted {
		if p.last().kind != msgBye || !p.passes(p.last()) {
			return false // wait for a receive
		}
		m = p.last() // the peer has gone and will not send it again
	}
	switch m.kind {
	case msgBye:
		q.onBye(*m)
		return false
	case msgReadData:
		q.onReadData(m)
	default:
		if status := q.execute(m); status != verbs.StatusOK {
			q.refuse(m.num, status)
			return false
		}
		p.acked = m.num + 1
		q.conn.ends[1-q.side].cq.kick()
	}
	q.cq.net.putBuf(m.data)
	p.pop()
	return true
}

// resend has the peer send m, which was lost, again. False: it does not.
func (q *queuePair) resend(m *message) bool {
	peer := q.conn.ends[1-q.side]
	if peer.state != stateUp {
		return false
	}
	e := &peer.sends[m.num%uint64(len(peer.sends))]
	if !peer.holdsAll(e) { // its owner has taken the memory back
		peer.kill(verbs.StatusFatal)
		return false
	}
	if m.op != verbs.OpRead {
		m.data = m.data[:0]
		for i := range e.sges {
			m.data = append(m.data, e.sges[i].Buf...)
		}
	}
	m.lost = false
	return true
}

func consumesRecv(op verbs.Opcode) bool { return op != verbs.OpWrite && op != verbs.OpRead }

// execute executes a request of the peer. The result is the peer's status.
func (q *queuePair) execute(m *message) verbs.Status {
	switch m.op {
	case verbs.OpWrite:
		return q.place(m)
	case verbs.OpWriteImm:
		if status := q.place(m); status != verbs.StatusOK {
			return status
		}
		q.completeRecv(verbs.WC{Op: verbs.OpRecvImm, HasImm: true, Imm: m.imm, ByteLen: uint32(m.size)})
		return verbs.StatusOK
	case verbs.OpRead:
		return q.answerRead(m)
	}
	return q.placeSend(m)
}

// place writes the payload of a RDMA WRITE.
func (q *queuePair) place(m *message) verbs.Status {
	if m.size == 0 {
		return verbs.StatusOK
	}
	to := q.pd.reach(m.key, m.addr, m.size, verbs.AccessRemoteWrite)
	if to == nil {
		return verbs.StatusRemoteAccess
	}
	copy(to, m.data)
	return verbs.StatusOK
}

func (q *queuePair) answerRead(m *message) verbs.Status {
	answer := message{kind: msgReadData, num: m.num, size: m.size}
	if m.size > 0 {
		from := q.pd.reach(m.key, m.addr, m.size, verbs.AccessRemoteRead)
		if from == nil {
			return verbs.StatusRemoteAccess
		}
		answer.data = q.cq.net.getBuf(m.size)
		copy(answer.data, from)
	}
	q.conn.send(q.side, answer)
	return verbs.StatusOK
}

// placeSend places a message of the SEND family into the next receive.
func (q *queuePair) placeSend(m *message) verbs.Status {
	recv := &q.recvs[q.recvDone%uint64(len(q.recvs))]
	wc := verbs.WC{Op: verbs.OpRecv, ByteLen: uint32(m.size)}
	switch {
	case m.size > len(recv.Buf):
		wc.Status = verbs.StatusLocalLength
		q.completeRecv(wc)
		return verbs.StatusRemoteInvalid
	case !q.pd.holds(recv.LKey, recv.Buf):
		wc.Status = verbs.StatusLocalProt
		q.completeRecv(wc)
		return verbs.StatusRemoteInvalid
	case m.op == verbs.OpSendInv && !q.pd.invalidate(m.key):
		return verbs.StatusRemoteAccess
	case m.op == verbs.OpSendInv:
		wc.HasInv, wc.InvKey = true, m.key
	case m.op == verbs.OpSendImm:
		wc.HasImm, wc.Imm = true, m.imm
	}
	copy(recv.Buf, m.data)
	q.completeRecv(wc)
	return verbs.StatusOK
}

// completeRecv reports the next receive.
func (q *queuePair) completeRecv(wc verbs.WC) {
	wc.ID, wc.QP = q.recvs[q.recvDone%uint64(len(q.recvs))].ID, q.cfg.Context
	q.recvDone++
	q.cq.push(completion{qp: q, recv: true, wc: wc})
}

// refuse ends the connection because of request num of the peer.
func (q *queuePair) refuse(num uint64, status verbs.Status) {
	q.conn.send(q.side, message{kind: msgBye, num: num, status: status})
	q.kill(verbs.StatusFatal)
}

// onReadData places the answer to request m.num.
func (q *queuePair) onReadData(m *message) {
	e := &q.sends[m.num%uint64(len(q.sends))]
	if !q.holdsAll(e) {
		e.status = verbs.StatusLocalProt
		return
	}
	at := 0
	for i := range e.sges {
		at += copy(e.sges[i].Buf, m.data[at:])
	}
	e.readDone = true
}

// acknowledge completes, in order, the requests that were executed.
func (q *queuePair) acknowledge() {
	for ; q.state == stateUp && q.sendDone < q.sendSent; q.sendDone++ {
		e := &q.sends[q.sendDone%uint64(len(q.sends))]
		switch {
		case e.status != verbs.StatusOK: // a local operation failed
			q.completeSend(e.status, true)
			q.sendDone++
			q.conn.sendBye(q.side)
			q.kill(verbs.StatusFatal)
			return
		case e.wr.Op == verbs.OpRead && !e.readDone:
			return
		case !isLocal(e.wr.Op) && !q.done(e):
			return
		}
		q.completeSend(verbs.StatusOK, false)
	}
}

// done reports whether e, which is the oldest request, is complete.
func (q *queuePair) done(e *sendEntry) bool {
	p := &q.conn.pipes[q.side]
	if q.conn.fabric == Stream {
		return e.end-p.received <= streamRoom
	}
	return q.sendDone < p.acked
}

// onBye ends the connection after the peer did: requests that it executed are
// complete, the request that it refused carries the status, the rest is
// flushed.
func (q *queuePair) onBye(m message) {
	q.acknowledge()
	if q.state != stateUp {
		return
	}
	if m.status != verbs.StatusOK && q.sendDone == m.num {
		q.completeSend(m.status, true)
		q.sendDone++
	}
	q.kill(m.status)
}
