package iwarp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. The rules of receiving, in the order in which they are applied.
// The first violated rule gives the code of the Terminate.
// docs/extend/protocol/iwarp.md, Receiving, has the table; rx.go checks the length and
// the CRC. A segment meets, in this order:
//
//	begin      checks the header, finds the place of the payload
//	deliver    the segment is right: messages are completed

// beginSegment checks the header of a segment and finds the place of its payload. It
// changes nothing else, so that it can be called again after a receive was
// posted. It returns 0 or the rule that is broken.
func (q *qp) beginSegment() termCode {
	x := &q.rx
	h := fpduHeader(x.head[:])
	switch {
	case h.version() != ctlVersion && h.tagged():
		return termTaggedVersion
	case h.version() != ctlVersion:
		return termVersion
	case h.rdmap() != rdmapVersion:
		return termRDMAPVersion
	case !x.op.isKnown(q.terms.features) || x.op.tagged() != h.tagged():
		return termOpcode
	case !h.tagged():
		return q.beginUntagged(h)
	case x.tagged.open && x.tagged.op != x.op:
		return termDDPFatal
	case x.op == opWrite:
		return q.beginWrite(h)
	}
	return q.beginReadResponse(h)
}

func (q *qp) beginUntagged(h fpduHeader) termCode {
	x := &q.rx
	switch {
	case h.qn() != x.op.queueNumber():
		return termQN
	case h.msn() != x.msn[h.qn()]:
		return termMSN
	}
	switch x.op {
	case opReadRequest:
		return q.beginReadRequest(h)
	case opTerminate:
		x.dst, x.control = x.ctl[:], true
		if x.left > len(x.ctl) || h.mo() != 0 || !x.last {
			return termUnspecified
		}
		return 0
	}
	return q.beginSend(h)
}

// beginSend checks a segment of a message that takes a receive.
func (q *qp) beginSend(h fpduHeader) termCode {
	x := &q.rx
	if q.RQ.Empty() {
		return termNoBuffer
	}
	have := uint32(0)
	if x.untagged.open {
		have = x.untagged.length
	}
	buf := q.RQ.Oldest().Buf
	if x.op == opImmediate || x.op == opImmediateSE {
		buf, x.control = x.ctl[:immediateLen], true
	}
	switch {
	case h.mo() != have:
		return termMO
	case x.untagged.open && x.untagged.op != x.op:
		return termDDPFatal
	case x.op == opImmediate || x.op == opImmediateSE:
		if x.left != immediateLen || !x.last {
			return termUnspecified
		}
	case uint64(have)+uint64(x.left) > uint64(len(buf)):
		return termTooLong
	}
	x.dst = buf[have:]
	return 0
}

func (q *qp) beginReadRequest(h fpduHeader) termCode {
	x := &q.rx
	x.dst, x.control = x.ctl[:], true
	switch {
	case x.untagged.open:
		return termDDPFatal
	case h.mo() != 0:
		return termMO
	case x.left != readRequestLen || !x.last:
		return termUnspecified
	case q.serveTail-q.serveHead >= uint64(len(q.serves)):
		return termStream
	}
	return 0
}

func (q *qp) beginWrite(h fpduHeader) termCode {
	x := &q.rx
	if x.left == 0 {
		return 0
	}
	if x.tagged.open && x.tagged.length > 0 {
		switch {
		case x.tagged.stag != h.stag():
			return termSTag
		case x.tagged.next != h.to(), uint64(x.tagged.length)+uint64(x.left) > math.MaxUint32:
			return termBounds
		}
	}
	r, found := q.Domain.Reach(h.stag(), verbs.AccessRemoteWrite)
	switch {
	case found == softverbs.KeyForeign:
		return termSTagStream
	case found != softverbs.KeyOK:
		return termSTag
	case h.to()+uint64(x.left) < h.to():
		return termWrap
	}
	if x.dst = r.Span(h.to(), uint64(x.left)); x.dst == nil {
		return termBounds
	}
	x.region = r
	return 0
}

func (q *qp) beginReadResponse(h fpduHeader) termCode {
	x := &q.rx
	if q.readHead == q.readTail {
		return termDDPFatal
	}
	r := &q.reads[q.readHead%uint64(len(q.reads))]
	rest := r.length - r.got
	switch {
	case x.left > 0 && h.stag() != r.stag:
		return termSTag
	case x.left > 0 && h.to() != r.to+uint64(r.got):
		return termBounds
	case uint64(x.left) > uint64(rest) || x.last && uint64(x.left) != uint64(rest):
		return termBounds
	}
	return 0 // nextPiece finds the place
}

