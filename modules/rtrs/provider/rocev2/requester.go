package rocev2

import (
	"errors"
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. The requester. Work requests become packets with consecutive
// sequence numbers. If a packet is not acknowledged in time or is reported
// missing, it and all packets after it are sent again (go back N). A READ takes
// the sequence numbers of its responses; a long one is requested in pieces.
// docs/extend/protocol/rocev2.md, Requester. A request meets, in this order:
//
//	request        appends packets to the outbox: assignPSNs, sendPacket, sendRead
//	onAck          ACK, NAK, RNR NAK; read.go has the responses to READs
//	acknowledge    moves una: advance, progressed
//	goBack         sends again from una on
//	Expire         the answer did not come in time

const (
	// The window is the number of packets that may be in flight: 1 MiB at the
	// largest path MTU, more if receive buffers are large (windowLimit).
	baseWindow  = 256
	maxWindow   = 1024
	firstWindow = 64
	minWindow   = 2
	// ackEvery is the number of packets per request for an acknowledgement.
	ackEvery = 16
	// readPiece is the number of response packets that one READ request asks for
	// at most.
	readPiece = 64

	firstTimeout = int64(50e6) // ns
	minTimeout   = int64(5e6)
	maxTimeout   = int64(500e6)
	// probeAfter is the number of timeouts in a row after which a peer is asked
	// whether it still knows the connection.
	probeAfter = 2
)

// sendPosition is a position in the send queue: byte off of the request at position at.
// The packet there has the sequence number psn. off is a multiple of the path
// MTU.
type sendPosition struct {
	at  uint64
	off uint32
	psn uint32
}

// requestHalf is the half of a connection that sends requests.
type requestHalf struct {
	una sendPosition // the oldest packet that is not acknowledged
	cur sendPosition // the next to be sent
	// Requests before the position begun have sequence numbers; those of all of
	// them are before top.
	begun uint64
	top   uint32
	high  uint32 // the sequence number after the highest that was sent

	hold     bool             // passive side: send nothing until the peer has shown that it is connected
	sinceAck int              // packets sent since the last one that asks for an acknowledgement
	curAt    softverbs.Cursor // position of cur in the elements of its request
	reads    []uint32         // last sequence numbers of the READs in flight, a ring
	readHead uint64
	readTail uint64

	window, threshold int32
	limit             int32 // of window
	credit            int32

	timeout       int64 // until the next retry
	floor         int64 // of timeout
	srtt, rttvar  int64
	timed         bool // the packet before timedPSN is timed
	timedPSN      uint32
	timedAt       int64
	progressAt    int64 // time of the peer's last answer, or of the first unanswered packet after it
	waitUntil     int64 // RNR: send nothing before this time; 0: send
	notReadySince int64 // RNR: time from which the peer has had no receive; 0: it has one
	retriedRead   bool  // una is a READ that was requested again

	fullArrived bool // a packet of full size was acknowledged
	gapTold     bool // the peer has reported the packet at una missing
	stuck       int  // timeouts in a row without progress
}

func (r *requestHalf) init(q *qp, psn uint32, limit int32) {
	r.una.psn, r.cur.psn, r.top, r.high = psn, psn, psn, psn
	r.reads = make([]uint32, q.ord)
	r.limit = limit
	r.window, r.threshold = firstWindow, r.limit
	r.timeout, r.floor = firstTimeout, minTimeout
}

// windowLimit returns the largest window, in packets. The peer does not send
// the size of its receive buffer, so that of this end is used. The window may
// fill a quarter of it, because the kernel counts its own records, too, and
// connections share the buffer.
func windowLimit(buffer, mtu int) int32 {
	return int32(min(max(buffer/4/mtu, baseWindow), maxWindow))
}

func (r *requestHalf) outstandingPackets() int32 { return psnDiff(r.cur.psn, r.una.psn) }

// maySend reports whether a packet may be sent.
func (q *qp) maySend() bool {
	r := &q.req
	if r.hold || r.waitUntil != 0 || r.cur.at == q.SQ.Tail || r.outstandingPackets() >= r.window {
		return false
	}
	return q.SQ.At(r.cur.at).Op != verbs.OpRead || r.readTail-r.readHead < uint64(len(r.reads))
}

// sendRequests appends packets to the outbox until the window or the outbox is full
// or nothing is left.
func (q *qp) sendRequests() {
	r := &q.req
	idle := r.una.psn == r.high
	for q.maySend() {
		e := q.SQ.At(r.cur.at)
		switch {
		case isLocal(e) && r.cur.at < r.begun: // was executed the first time
			r.nextRequest()
		case isLocal(e):
			if !q.localWork(e) {
				return
			}
		case !q.out.makeRoom():
			return
		case !q.assignPSNs(e):
			return
		case e.Op == verbs.OpRead:
			q.sendRead(e)
		default:
			q.sendPacket(e)
		}
	}
	if r.outstandingPackets() == 0 {
		return
	}
	if idle {
		r.progressAt = q.cq.clock
	}
	if q.Deadline == 0 {
		q.setDeadline(q.cq.clock + r.timeout)
	}
}

// assignPSNs gives the request at cur its sequence numbers, the first time. It returns
// false and ends the connection if a region was closed since the post.
func (q *qp) assignPSNs(e *softverbs.Send) bool {
	r := &q.req
	if r.cur.at < r.begun {
		return true
	}
	if !q.holdsAll(r.cur.at) {
		e.Status = verbs.StatusLocalProt
		q.hangUp(verbs.StatusLocalProt, errRegionClosed)
		return false
	}
	last := psnAdd(r.cur.psn, packetCount(e.Length, q.mtu)-1)
	e.End = uint64(last)
	r.begun = r.cur.at + 1
	r.top = psnAdd(last, 1)
	return true
}

var errRegionClosed = errors.New("region of a request was closed before the request was done")

// nextRequest moves cur to the next request.
func (r *requestHalf) nextRequest() {
	r.cur.at++
	r.cur.off, r.curAt = 0, softverbs.Cursor{}
}

// localWork executes OpLocalInv and OpRegMR, in order with the requests around
// them. A failure ends the connection and returns false.
func (q *qp) localWork(e *softverbs.Send) bool {
	if res := q.Domain.Rotate(e.Op, e.Key); res != softverbs.KeyOK {
		e.Status = verbs.StatusLocalProt
		q.hangUp(verbs.StatusLocalProt, fmt.Errorf("key %#x cannot be changed: %s", e.Key, res))
		return false
	}
	r := &q.req
	r.begun = r.cur.at + 1
	r.nextRequest()
	q.skipLocal()
	return true
}

// skipLocal moves una over local work that was executed.
func (q *qp) skipLocal() {
	r := &q.req
	for r.una.at < r.begun && r.una.off == 0 && isLocal(q.SQ.At(r.una.at)) {
		r.una.at++
	}
}

// sendPacket appends the next packet of a SEND or a WRITE to the outbox.
func (q *qp) sendPacket(e *softverbs.Send) {
	r := &q.req
	n := int(min(e.Length-r.cur.off, q.mtu))
	first, last := r.cur.off == 0, r.cur.off+uint32(n) == e.Length
	op := packetOpcode(e.Op, first, last)
	shape := &shapes[op]
	pad := padLen(n)
	head := q.out.beginPacket(q, shape.size, shape.size+n+pad+icrcLen)
	ask := last || r.sinceAck+1 >= ackEvery || r.outstandingPackets()+1 >= r.window
	putBTH(head, op, pad, q.peerQPN, r.cur.psn, ask)
	q.setPKey(head)
	at := bthLen
	if shape.reth {
		putRETH(head[at:], e.Addr, e.Key, e.Length)
		at += rethLen
	}
	if shape.imm {
		be.PutUint32(head[at:], e.Imm)
	} else if shape.inv {
		be.PutUint32(head[at:], e.Key)
	}
	q.out.headerDone(head)
	q.appendPayload(n)
	q.out.endPacket(pad)
	q.advancePSN(1, ask)
	if r.cur.off += uint32(n); last {
		r.nextRequest()
	}
}

// packetOpcode returns the opcode of a packet of a message.
func packetOpcode(op verbs.Opcode, first, last bool) opcode {
	var o opcode
	switch {
	case first && last:
		o = opSendOnly
	case first:
		o = opSendFirst
	case last:
		o = opSendLast
	default:
		o = opSendMiddle
	}
	if op == verbs.OpWrite || op == verbs.OpWriteImm {
		o += opWriteFirst - opSendFirst
	}
	if !last {
		return o
	}
	switch op {
	case verbs.OpSendImm, verbs.OpWriteImm:
		return o + 1
	case verbs.OpSendInv:
		if first {
			return opSendOnlyInv
		}
		return opSendLastInv
	}
	return o
}

// appendPayload appends the next n bytes of the payload to the packet.
func (q *qp) appendPayload(n int) {
	r := &q.req
	sges := q.SQ.Elements(r.cur.at)
	for n > 0 {
		b := r.curAt.Next(sges, n)
		q.out.appendPayload(b)
		n -= len(b)
	}
}

// advancePSN accounts for a packet that was sent and takes n sequence numbers. asked
// reports that it asks for an acknowledgement.
func (q *qp) advancePSN(n uint32, asked bool) {
	r := &q.req
	r.sinceAck++
	if asked {
		r.sinceAck = 0
	}
	r.cur.psn = psnAdd(r.cur.psn, n)
	if psnDiff(r.cur.psn, r.high) <= 0 {
		q.cq.stats.resent.Add(1)
		return
	}
	r.high = r.cur.psn
	if asked && !r.timed {
		r.timed, r.timedPSN, r.timedAt = true, r.cur.psn, q.cq.clock
	}
}

// onAck handles an ACK, a NAK or an RNR NAK.
func (q *qp) onAck(b bth) dropReason {
	r := &q.req
	a := aeth(b[bthLen:])
	psn := b.psn()
	behind := psnDiff(psn, r.una.psn)
	switch {
	case psnDiff(psn, r.high) > 0 || a.syndrome()&syndromeKindMask != syndromeNAK && psn == r.high:
		return dropGhost
	case behind < 0:
		return dropNone // late
	}
	switch a.syndrome() & syndromeKindMask {
	case syndromeAck:
		q.ackUpTo(psnAdd(psn, 1))
		if r.una.psn != psnAdd(psn, 1) && psnDiff(psn, r.una.psn) >= 0 {
			q.readAgain() // a READ before it was not answered
		}
	case syndromeRNR:
		q.ackUpTo(psn)
		q.notReady(rnrDelay(a.syndrome()))
	case syndromeNAK:
		q.ackUpTo(psn)
		return q.onNak(a.syndrome())
	default:
		return dropHeader
	}
	return dropNone
}

// ackUpTo moves una to psn, or to the first READ before it that was not
// answered.
func (q *qp) ackUpTo(psn uint32) {
	r := &q.req
	before := r.una.psn
	for psnDiff(psn, r.una.psn) > 0 && r.una.at < r.begun {
		e := q.SQ.At(r.una.at)
		if e.Op == verbs.OpRead {
			break
		}
		q.advanceUna(e, min(uint32(psnDiff(psn, r.una.psn)), uint32(psnDiff(uint32(e.End), r.una.psn))+1))
	}
	if n := psnDiff(r.una.psn, before); n > 0 {
		q.onAcknowledged(n)
	}
}

// advanceUna moves una over n packets of its request e.
func (q *qp) advanceUna(e *softverbs.Send, n uint32) {
	r := &q.req
	if !r.fullArrived && fullAt(e, r.una.off, q.mtu) {
		r.fullArrived = true
	}
	r.una.psn = psnAdd(r.una.psn, n)
	r.una.off += n * q.mtu
	if psnDiff(r.una.psn, uint32(e.End)) > 0 {
		r.una.at++
		r.una.off = 0
		q.skipLocal()
	}
}

// onAcknowledged accounts for n more packets that have arrived at the peer.
func (q *qp) onAcknowledged(n int32) {
	r := &q.req
	r.progressAt, r.notReadySince, r.retriedRead = q.cq.clock, 0, false
	r.gapTold, r.stuck = false, 0
	if r.timed && psnDiff(r.una.psn, r.timedPSN) >= 0 {
		r.adaptTimeout(q.cq.clock - r.timedAt)
	}
	r.widenWindow(n)
	if psnDiff(r.una.psn, r.cur.psn) > 0 {
		q.goBack() // cur moves forward: the packets in between have arrived
	}
	if r.outstandingPackets() == 0 {
		q.setDeadline(0)
	} else {
		q.setDeadline(q.cq.clock + r.timeout)
	}
	q.cq.activate(q)
}

// adaptTimeout adapts the timeout to a round trip time, as RFC 6298 does.
func (r *requestHalf) adaptTimeout(rtt int64) {
	r.timed = false
	if r.srtt == 0 {
		r.srtt, r.rttvar = rtt, rtt/2
	} else {
		r.rttvar += (max(rtt-r.srtt, r.srtt-rtt) - r.rttvar) / 4
		r.srtt += (rtt - r.srtt) / 8
	}
	r.timeout = max(min(r.srtt+4*r.rttvar, maxTimeout), r.floor)
}

// widenWindow widens the window after n packets have arrived.
func (r *requestHalf) widenWindow(n int32) {
	if r.window < r.threshold {
		r.window = min(r.window+n, r.limit)
		return
	}
	if r.credit += n; r.credit >= r.window {
		r.credit = 0
		r.window = min(r.window+1, r.limit)
	}
}

// narrowWindow makes the window smaller after a loss.
func (r *requestHalf) narrowWindow(window int32) {
	r.threshold = max(r.window/2, 2*minWindow)
	r.window = max(min(window, r.threshold), minWindow)
	r.credit = 0
}

// goBack makes una the next packet to be sent.
func (q *qp) goBack() {
	r := &q.req
	r.cur = r.una
	r.readHead = r.readTail
	r.timed = false
	r.sinceAck = 0
	r.curAt = softverbs.Cursor{}
	r.curAt.Skip(q.SQ.Elements(r.cur.at), int(r.cur.off))
	q.setDeadline(0) // request sets it
	q.cq.activate(q)
}

// onNak handles a NAK of the packet at una.
func (q *qp) onNak(syndrome byte) dropReason {
	r := &q.req
	status := verbs.StatusRemoteInvalid
	switch syndrome {
	case nakSequence:
		q.cq.stats.seqNAKs.Add(1)
		r.progressAt, r.gapTold = q.cq.clock, true
		r.narrowWindow(r.window / 2)
		q.goBack()
		return dropNone
	case nakAccess:
		status = verbs.StatusRemoteAccess
	case nakInvalid, nakOperation:
	default:
		return dropHeader
	}
	if r.una.at == r.begun {
		return dropGhost // nothing is outstanding
	}
	q.failRequest(status, fmt.Errorf("peer refuses a request: NAK %#x", syndrome))
	return dropNone
}

// failRequest ends the connection because of the request at una.
func (q *qp) failRequest(status verbs.Status, cause error) {
	if r := &q.req; r.una.at < q.SQ.Tail {
		q.SQ.At(r.una.at).Status = status
	}
	q.hangUp(status, cause)
}

// notReady waits for the time of an RNR NAK, in nanoseconds, and then sends few
// packets.
func (q *qp) notReady(delay int64) {
	r := &q.req
	now := q.cq.clock
	q.cq.stats.rnrNAKs.Add(1)
	r.progressAt = now
	if r.notReadySince == 0 {
		r.notReadySince = now
	}
	if limit := int64(q.dev.cfg.RNRTimeout); limit > 0 && now-r.notReadySince > limit {
		q.failRequest(verbs.StatusRetryExceeded, fmt.Errorf("peer had no receive for %s", q.dev.cfg.RNRTimeout))
		return
	}
	r.narrowWindow(minWindow)
	q.goBack()
	r.waitUntil = now + delay
	q.setDeadline(r.waitUntil)
}

// place copies payload from the staging buffer to dst, unless it was received
// there, and returns the number of bytes. No other function copies payload.
func (q *qp) place(dst, src []byte) int {
	if &dst[0] == &src[0] {
		return len(src)
	}
	n := copy(dst, src)
	q.cq.stats.placed.Add(uint64(n))
	return n
}

// Expire implements softverbs.Conn: a wait is over, or an answer has not come.
func (q *qp) Expire(now int64) {
	r := &q.req
	switch {
	case q.End.State != softverbs.EndNone:
	case r.waitUntil != 0:
		r.waitUntil = 0
		q.cq.activate(q)
	case r.outstandingPackets() > 0:
		q.cq.stats.timeouts.Add(1)
		r.stuck++
		if limit := q.dev.cfg.RetryTimeout; q.cq.clock-r.progressAt > int64(limit) {
			q.failRequest(verbs.StatusRetryExceeded, fmt.Errorf("peer has not answered for %s", limit))
			return
		}
		if r.stuck >= probeAfter {
			q.dev.cm.probePeer(q.conn)
		}
		r.narrowWindow(minWindow)
		r.timeout = min(2*r.timeout, maxTimeout)
		q.goBack()
		r.retriedRead = false
	}
}
