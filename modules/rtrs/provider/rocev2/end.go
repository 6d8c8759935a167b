package rocev2

import (
	"errors"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// How a connection ends, whatever the cause: the phase becomes Down, the peer
// gets a DREQ unless it has ended the connection, every outstanding work request
// completes once, and OpDisconnected comes last.

// Disconnect implements verbs.QP.
func (q *qp) Disconnect() {
	if q.AskDisconnect() {
		q.cq.Submit(q)
	}
}

// Destroy implements verbs.QP.
func (q *qp) Destroy() {
	if q.AskDestroy() {
		q.cq.Submit(q)
	} else {
		q.cq.giveNumber(q)
	}
}

// runControl handles the requests of other goroutines. The connection is attached.
func (q *qp) runControl() {
	if q.confirmed.Load() && q.req.hold {
		q.allowSending()
	}
	switch {
	case q.Destroyed():
		q.hangUp(verbs.StatusOK, nil)
		q.End.State = softverbs.EndDone
		q.cq.detachConn(q)
	case q.Disconnecting():
		q.hangUp(verbs.StatusOK, nil)
	case q.peerGone.Load() != 0:
		q.cq.activate(q) // it ends once the packets that arrived before were taken
	}
}

// notePeerAlive notes that a packet of the peer has come, so the peer is connected.
func (q *qp) notePeerAlive() {
	if q.conn.heard.Load() {
		return
	}
	q.conn.heard.Store(true)
	if c := q.conn; c.succeeds.Load() {
		go c.m.heardFirst(c) // the lock of the manager comes before those of queues
	}
	if q.req.hold {
		q.allowSending()
	}
}

// heardFirst handles the first data packet of a connection that succeeds another one.
func (m *connManager) heardFirst(c *cmConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.endPredecessor(c)
}

// allowSending allows the passive side to send.
func (q *qp) allowSending() {
	q.req.hold = false
	q.cq.activate(q)
}

// endReason is the reason why a peer has ended a connection.
type endReason uint32

const (
	peerLeft  endReason = iota + 1 // it disconnected
	peerLost                       // it never confirmed the connection
	peerStale                      // the peer has lost the connection's state
)

// peerEnded ends the connection because the peer has ended it.
func (q *qp) peerEnded() {
	switch endReason(q.peerGone.Load()) {
	case peerLost:
		q.hangUp(verbs.StatusFatal, errors.New("peer never confirmed the connection"))
	case peerStale:
		q.hangUp(verbs.StatusFatal, errors.New("peer does not know the connection"))
	default:
		q.hangUp(verbs.StatusOK, nil)
	}
}

// sayLast sends the last answers of the responder.
func (q *qp) sayLast() {
	q.sendAnswers()
	q.out.flushPackets()
}

// hangUp ends the connection. Nothing more is sent, neither posted requests nor
// packets that wait for room in the socket: the caller of Disconnect may have
// sent the same on another connection, and newer data after it.
func (q *qp) hangUp(status verbs.Status, cause error) {
	if q.End.State != softverbs.EndNone {
		return
	}
	q.out.removeQP(q)
	q.End = softverbs.End{State: softverbs.EndFlushing, Status: status, Cause: cause}
	q.Set(softverbs.Down)
	q.setDeadline(0)
	q.dev.cm.sendDisconnect(q.conn, q.suspectMTU())
	q.cq.activate(q)
	how := "closed"
	if status != verbs.StatusOK {
		how = "failed"
	}
	log := q.dev.cfg.Logger
	if cause != nil {
		log = log.With("cause", cause)
	}
	log.Info("rocev2 connection "+how, "local", q.LocalAddr(), "remote", q.RemoteAddr(), "qpn", q.qpn)
}

// flushRequests returns the outstanding requests, then OpDisconnected.
func (q *qp) flushRequests(wcs []verbs.WC) int {
	n, last := q.Flush(wcs, q.req.una.at)
	if last {
		q.cq.detachConn(q)
	}
	return n
}
