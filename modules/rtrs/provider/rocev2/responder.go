package rocev2

import (
	"errors"
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. The responder. Packets are taken in the order of their sequence
// numbers only. They are answered once per Poll: first with the data of READs,
// then with one acknowledgement for all. docs/extend/protocol/rocev2.md, Responder. A
// packet meets, in this order:
//
//	onRequest    the sequence number: expected, repeated or behind a gap
//	check        its message, its place and the rights of the peer
//	deliver      its payload is placed; the last one completes a receive
//	respond      READ responses and the acknowledgement

// rnrCode is the time that a peer waits if no receive is posted: 1.28 ms.
const rnrCode = 14

// responseHalf is the half of a connection that receives requests.
type responseHalf struct {
	psn    uint32 // expected
	msn    uint32 // messages completed
	silent bool   // the gap at psn was reported: no other NAK before it is filled

	msg partialMessage // in progress
	dst []byte         // the place of the message of the packet that was checked

	ackDue  bool
	nak     byte // syndrome to be sent for psn, 0: none
	serves  []pendingRead
	head    uint64
	tail    uint64
	serving uint32 // packets of the oldest serve that were sent
}

// partialMessage is the one that is being received.
type partialMessage struct {
	class messageClass // classNone: none
	addr  uint64
	key   uint32
	total uint32 // of a WRITE
	got   uint32
}

// pendingRead is a READ of the peer that waits for its response.
type pendingRead struct {
	psn    uint32
	addr   uint64
	key    uint32
	length uint32
	msn    uint32
}

func (x *responseHalf) init(q *qp, psn uint32) {
	x.psn = psn
	x.serves = make([]pendingRead, q.ird)
}

// hasAnswer reports whether there is an answer to send.
func (x *responseHalf) hasAnswer() bool { return x.ackDue || x.nak != 0 || x.head != x.tail }

// onRequest handles a packet of a request. It returns the number of completions.
func (q *qp) onRequest(b bth, shape *opShape, payload []byte, wc *verbs.WC) int {
	x := &q.resp
	q.cq.activate(q)
	switch d := psnDiff(b.psn(), x.psn); {
	case d > 0:
		if !x.silent {
			x.silent, x.nak = true, nakSequence
		}
		return 0
	case d < 0:
		q.onDuplicate(b, shape)
		return 0
	}
	if nak := q.checkExpected(b, shape, payload); nak != 0 {
		q.sendNak(nak)
		return 0
	}
	x.silent = false
	if b.ackReq() {
		x.ackDue = true
	}
	if shape.class == classRead {
		q.deliverRead(b)
		return 0
	}
	x.psn = psnAdd(x.psn, 1)
	return q.deliverPayload(b, shape, payload, wc)
}

// sendNak answers with a NAK. The connection ends, except after an RNR NAK.
func (q *qp) sendNak(nak byte) {
	x := &q.resp
	x.nak = nak
	if nak&syndromeKindMask == syndromeRNR {
		x.silent = true
		return
	}
	q.sayLast()
	q.hangUp(verbs.StatusFatal, fmt.Errorf("peer broke the protocol: answered with NAK %#x", nak))
}

// onDuplicate answers a packet that was taken before: its answer was lost.
func (q *qp) onDuplicate(b bth, shape *opShape) {
	x := &q.resp
	if shape.class != classRead {
		x.ackDue = true
		return
	}
	s := newServe(b)
	if len(x.serves) == 0 || psnDiff(psnAdd(s.psn, packetCount(s.length, q.mtu)-1), x.psn) >= 0 {
		return // the first request was another one
	}
	// The peer repeats everything from here on.
	for x.tail > x.head && psnDiff(x.lastPSN(q), s.psn) >= 0 {
		x.tail--
	}
	if x.tail == x.head {
		x.serving = 0
	}
	s.msn = x.msn
	x.serves[x.tail%uint64(len(x.serves))] = s
	x.tail++
}

// lastPSN returns the last sequence number of the newest READ to answer.
func (x *responseHalf) lastPSN(q *qp) uint32 {
	s := &x.serves[(x.tail-1)%uint64(len(x.serves))]
	return psnAdd(s.psn, packetCount(s.length, q.mtu)-1)
}

func newServe(b bth) pendingRead {
	r := reth(b[bthLen:])
	return pendingRead{psn: b.psn(), addr: r.addr(), key: r.key(), length: r.length()}
}

// checkExpected checks the expected packet and finds the place of its message. It changes
// nothing else, so that the packet may come again. It returns the syndrome of a
// NAK, or 0.
func (q *qp) checkExpected(b bth, shape *opShape, payload []byte) byte {
	m := &q.resp.msg
	if shape.first != (m.class == classNone) || !shape.first && m.class != shape.class {
		return nakInvalid
	}
	n := uint32(len(payload))
	if !shape.last && n != q.mtu || n > q.mtu || shape.last && !shape.first && n == 0 {
		return nakInvalid
	}
	switch shape.class {
	case classSend:
		return q.checkSend(b, shape, n)
	case classWrite:
		return q.checkWrite(b, shape, n)
	}
	return q.checkRead(b, n)
}

func (q *qp) checkSend(b bth, shape *opShape, n uint32) byte {
	if q.RQ.Empty() {
		return syndromeRNR | rnrCode
	}
	var got uint32
	if !shape.first {
		got = q.resp.msg.got
	}
	in := q.RQ.Oldest()
	if q.resp.dst = in.Buf; !q.Domain.Holds(in.LKey, in.Buf) {
		q.RQ.Status = verbs.StatusLocalProt
		return nakOperation
	}
	if uint64(got)+uint64(n) > uint64(len(q.resp.dst)) {
		q.RQ.Status = verbs.StatusLocalLength
		return nakInvalid
	}
	if shape.inv && !q.invalidateKey(be.Uint32(b[bthLen:])) {
		q.RQ.Status = verbs.StatusRemoteInvalid
		return nakAccess
	}
	return 0
}

// invalidateKey invalidates the key that a SEND WITH INVALIDATE names. It is the
// last check, so that nothing has to be undone.
func (q *qp) invalidateKey(key uint32) bool { return q.Domain.Invalidate(key) == softverbs.KeyOK }

func (q *qp) checkWrite(b bth, shape *opShape, n uint32) byte {
	m := q.resp.msg
	if shape.first {
		r := reth(b[bthLen:])
		m = partialMessage{addr: r.addr(), key: r.key(), total: r.length()}
	}
	if m.total > maxMessage || shape.last != (m.got+n == m.total) || m.got+n > m.total {
		return nakInvalid
	}
	if m.total > 0 {
		// Another owner may invalidate the key at any time: it is looked up once.
		q.resp.dst = q.Domain.Remote(m.key, m.addr, uint64(m.total), verbs.AccessRemoteWrite)
		if q.resp.dst == nil {
			return nakAccess
		}
	}
	if shape.imm && q.RQ.Empty() {
		return syndromeRNR | rnrCode
	}
	return 0
}

func (q *qp) checkRead(b bth, n uint32) byte {
	x := &q.resp
	s := newServe(b)
	switch {
	case n != 0 || s.length > maxMessage || x.tail-x.head >= uint64(len(x.serves)):
		return nakInvalid
	case s.length > 0 && q.Domain.Remote(s.key, s.addr, uint64(s.length), verbs.AccessRemoteRead) == nil:
		return nakAccess
	}
	return 0
}

// deliverPayload places a checked packet of a SEND or a WRITE. It returns the number
// of completions.
func (q *qp) deliverPayload(b bth, shape *opShape, payload []byte, wc *verbs.WC) int {
	x := &q.resp
	m := &x.msg
	if shape.first {
		*m = partialMessage{class: shape.class}
		if shape.reth {
			r := reth(b[bthLen:])
			m.addr, m.key, m.total = r.addr(), r.key(), r.length()
		}
	}
	if len(payload) > 0 {
		q.place(x.dst[m.got:], payload)
		m.got += uint32(len(payload))
	}
	if !shape.last {
		if m.class == classWrite {
			q.cq.writing = q
		}
		return 0
	}
	m.class = classNone
	x.msn++
	if shape.class == classWrite && !shape.imm {
		return 0
	}
	q.completeReceive(b, shape, wc)
	return 1
}

// completeReceive completes the oldest receive.
func (q *qp) completeReceive(b bth, shape *opShape, wc *verbs.WC) {
	*wc = verbs.WC{ID: q.RQ.Take(), QP: q.Context, Op: verbs.OpRecv, ByteLen: q.resp.msg.got}
	word := b[shape.size-immLen:]
	switch {
	case shape.imm:
		wc.HasImm, wc.Imm = true, be.Uint32(word)
		if shape.class == classWrite {
			wc.Op = verbs.OpRecvImm
		}
	case shape.inv:
		wc.HasInv, wc.InvKey = true, be.Uint32(word)
	}
}

// deliverRead queues the response to a READ.
func (q *qp) deliverRead(b bth) {
	x := &q.resp
	s := newServe(b)
	x.msn++
	s.msn = x.msn
	x.psn = psnAdd(x.psn, packetCount(s.length, q.mtu))
	x.ackDue = false // the response acknowledges it
	x.serves[x.tail%uint64(len(x.serves))] = s
	x.tail++
}

// sendAnswers appends the answers to the outbox. It returns false if that is full.
func (q *qp) sendAnswers() bool {
	x := &q.resp
	for x.head != x.tail {
		if !q.out.makeRoom() {
			return false
		}
		if !q.sendResponse() {
			return false
		}
	}
	if x.nak == 0 && !x.ackDue {
		return true
	}
	if !q.out.makeRoom() {
		return false
	}
	syndrome, psn := byte(ackCreditsInvalid), psnAdd(x.psn, psnMask)
	if x.nak != 0 {
		syndrome, psn = x.nak, x.psn
	}
	q.sendAck(syndrome, psn)
	x.nak, x.ackDue = 0, false
	return true
}

func (q *qp) sendAck(syndrome byte, psn uint32) {
	head := q.out.beginPacket(q, bthLen+aethLen, bthLen+aethLen+icrcLen)
	putBTH(head, opAck, 0, q.peerQPN, psn, false)
	q.setPKey(head)
	putAETH(head[bthLen:], syndrome, q.resp.msn)
	q.out.headerDone(head)
	q.out.endPacket(0)
}

// sendResponse appends the next packet of the response to the oldest READ to the
// outbox. The key is checked for every packet: if it was invalidated, the
// connection ends and sendResponse returns false.
func (q *qp) sendResponse() bool {
	x := &q.resp
	s := &x.serves[x.head%uint64(len(x.serves))]
	off := x.serving * q.mtu
	n := min(s.length-off, q.mtu)
	var data []byte
	if n > 0 {
		if data = q.Domain.Remote(s.key, s.addr, uint64(s.length), verbs.AccessRemoteRead); data == nil {
			q.sendAck(nakAccess, psnAdd(s.psn, x.serving))
			q.out.flushPackets()
			q.hangUp(verbs.StatusFatal, errors.New("region of a READ of the peer was invalidated or closed"))
			return false
		}
		data = data[off : off+n]
	}
	first, last := off == 0, off+n == s.length
	op := opReadRespMiddle
	switch {
	case first && last:
		op = opReadRespOnly
	case first:
		op = opReadRespFirst
	case last:
		op = opReadRespLast
	}
	pad := padLen(int(n))
	size := shapes[op].size
	head := q.out.beginPacket(q, size, size+int(n)+pad+icrcLen)
	putBTH(head, op, pad, q.peerQPN, psnAdd(s.psn, x.serving), false)
	q.setPKey(head)
	if shapes[op].aeth {
		putAETH(head[bthLen:], ackCreditsInvalid, s.msn)
	}
	q.out.headerDone(head)
	if n > 0 {
		q.out.appendPayload(data)
	}
	q.out.endPacket(pad)
	if x.serving++; last {
		x.serving = 0
		x.head++
	}
	return true
}
