package rocev2

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// phase of a queue pair's life. Moves are idle -> connecting -> up -> down;
// idle and connecting go to down only by Destroy or a failed connect.
type phase uint32

const (
	phaseIdle       phase = iota // created, receives may be posted
	phaseConnecting              // Connect or Accept is at work
	phaseUp                      // handed to the completion queue, work may be posted
	phaseDown                    // ends or has ended, nothing may be posted
)

// qp is one connection. Fields without a note belong to the owner of the
// completion queue once the phase is up, and to the creator before.
type qp struct {
	dev     *Device
	pd      *softverbs.Domain
	cq      *cq
	context uint64
	maxSGE  int
	qpn     uint32

	phase       atomic.Uint32            // any goroutine
	addrs       atomic.Pointer[addrPair] // any goroutine
	disconnect  atomic.Bool              // any goroutine: wanted
	destroyed   atomic.Bool              // any goroutine
	peerGone    atomic.Uint32            // any goroutine: a gone, why the peer is no longer there
	confirmed   atomic.Bool              // any goroutine: the peer knows that it is connected
	queued      bool                     // is in cq.pending; guarded by cq.mu
	numberGiven bool                     // guarded by cq.mu

	attached bool
	listed   bool // is in cq.active
	out      *outbox
	conn     *conn // of the connection manager

	// Set when the connection is made.
	peer     [16]byte // address
	to       sockaddr
	toPeer   pseudo
	fromPeer pseudo
	peerQPN  uint32
	mtu      uint32
	ird, ord int

	// Send queue: head..req.una are done, una..req.cur have left, cur..tail wait.
	sq             []sendEntry
	sges           []verbs.SGE // maxSGE for each entry
	sqMask         uint64
	sqHead, sqTail uint64
	sqDepth        uint64

	// Receive queue.
	rq             []recvEntry
	rqMask         uint64
	rqHead, rqTail uint64
	rqDepth        uint64
	recvStatus     verbs.Status // of the receive at the head when the connection ends

	req  requester
	resp responder

	end      ending
	deadline int64 // of cq.clock, 0: none
}

// sendEntry is a work request in the send queue.
type sendEntry struct {
	id          uint64
	addr        uint64
	first, last uint32 // packet sequence numbers, once it was started
	key         uint32
	imm         uint32
	length      uint32
	op          verbs.Opcode
	status      verbs.Status
	nsge        uint8
	signaled    bool
}

// local tells whether nothing is sent for e.
func (e *sendEntry) local() bool { return e.op == verbs.OpLocalInv || e.op == verbs.OpRegMR }

// fullAt reports whether the packet of e at off is of ours and of full size.
func (e *sendEntry) fullAt(off, mtu uint32) bool {
	return e.op != verbs.OpRead && e.length-off >= mtu
}

type recvEntry struct {
	id   uint64
	buf  []byte
	lkey uint32
}

type addrPair struct{ local, remote netip.AddrPort }

var errNotOurs = errors.New("object of another device")

