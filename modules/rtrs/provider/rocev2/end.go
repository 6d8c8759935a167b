package rocev2

import (
	"errors"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// How a connection ends. Whatever the cause: the phase goes down, the peer is
// told by a DREQ unless it was the first to say so, every outstanding work
// request is returned once, OpDisconnected comes last.

// ending is how a connection ends.
type ending struct {
	state  endState
	status verbs.Status
	cause  error
}

type endState uint8

const (
	endNone     endState = iota
	endFlushing          // nothing is sent or taken any more, completions are flushed
	endDone              // OpDisconnected was returned
)

// Disconnect implements verbs.QP.
func (q *qp) Disconnect() {
	if !q.disconnect.Swap(true) && !q.is(phaseIdle) {
		q.cq.submit(q)
	}
}

// Destroy implements verbs.QP.
func (q *qp) Destroy() {
	q.destroyed.Store(true)
	if q.move(phaseIdle, phaseDown) || q.move(phaseConnecting, phaseDown) {
		q.cq.giveNumber(q)
		return
	}
	q.cq.submit(q)
}

// asked does what other goroutines asked of an attached connection.
func (q *qp) asked() {
	if q.confirmed.Load() && q.req.hold {
		q.release()
	}
	switch {
	case q.destroyed.Load():
		q.hangUp(verbs.StatusOK, nil)
		q.end.state = endDone
		q.cq.detach(q)
	case q.disconnect.Load():
		q.hangUp(verbs.StatusOK, nil)
	case q.peerGone.Load() != 0:
		q.cq.activate(q) // it ends when what arrived before was looked at
	}
}

// hear notes a packet of the peer: it is connected.
func (q *qp) hear() {
	if q.conn.heard.Load() {
		return
	}
	q.conn.heard.Store(true)
	if q.req.hold {
		q.release()
	}
}

// release lets the passive side send.
func (q *qp) release() {
	q.req.hold = false
	q.cq.activate(q)
}

// gone is why a peer is no longer there.
type gone uint32

const (
	peerLeft  gone = iota + 1 // it disconnected
	peerLost                  // it never confirmed the connection
	peerStale                 // it does not know the connection any more
)

// peerEnded ends the connection because the peer has.
func (q *qp) peerEnded() {
	switch gone(q.peerGone.Load()) {
	case peerLost:
		q.hangUp(verbs.StatusFatal, errors.New("peer never confirmed the connection"))
	case peerStale:
		q.hangUp(verbs.StatusFatal, errors.New("peer does not know the connection"))
	default:
		q.hangUp(verbs.StatusOK, nil)
	}
}

// sayLast sends what the responder has to say before the connection ends.
func (q *qp) sayLast() {
	q.respond()
	q.out.flush()
}

// hangUp ends the connection. Nothing of it is sent any more, neither what was
// posted nor what waits for room in the socket: whoever gave the connection up
// may have sent the same another way, and newer data after it.
func (q *qp) hangUp(status verbs.Status, cause error) {
	if q.end.state != endNone {
		return
	}
	q.out.forget(q)
	q.end = ending{endFlushing, status, cause}
	q.phase.Store(uint32(phaseDown))
	q.setDeadline(0)
	q.dev.cm.leave(q.conn, q.suspectMTU())
	q.cq.activate(q)
	how := "closed"
	if status != verbs.StatusOK {
		how = "failed"
	}
	q.dev.cfg.Logger.Info("rocev2 connection "+how, "local", q.LocalAddr(), "remote", q.RemoteAddr(), "qpn", q.qpn, "cause", cause)
}

// flush returns what is outstanding, then OpDisconnected.
func (q *qp) flush(wcs []verbs.WC) int {
	n := q.reap(wcs)
	if q.reapable() {
		return n
	}
	for ; n < len(wcs) && q.sqHead < q.sqTail; n++ {
		e := &q.sq[q.sqHead&q.sqMask]
		wcs[n] = verbs.WC{ID: e.id, QP: q.context, Op: e.op, Status: flushed(e.status)}
		q.sqHead++
	}
	for ; n < len(wcs) && q.rqHead < q.rqTail; n++ {
		wcs[n] = verbs.WC{ID: q.rq[q.rqHead&q.rqMask].id, QP: q.context, Op: verbs.OpRecv, Status: flushed(q.recvStatus)}
		q.recvStatus = verbs.StatusOK
		q.rqHead++
	}
	if n < len(wcs) && q.end.state == endFlushing {
		wcs[n] = verbs.WC{QP: q.context, Op: verbs.OpDisconnected, Status: q.end.status}
		n++
		q.end.state = endDone
		q.cq.detach(q)
	}
	return n
}

// flushed is the status of a request that will not be executed: its own, or
// none in particular.
func flushed(s verbs.Status) verbs.Status {
	if s == verbs.StatusOK {
		return verbs.StatusFlushed
	}
	return s
}
