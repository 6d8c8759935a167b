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

// wireMessage is the unit on the wire. data belongs to it.
type wireMessage struct {
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

// messagePipe is one direction of a connection.
type messagePipe struct {
	link  *faultyLink
	shut  bool // nothing arrives, see StallConn
	msgs  []wireMessage
	head  int
	acked uint64 // requests below were executed by the receiver
	// Bytes of all messages that were sent and that were received.
	sent, received int
}

// streamRoom is how many bytes a stream takes before the peer reads, as the buffers
// of two sockets do.
const streamRoom = 4 << 20

func (p *messagePipe) len() int            { return len(p.msgs) - p.head }
func (p *messagePipe) first() *wireMessage { return &p.msgs[p.head] }
func (p *messagePipe) last() *wireMessage  { return &p.msgs[len(p.msgs)-1] }

// mayArrive reports whether m may arrive now. m is in p.
func (p *messagePipe) mayArrive(m *wireMessage) bool { return !p.shut && p.link.mayArrive(m) }

func (p *messagePipe) push(m wireMessage) {
	if p.head > 0 && len(p.msgs) == cap(p.msgs) {
		p.msgs = p.msgs[:copy(p.msgs, p.msgs[p.head:])]
		p.head = 0
	}
	p.msgs = append(p.msgs, m)
	p.sent += len(m.data)
}

func (p *messagePipe) pop() {
	p.received += len(p.first().data)
	*p.first() = wireMessage{}
	if p.head++; p.head == len(p.msgs) {
		p.msgs, p.head = p.msgs[:0], 0
	}
}

// connPair is a connection. It lives until both ends are dead.
type connPair struct {
	net    *Network
	fabric Fabric
	ends   [2]*queuePair  // active, passive
	pipes  [2]messagePipe // pipes[i] carries the messages of ends[i]
}

// joinQPs connects the queue pairs of a request and its answer.
func (n *Network) joinQPs(active, passive *queuePair) {
	c := &connPair{net: n, ends: [2]*queuePair{active, passive}}
	a, p := passive.remote, passive.local
	c.pipes[0].link = n.linkBetween(a.Addr(), p.Addr())
	c.pipes[1].link = n.linkBetween(p.Addr(), a.Addr())
	c.fabric = c.pipes[0].link.fabric
	active.conn, active.side = c, 0
	passive.conn, passive.side = c, 1
	n.conns = append(n.conns, c)
}

// sendTo puts m on the link of side and wakes the other end.
func (c *connPair) sendTo(side int, m wireMessage) {
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
	peer.cq.kickOwner()
}

func (c *connPair) sendBye(side int) { c.sendTo(side, wireMessage{kind: msgBye}) }

// freeUnreceived frees messages that will not be received any more.
func (c *connPair) freeUnreceived() {
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

// transmitPosted puts posted requests on the link.
func (q *queuePair) transmitPosted() {
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
		m := q.encodeMessage(e, num)
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
			q.conn.sendTo(q.side, m)
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
	before, waits := q.progressState()
	if !waits {
		return
	}
	q.watched = true
	time.AfterFunc(n.ackTimeout, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		q.watched = false
		if q.state == stateUp {
			if now, waits := q.progressState(); waits && now == before {
				q.endQP(verbs.StatusFatal)
				return
			}
		}
		q.watchProgress()
	})
}

// progressState returns a number that changes when the peer has something more of what
// q has sent, and reports whether q waits for that.
func (q *queuePair) progressState() (at uint64, waits bool) {
	if q.conn.fabric != Stream {
		return q.sendDone, q.sendDone < q.sendSent
	}
	p := &q.conn.pipes[q.side]
	if p.len() == 0 || p.mayArrive(p.first()) {
		return 0, false
	}
	return p.first().seq, true
}

// holdsAll reports whether the elements of e are still registered.
func (q *queuePair) holdsAll(e *sendEntry) bool {
	for i := range e.sges {
		if !q.pd.holdsBuffer(e.sges[i].LKey, e.sges[i].Buf) {
			return false
		}
	}
	return true
}

// encodeMessage copies the payload of e into a message.
func (q *queuePair) encodeMessage(e *sendEntry, num uint64) wireMessage {
	m := wireMessage{op: e.wr.Op, imm: e.wr.Imm, key: e.wr.RKey, addr: e.wr.RemoteAddr, num: num, size: e.size}
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
		ok = q.pd.invalidateKey(e.wr.RKey)
	} else {
		ok = q.pd.registerKey(e.wr.RKey)
	}
	if !ok {
		e.status = verbs.StatusLocalProt
	}
	q.cq.ready.Store(true)
}

// receiveMessages takes the peer's messages, then reports the requests that the peer
// has executed.
func (q *queuePair) receiveMessages() {
	for q.state == stateUp && q.receiveOne() {
	}
	if q.state != stateUp {
		return
	}
	if in := &q.conn.pipes[1-q.side]; !in.shut && !in.link.stalled || q.conn.fabric == Stream {
		q.ackInOrder()
	}
}

