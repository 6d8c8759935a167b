package rocev2

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. The READs of the requester: sendRead, onResponse, scatter.

// sendRead appends a request for the next piece of a READ to the outbox. Pieces
// end at the same bytes when they are requested again, since a responder compares
// the two requests.
func (q *qp) sendRead(e *softverbs.Send) {
	r := &q.req
	n := min(e.Length-r.cur.off, readPiece*q.mtu-r.cur.off%(readPiece*q.mtu))
	head := q.out.beginPacket(q, bthLen+rethLen, bthLen+rethLen+icrcLen)
	putBTH(head, opReadRequest, 0, q.peerQPN, r.cur.psn, true)
	q.setPKey(head)
	putRETH(head[bthLen:], e.Addr+uint64(r.cur.off), e.Key, n)
	q.out.headerDone(head)
	q.out.endPacket(0)
	count := packetCount(n, q.mtu)
	r.reads[r.readTail%uint64(len(r.reads))] = psnAdd(r.cur.psn, count-1)
	r.readTail++
	q.advancePSN(count, true)
	if r.cur.off += n; r.cur.off == e.Length {
		r.nextRequest()
	}
}

// readAgain repeats the request of the READ at una after a gap in its response.
// It does so once; after another loss the READ waits for the timeout.
func (q *qp) readAgain() {
	r := &q.req
	if r.retriedRead {
		return
	}
	r.narrowWindow(r.window / 2)
	q.goBack()
	r.retriedRead = true
}

// onResponse handles a packet of a READ response.
func (q *qp) onResponse(b bth, shape *opShape, payload []byte) dropReason {
	r := &q.req
	psn := b.psn()
	if shape.aeth && aeth(b[bthLen:]).syndrome()&syndromeKindMask != syndromeAck {
		return dropHeader
	}
	if psnDiff(psn, r.high) >= 0 {
		return dropGhost
	}
	if psnDiff(psn, r.una.psn) < 0 {
		return dropNone // late
	}
	q.ackUpTo(psn)
	if psn != r.una.psn {
		q.readAgain()
		return dropNone
	}
	if r.una.at == r.begun || q.SQ.At(r.una.at).Op != verbs.OpRead {
		return dropGhost
	}
	e := q.SQ.At(r.una.at)
	if uint32(len(payload)) != min(e.Length-r.una.off, q.mtu) {
		q.failRequest(verbs.StatusFatal, fmt.Errorf("read response of %d bytes at %d of %d", len(payload), r.una.off, e.Length))
		return dropNone
	}
	if !q.holdsAll(r.una.at) {
		q.failRequest(verbs.StatusLocalProt, errRegionClosed)
		return dropNone
	}
	q.scatterRead(payload)
	q.advanceUna(e, 1)
	for r.readHead < r.readTail && psnDiff(r.una.psn, r.reads[r.readHead%uint64(len(r.reads))]) > 0 {
		r.readHead++
	}
	q.onAcknowledged(1)
	return dropNone
}

// scatterRead places b in the elements of the READ at una.
func (q *qp) scatterRead(b []byte) {
	sges := q.SQ.Elements(q.req.una.at)
	var at softverbs.Cursor
	at.Skip(sges, int(q.req.una.off))
	for len(b) > 0 {
		b = b[q.place(at.Next(sges, len(b)), b):]
	}
}