// readSource returns the n bytes that a READ of the peer asks for, or the rule that
// it breaks.
func (q *qp) readSource(stag uint32, to, n uint64) ([]byte, termCode) {
	r, found := q.Domain.Reach(stag, verbs.AccessRemoteRead)
	switch {
	case found == softverbs.KeyForeign:
		return nil, termReadPD
	case found == softverbs.KeyDenied:
		return nil, termReadAccess
	case found != softverbs.KeyOK:
		return nil, termReadSTag
	case to+n < to:
		return nil, termReadWrap
	}
	b := r.Span(to, n)
	if b == nil {
		return nil, termReadBounds
	}
	return b, 0
}

// deliverSegment ends a segment that was checked. It returns the number of completions.
func (q *qp) deliverSegment(wcs []verbs.WC) int {
	x := &q.rx
	h := fpduHeader(x.head[:])
	switch x.op {
	case opWrite:
		q.deliverWrite(h)
	case opReadResponse:
		q.deliverReadResponse(h)
	case opReadRequest:
		q.deliverReadRequest()
	case opTerminate:
		x.msn[queueTerminate]++
		c, ok := parseTerminate(x.ctl[:h.payload()])
		if !ok {
			c = termUnspecified
		}
		q.onTerminate(c)
	default:
		return q.deliverSend(h, wcs)
	}
	return 0
}

func (q *qp) deliverWrite(h fpduHeader) {
	x := &q.rx
	m := &x.tagged
	if !m.open {
		*m = taggedMessage{open: true, op: opWrite}
	}
	m.stag = h.stag()
	m.length += uint32(h.payload())
	m.next = h.to() + uint64(h.payload())
	if x.last {
		m.open = false
		x.lastWrite = m.length
	}
}

func (q *qp) deliverReadResponse(h fpduHeader) {
	x := &q.rx
	r := &q.reads[q.readHead%uint64(len(q.reads))]
	r.got += uint32(h.payload())
	x.tagged.open, x.tagged.op = !x.last, opReadResponse
	if !x.last {
		return
	}
	q.SQ.At(r.entry).Done = true
	q.readHead++
	q.cq.activate(q)
}

// deliverReadRequest queues the response; tx.go sends it.
func (q *qp) deliverReadRequest() {
	x := &q.rx
	x.msn[queueRead]++
	r := readRequest(x.ctl[:readRequestLen])
	if r.size() > 0 {
		if _, c := q.readSource(r.sourceSTag(), r.sourceTO(), uint64(r.size())); c != 0 {
			q.tx.off.setHeader(x.head[:])
			q.tx.off.hasRead = true
			copy(q.tx.off.read[:], r)
			q.terminate(c)
			return
		}
	}
	copy(q.serves[q.serveTail%uint64(len(q.serves))].request[:], r)
	q.serveTail++
	q.cq.activate(q)
}

// deliverSend ends a segment of a message that takes a receive. It returns the
// number of completions.
func (q *qp) deliverSend(h fpduHeader, wcs []verbs.WC) int {
	x := &q.rx
	m := &x.untagged
	if !m.open {
		*m = untaggedMessage{open: true, op: x.op}
	}
	m.length += uint32(h.payload())
	if !x.last {
		return 0
	}
	m.open = false
	x.msn[queueSend]++
	wc := &wcs[0]
	*wc = verbs.WC{ID: q.RQ.Take(), QP: q.Context, Op: verbs.OpRecv, ByteLen: m.length}
	switch {
	case x.op == opImmediate || x.op == opImmediateSE:
		wc.Op, wc.HasImm, wc.Imm, wc.ByteLen = verbs.OpRecvImm, true, binary.BigEndian.Uint32(x.ctl[:]), x.lastWrite
	case x.op == opSendImm:
		wc.HasImm, wc.Imm = true, h.slot()
	case x.op.invalidatesKey():
		q.onInvalidated(wc, h.slot())
	}
	x.lastWrite = 0
	return 1
}

// onInvalidated invalidates the key that a Send with Invalidate names.
func (q *qp) onInvalidated(wc *verbs.WC, stag uint32) {
	c := termInvSTag
	switch q.Domain.Invalidate(stag) {
	case softverbs.KeyOK:
		wc.HasInv, wc.InvKey = true, stag
		return
	case softverbs.KeyForeign:
		c = termInvPD
	}
	wc.Status = verbs.StatusRemoteInvalid
	wc.VendorCode = uint32(c)
	q.tx.off.setHeader(q.rx.head[:])
	q.terminateFor(c, verbs.StatusFatal, fmt.Errorf("peer invalidates key %#x: %s", stag, c))
}
