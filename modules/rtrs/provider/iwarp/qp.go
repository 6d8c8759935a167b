package iwarp

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// qp implements verbs.QP: one connection. Its fields belong to the owner of the
// completion queue once the phase is Up, and to the creator before.
type qp struct {
	softverbs.QP
	dev *Device
	cq  *compQueue

	fd    int // -1: none
	terms connTerms

	// Of the send queue: the requests before built have become segments, those
	// before done have finished.
	built, done uint64

	reads                []readEntry // outstanding RDMA READs, oldest first
	readHead, readTail   uint64
	serves               []serveEntry // reads to answer, oldest first
	serveHead, serveTail uint64

	tx  transmitHalf
	rx  receiveHalf
	tls *tlsState // nil: plain. Set before the phase is Up

	readable bool // the socket may have something
	more     bool // a parsed segment waits for room among the completions of the caller
	hangup   bool // epoll has reported the end of the peer: read until it comes
	quiet    int  // polls since something was received or posted

	rnrSince int64 // a message waits for a receive since; 0: none
	pokeStep int
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
	q := &qp{dev: d, cq: queue, fd: -1}
	q.Init(dom, &cfg, firstSends)
	return q, nil
}

// limits are those of a queue pair.
var limits = softverbs.Limits{QueueDepth: maxQPWR, Elements: maxSGE}

// firstSends is the number of requests that a send queue has memory for at
// first.
const firstSends = 64

// PostSend implements verbs.QP.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	if !q.Is(softverbs.Up) {
		return 0, softverbs.ErrPostUnconnected
	}
	q.quiet = 0
	if len(wrs) == 1 && q.tryInvalidate(&wrs[0]) {
		return 1, nil
	}
	n, err := q.Post(wrs, q.oldestRequest())
	q.cq.activate(q)
	return n, err
}

// tryInvalidate executes wr at once if it is a LOCAL_INV without a completion and no
// request is before it: it needs no place in the queue. It reports whether it did.
func (q *qp) tryInvalidate(wr *verbs.SendWR) bool {
	return wr.Op == verbs.OpLocalInv && !wr.Signaled && q.built == q.SQ.Tail && q.Domain.Invalidate(wr.RKey) == softverbs.KeyOK
}

// opcodes returns the set of opcodes that the connection carries.
func (t *connTerms) opcodes() (ops uint16) {
	ops = 1<<verbs.OpSend | 1<<verbs.OpSendInv | 1<<verbs.OpWrite | 1<<verbs.OpLocalInv | 1<<verbs.OpRegMR
	if t.ord > 0 {
		ops |= 1 << verbs.OpRead
	}
	if t.features&featureSendImm != 0 {
		ops |= 1 << verbs.OpSendImm
	}
	if t.features&featureImmediate != 0 {
		ops |= 1 << verbs.OpWriteImm
	}
	return ops
}

// PostRecv implements verbs.QP.
func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	n, err := q.QP.PostRecv(wrs)
	if q.rnrSince != 0 { // only the owner sees this: a message waits
		q.cq.activate(q)
	}
	return n, err
}

// isFinished reports whether e is finished.
func (q *qp) isFinished(e *softverbs.Send) bool {
	return e.Done || e.Op != verbs.OpRead && e.End <= q.tx.accepted
}

// oldestRequest returns the position of the oldest request that is not finished.
func (q *qp) oldestRequest() uint64 {
	for q.done < q.built && q.isFinished(q.SQ.At(q.done)) {
		q.done++
	}
	return q.done
}