// CreateQP makes a queue pair.
func (d *Device) CreateQP(p verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	dom, ok1 := p.(*softverbs.Domain)
	queue, ok2 := cfg.CQ.(*cq)
	switch {
	case d.isClosed():
		return nil, fmt.Errorf("create queue pair: %w", verbs.ErrClosed)
	case !ok1 || !ok2 || !dom.Of(&d.keys) || queue.dev != d:
		return nil, fmt.Errorf("create queue pair: %w", errNotOurs)
	case cfg.SendQueue < 0 || cfg.SendQueue > maxQPWR || cfg.RecvQueue < 0 || cfg.RecvQueue > maxQPWR:
		return nil, fmt.Errorf("create queue pair: queues of %d and %d requests, at most %d", cfg.SendQueue, cfg.RecvQueue, maxQPWR)
	case cfg.MaxSGE < 0 || cfg.MaxSGE > maxSGE:
		return nil, fmt.Errorf("create queue pair: %d elements, at most %d", cfg.MaxSGE, maxSGE)
	}
	q := &qp{dev: d, pd: dom, cq: queue, context: cfg.Context, maxSGE: max(cfg.MaxSGE, 1)}
	var err error
	if q.qpn, err = queue.takeNumber(); err != nil {
		return nil, fmt.Errorf("create queue pair: %w", err)
	}
	q.sqDepth, q.rqDepth = uint64(max(cfg.SendQueue, 1)), uint64(max(cfg.RecvQueue, 1))
	q.sq = make([]sendEntry, ringSize(q.sqDepth))
	q.rq = make([]recvEntry, ringSize(q.rqDepth))
	q.sqMask, q.rqMask = uint64(len(q.sq)-1), uint64(len(q.rq)-1)
	q.sges = make([]verbs.SGE, len(q.sq)*q.maxSGE)
	return q, nil
}

// ringSize is the power of two that holds n.
func ringSize(n uint64) uint64 { return 1 << bits.Len64(n-1) }

func (q *qp) is(p phase) bool { return phase(q.phase.Load()) == p }

// move changes the phase if it is from. Any goroutine.
func (q *qp) move(from, to phase) bool { return q.phase.CompareAndSwap(uint32(from), uint32(to)) }

// link is what two ends agree on when they connect.
type link struct {
	port             *port
	peer             netip.Addr
	local, remote    netip.AddrPort // for people: with the ports of rdma_cm
	peerQPN          uint32
	mtu              uint8 // code
	sendPSN, recvPSN uint32
	ird, ord         int
}

// begun sets up both halves. The creator's goroutine, before the owner sees q.
func (q *qp) begun(l *link) {
	q.addrs.Store(&addrPair{l.local, l.remote})
	q.peer = l.peer.As16()
	q.to.set(newPeerAddr(l.peer))
	q.toPeer = newPseudo(l.port.addr, l.peer, roceUDPPort)
	q.fromPeer = newPseudo(l.peer, l.port.addr, roceUDPPort)
	q.peerQPN, q.mtu = l.peerQPN, mtuBytes(l.mtu)
	q.ird, q.ord = l.ird, l.ord
	q.req.init(q, l.sendPSN, windowLimit(l.port.buffer, int(q.mtu)))
	q.resp.init(q, l.recvPSN)
}

// PostSend implements verbs.QP.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	if !q.is(phaseUp) {
		return 0, errPostUnconnected
	}
	for i := range wrs {
		if err := q.post(&wrs[i]); err != nil {
			q.cq.activate(q)
			return i, err
		}
	}
	q.cq.activate(q)
	return len(wrs), nil
}

var (
	errPostUnconnected = fmt.Errorf("post send: %w", verbs.ErrNotConnected)
	errPostFull        = fmt.Errorf("post send: %w", verbs.ErrQueueFull)
	errPostAccess      = fmt.Errorf("post send: %w", verbs.ErrAccess)
	errPostSGEs        = errors.New("post send: too many elements")
	errPostLength      = errors.New("post send: more than 2 GiB")
)

func (q *qp) post(wr *verbs.SendWR) error {
	if q.sqTail-q.sqHead >= q.sqDepth && !q.retireUnsignaled() {
		return errPostFull
	}
	switch wr.Op {
	case verbs.OpSend, verbs.OpSendImm, verbs.OpSendInv, verbs.OpWrite, verbs.OpWriteImm, verbs.OpLocalInv, verbs.OpRegMR:
	case verbs.OpRead:
		if q.ord == 0 {
			return fmt.Errorf("post send: the peer serves no reads: %w", verbs.ErrUnsupported)
		}
	default:
		return fmt.Errorf("post send: opcode %d: %w", wr.Op, verbs.ErrUnsupported)
	}
	if len(wr.SGEs) > q.maxSGE {
		return errPostSGEs
	}
	slot := q.sqTail & q.sqMask
	own := q.sges[int(slot)*q.maxSGE:]
	var length uint64
	for i := range wr.SGEs {
		if !q.pd.Holds(wr.SGEs[i].LKey, wr.SGEs[i].Buf) {
			return errPostAccess
		}
		own[i] = wr.SGEs[i]
		length += uint64(len(wr.SGEs[i].Buf))
	}
	if length > maxMessage {
		return errPostLength
	}
	q.sq[slot] = sendEntry{
		id: wr.ID, op: wr.Op, signaled: wr.Signaled, nsge: uint8(len(wr.SGEs)),
		addr: wr.RemoteAddr, key: wr.RKey, imm: wr.Imm, length: uint32(length),
	}
	q.sqTail++
	return nil
}

