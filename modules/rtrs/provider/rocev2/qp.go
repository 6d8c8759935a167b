package rocev2

import (
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// qp implements verbs.QP: one connection. Fields without a note belong to the
// owner of the completion queue once the phase is Up, and to the creator before.
type qp struct {
	softverbs.QP
	dev *Device
	cq  *compQueue
	qpn uint32

	peerGone  atomic.Uint32 // any goroutine: a gone, the reason why the peer has ended; 0: it has not
	confirmed atomic.Bool   // any goroutine: the peer knows that it is connected
	// numberGiven is set when the completion queue has qpn back. Any goroutine.
	numberGiven atomic.Bool

	out  *sendBatch
	conn *cmConn // of the connection manager

	// Set when the connection is made.
	peer     [16]byte // address
	to       sockaddr
	toPeer   crcPrefix
	fromPeer crcPrefix
	peerQPN  uint32
	pkey     uint16
	mtu      uint32
	ird, ord int

	// Of the send queue: the requests before req.una.at are done, those before
	// req.cur.at have left.
	req  requestHalf
	resp responseHalf
}

// isLocal reports whether nothing is sent for e.
func isLocal(e *softverbs.Send) bool { return e.Op == verbs.OpLocalInv || e.Op == verbs.OpRegMR }

// fullAt reports whether the packet of e at off carries payload of full size from
// this end.
func fullAt(e *softverbs.Send, off, mtu uint32) bool {
	return e.Op != verbs.OpRead && e.Length-off >= mtu
}

// CreateQP implements verbs.Device.
func (d *Device) CreateQP(p verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	dom, ok1 := p.(*softverbs.Domain)
	queue, ok2 := cfg.CQ.(*compQueue)
	switch {
	case d.isClosed():
		return nil, fmt.Errorf("create queue pair: %w", verbs.ErrClosed)
	case !ok1 || !ok2 || !dom.Of(&d.keys) || queue.dev != d:
		return nil, fmt.Errorf("create queue pair: %w", softverbs.ErrForeign)
	}
	if err := limits.Check(&cfg); err != nil {
		return nil, err
	}
	q := &qp{dev: d, cq: queue}
	var err error
	if q.qpn, err = queue.takeNumber(); err != nil {
		return nil, fmt.Errorf("create queue pair: %w", err)
	}
	q.Init(dom, &cfg, cfg.SendQueue) // Release reads it while the owner posts
	return q, nil
}

// limits are those of a queue pair.
var limits = softverbs.Limits{QueueDepth: maxQPWR, Elements: maxSGE}

// connAgreement is the agreement of the two ends of a connection.
type connAgreement struct {
	port             *udpPort
	peer             netip.Addr
	local, remote    netip.AddrPort // with the ports of rdma_cm, for logs
	peerQPN          uint32
	pkey             uint16
	mtu              uint8 // code
	sendPSN, recvPSN uint32
	ird, ord         int
}

// initHalves initializes both halves, before the completion queue has q. The creator.
func (q *qp) initHalves(l *connAgreement) {
	q.SetAddrs(l.local, l.remote)
	q.Ops, q.Longest = opcodeSet(l.ord), maxMessage
	q.peer = l.peer.As16()
	q.to.setPeer(newPeerAddr(l.peer))
	q.toPeer = newPseudo(l.port.addr, l.peer, roceUDPPort)
	q.fromPeer = newPseudo(l.peer, l.port.addr, roceUDPPort)
	q.toPeer.fixedID, q.fromPeer.fixedID = q.conn.fixedID, q.conn.fixedID
	q.peerQPN, q.pkey, q.mtu = l.peerQPN, l.pkey, mtuBytes(l.mtu)
	q.ird, q.ord = l.ird, l.ord
	q.req.init(q, l.sendPSN, windowLimit(l.port.buffer, int(q.mtu)))
	q.resp.init(q, l.recvPSN)
}

// setPKey puts the partition of the connection into a base transport header.
func (q *qp) setPKey(head []byte) { be.PutUint16(head[2:], q.pkey) }

// opcodeSet returns the set of opcodes for a peer that serves ord READs.
func opcodeSet(ord int) uint16 {
	ops := uint16(1<<verbs.OpSend | 1<<verbs.OpSendImm | 1<<verbs.OpSendInv | 1<<verbs.OpWrite | 1<<verbs.OpWriteImm |
		1<<verbs.OpLocalInv | 1<<verbs.OpRegMR)
	if ord > 0 {
		ops |= 1 << verbs.OpRead
	}
	return ops
}

// PostSend implements verbs.QP.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	if !q.Is(softverbs.Up) {
		return 0, softverbs.ErrPostUnconnected
	}
	n, err := q.Post(wrs, q.req.una.at)
	q.cq.activate(q)
	return n, err
}

// progress fills wcs with completions and returns their number. It ends the
// connection if the peer has ended it and all its packets were taken.
func (q *qp) progress(wcs []verbs.WC) int {
	if !q.Attached {
		return 0
	}
	n := q.Reap(wcs, q.req.una.at)
	if q.End.State == softverbs.EndNone && q.peerGone.Load() != 0 && q.cq.drained {
		q.peerEnded()
	}
	if q.End.State == softverbs.EndFlushing {
		n += q.flushRequests(wcs[n:])
	}
	return n
}

// busy reports whether the next Poll would find something to do.
func (q *qp) busy() bool {
	switch {
	case !q.Attached:
		return false
	case q.End.State == softverbs.EndFlushing, q.SQ.Reapable(q.req.una.at), q.End.State == softverbs.EndNone && q.peerGone.Load() != 0:
		return true
	}
	return q.hasWork() && !q.out.blocked
}

// hasWork reports whether there is something to send.
func (q *qp) hasWork() bool {
	return q.Attached && q.End.State == softverbs.EndNone && (q.resp.hasAnswer() || q.maySend())
}

// transmit sends everything that may be sent. Answers are first, since the peer
// waits for them.
func (q *qp) transmit() {
	if q.sendAnswers() {
		q.sendRequests()
	}
}