// receiveOne takes one message and reports whether there may be more.
func (q *queuePair) receiveOne() bool {
	p := &q.conn.pipes[1-q.side]
	if p.len() == 0 || !p.mayArrive(p.first()) {
		return false
	}
	m := p.first()
	if m.lost && !q.resendLost(m) {
		q.cq.net.putBuf(m.data)
		p.pop()
		return true
	}
	if m.kind == msgRequest && consumesRecv(m.op) && q.recvDone == q.recvPosted {
		if p.last().kind != msgBye || !p.mayArrive(p.last()) {
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
		if status := q.executeRequest(m); status != verbs.StatusOK {
			q.refuseRequest(m.num, status)
			return false
		}
		p.acked = m.num + 1
		q.conn.ends[1-q.side].cq.kickOwner()
	}
	q.cq.net.putBuf(m.data)
	p.pop()
	return true
}

// resendLost has the peer send m, which was lost, again. False: it does not.
func (q *queuePair) resendLost(m *wireMessage) bool {
	peer := q.conn.ends[1-q.side]
	if peer.state != stateUp {
		return false
	}
	e := &peer.sends[m.num%uint64(len(peer.sends))]
	if !peer.holdsAll(e) { // its owner has taken the memory back
		peer.endQP(verbs.StatusFatal)
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

// executeRequest executes a request of the peer. The result is the peer's status.
func (q *queuePair) executeRequest(m *wireMessage) verbs.Status {
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
func (q *queuePair) place(m *wireMessage) verbs.Status {
	if m.size == 0 {
		return verbs.StatusOK
	}
	to := q.pd.reachMemory(m.key, m.addr, m.size, verbs.AccessRemoteWrite)
	if to == nil {
		return verbs.StatusRemoteAccess
	}
	copy(to, m.data)
	return verbs.StatusOK
}

func (q *queuePair) answerRead(m *wireMessage) verbs.Status {
	answer := wireMessage{kind: msgReadData, num: m.num, size: m.size}
	if m.size > 0 {
		from := q.pd.reachMemory(m.key, m.addr, m.size, verbs.AccessRemoteRead)
		if from == nil {
			return verbs.StatusRemoteAccess
		}
		answer.data = q.cq.net.getBuf(m.size)
		copy(answer.data, from)
	}
	q.conn.sendTo(q.side, answer)
	return verbs.StatusOK
}

// placeSend places a message of the SEND family into the next receive.
func (q *queuePair) placeSend(m *wireMessage) verbs.Status {
	recv := &q.recvs[q.recvDone%uint64(len(q.recvs))]
	wc := verbs.WC{Op: verbs.OpRecv, ByteLen: uint32(m.size)}
	switch {
	case m.size > len(recv.Buf):
		wc.Status = verbs.StatusLocalLength
		q.completeRecv(wc)
		return verbs.StatusRemoteInvalid
	case !q.pd.holdsBuffer(recv.LKey, recv.Buf):
		wc.Status = verbs.StatusLocalProt
		q.completeRecv(wc)
		return verbs.StatusRemoteInvalid
	case m.op == verbs.OpSendInv && !q.pd.invalidateKey(m.key):
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
	q.cq.pushCompletion(pendingWC{qp: q, recv: true, wc: wc})
}

// refuseRequest ends the connection because of request num of the peer.
func (q *queuePair) refuseRequest(num uint64, status verbs.Status) {
	q.conn.sendTo(q.side, wireMessage{kind: msgBye, num: num, status: status})
	q.endQP(verbs.StatusFatal)
}

// onReadData places the answer to request m.num.
func (q *queuePair) onReadData(m *wireMessage) {
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

// ackInOrder completes, in order, the requests that were executed.
func (q *queuePair) ackInOrder() {
	for ; q.state == stateUp && q.sendDone < q.sendSent; q.sendDone++ {
		e := &q.sends[q.sendDone%uint64(len(q.sends))]
		switch {
		case e.status != verbs.StatusOK: // a local operation failed
			q.completeSend(e.status, true)
			q.sendDone++
			q.conn.sendBye(q.side)
			q.endQP(verbs.StatusFatal)
			return
		case e.wr.Op == verbs.OpRead && !e.readDone:
			return
		case !isLocal(e.wr.Op) && !q.entryDone(e):
			return
		}
		q.completeSend(verbs.StatusOK, false)
	}
}

// entryDone reports whether e, which is the oldest request, is complete.
func (q *queuePair) entryDone(e *sendEntry) bool {
	p := &q.conn.pipes[q.side]
	if q.conn.fabric == Stream {
		return e.end-p.received <= streamRoom
	}
	return q.sendDone < p.acked
}

// onBye ends the connection after the peer did: requests that it executed are
// complete, the request that it refused carries the status, the rest is
// flushed.
func (q *queuePair) onBye(m wireMessage) {
	q.ackInOrder()
	if q.state != stateUp {
		return
	}
	if m.status != verbs.StatusOK && q.sendDone == m.num {
		q.completeSend(m.status, true)
		q.sendDone++
	}
	q.endQP(m.status)
}