// PostRecv implements verbs.QP.
func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	if q.is(phaseDown) {
		return 0, fmt.Errorf("post receive: %w", verbs.ErrNotConnected)
	}
	for i := range wrs {
		wr := &wrs[i]
		if q.rqTail-q.rqHead >= q.rqDepth {
			return i, fmt.Errorf("post receive: %w", verbs.ErrQueueFull)
		}
		if !q.pd.Holds(wr.LKey, wr.Buf) {
			return i, fmt.Errorf("post receive: %w", verbs.ErrAccess)
		}
		q.rq[q.rqTail&q.rqMask] = recvEntry{wr.ID, wr.Buf, wr.LKey}
		q.rqTail++
	}
	return len(wrs), nil
}

// retireUnsignaled frees finished entries that need no completion. It tells
// whether there is room now.
func (q *qp) retireUnsignaled() bool {
	for q.sqHead < q.req.una.at && !q.sq[q.sqHead&q.sqMask].signaled {
		q.sqHead++
	}
	return q.sqTail-q.sqHead < q.sqDepth
}

// reap returns the completions of finished sends, in order.
func (q *qp) reap(wcs []verbs.WC) int {
	n := 0
	for n < len(wcs) && q.reapable() {
		e := &q.sq[q.sqHead&q.sqMask]
		wcs[n] = verbs.WC{ID: e.id, QP: q.context, Op: e.op, ByteLen: e.length}
		n++
		q.sqHead++
	}
	return n
}

func (q *qp) reapable() bool {
	q.retireUnsignaled()
	return q.sqHead < q.req.una.at
}

// progress returns completions, and ends the connection when its time has
// come. It is called after everything that has arrived was looked at.
func (q *qp) progress(wcs []verbs.WC) int {
	if !q.attached {
		return 0
	}
	n := q.reap(wcs)
	if q.end.state == endNone && q.peerGone.Load() != 0 && q.cq.drained {
		q.peerEnded()
	}
	if q.end.state == endFlushing {
		n += q.flush(wcs[n:])
	}
	return n
}

// busy tells whether the next Poll would find something to do for q.
func (q *qp) busy() bool {
	switch {
	case !q.attached:
		return false
	case q.end.state == endFlushing, q.reapable(), q.end.state == endNone && q.peerGone.Load() != 0:
		return true
	}
	return q.wants() && !q.out.blocked
}

// wants tells whether there is something to send.
func (q *qp) wants() bool {
	return q.attached && q.end.state == endNone && (q.resp.wants() || q.requestable())
}

// transmit sends what there is: answers first, since they make the peer go on.
func (q *qp) transmit() {
	if q.respond() {
		q.request()
	}
}

// LocalAddr implements verbs.QP.
func (q *qp) LocalAddr() netip.AddrPort {
	if a := q.addrs.Load(); a != nil {
		return a.local
	}
	return netip.AddrPort{}
}

// RemoteAddr implements verbs.QP.
func (q *qp) RemoteAddr() netip.AddrPort {
	if a := q.addrs.Load(); a != nil {
		return a.remote
	}
	return netip.AddrPort{}
}
