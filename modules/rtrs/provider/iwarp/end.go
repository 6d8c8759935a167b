package iwarp

import (
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// How a connection ends, whatever the cause: the phase becomes Down, the owner
// of the completion queue closes the socket, every outstanding work request
// completes once, and OpDisconnected comes last.

// errTerminated is the cause if the peer has sent a Terminate.
var errTerminated = errors.New("terminated by the peer")

// errRevoked is the cause if a region was closed that work names.
var errRevoked = errors.New("memory of posted work was deregistered")

// usesRegion reports whether unfinished work uses the memory of r. r is closed. A
// Write of the peer into it does not count: its next byte is refused.
func (q *qp) usesRegion(r *softverbs.Region) bool {
	return q.tx.sendsRegion(r) || q.anyElement(func(lkey uint32, _ []byte) bool { return lkey == r.LKey() })
}

// inPlace reports whether the regions of all work are still registered.
func (q *qp) inPlace() bool {
	return !q.anyElement(func(lkey uint32, buf []byte) bool { return !q.Domain.Holds(lkey, buf) })
}

// anyElement reports whether match holds for an element of a request that is
// not finished.
func (q *qp) anyElement(match func(lkey uint32, buf []byte) bool) bool {
	for at := q.SQ.Head; at != q.SQ.Tail; at++ {
		if at < q.built && q.isFinished(q.SQ.At(at)) {
			continue
		}
		for _, s := range q.SQ.Elements(at) {
			if len(s.Buf) > 0 && match(s.LKey, s.Buf) {
				return true
			}
		}
	}
	return q.RQ.Any(func(wr *verbs.RecvWR) bool { return len(wr.Buf) > 0 && match(wr.LKey, wr.Buf) })
}

// sendsRegion reports whether the list has bytes of r as the response to a READ.
func (t *transmitHalf) sendsRegion(r *softverbs.Region) bool {
	for i := t.at; t.served && i < t.n; i++ {
		if r.Span(t.v.entryAddr(i), 1) != nil {
			return true
		}
	}
	return false
}

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
	}
}

// terminate ends the connection because the peer has broken a rule. A Terminate
// says so, behind the segment that is being sent.
func (q *qp) terminate(c termCode) {
	status := verbs.StatusFatal
	if c == termNoBuffer {
		status = verbs.StatusRetryExceeded
	}
	if c == termTooLong {
		q.RQ.Status = verbs.StatusLocalLength
	}
	q.terminateFor(c, status, fmt.Errorf("peer broke the protocol: %s", c))
}

// terminateFor queues a Terminate. It sends nothing itself, since it may be
// called while a list is built.
func (q *qp) terminateFor(c termCode, status verbs.Status, cause error) {
	if q.End.State != softverbs.EndNone {
		return
	}
	q.End = softverbs.End{State: softverbs.EndNotified, Status: status, Code: uint32(c), Cause: cause}
	q.Set(softverbs.Down)
	q.logEnd()
	q.stopWaiting()
	q.setDeadline(q.cq.Now() + int64(terminateLimit))
	q.tx.term = true
	q.cq.activate(q)
}

// hangUp ends the connection without a Terminate.
func (q *qp) hangUp(status verbs.Status, cause error) {
	if q.End.State >= softverbs.EndFlushing {
		return
	}
	if q.End.State == softverbs.EndNone {
		q.End = softverbs.End{Status: status, Cause: cause, Code: q.End.Code}
		q.logEnd()
	}
	q.Set(softverbs.Down)
	q.End.State = softverbs.EndFlushing
	q.stopWaiting()
	q.setDeadline(0)
	q.closeSocket()
	q.cq.activate(q)
}

// onDisconnect ends the connection after Disconnect. Nothing more is sent, neither
// posted requests nor the rest of a list: the caller of Disconnect may have
// sent the same on another connection, and newer data after it. Received bytes
// are read and dropped: closing a socket with unread data resets the
// connection, and the peer would take that for a failure.
func (q *qp) onDisconnect() {
	if q.End.State != softverbs.EndNone {
		return
	}
	for range 16 {
		q.rx.v.setEntry(0, q.rx.stage)
		if n, _ := q.rx.v.recv(q.fd, 1); n <= 0 || n < len(q.rx.stage) {
			break
		}
		q.rx.widenStaging()
	}
	q.hangUp(verbs.StatusOK, nil)
}

// endDestroyed ends a connection if its queue pair was destroyed before
// OpDisconnected. It returns no completions.
func (q *qp) endDestroyed() {
	q.hangUp(verbs.StatusOK, nil)
	q.End.State = softverbs.EndDone
	q.cq.detachConn(q)
}

// peerGone ends the connection after a FIN (cause io.EOF) or a socket error.
// A FIN inside a message is a failure.
func (q *qp) peerGone(cause error) {
	status := verbs.StatusOK
	if q.tx.dead && q.tx.errno != unix.EPIPE && cause == io.EOF {
		cause = q.tx.errno // a socket returns its error once, and send has had it
	}
	switch {
	case cause != io.EOF:
		status = verbs.StatusFatal
		if cause == unix.ETIMEDOUT {
			status = verbs.StatusRetryExceeded
			q.cq.stats.silent.Add(1)
		}
		cause = fmt.Errorf("connection lost: %w", cause)
	case q.rx.midMessage() || q.readHead != q.readTail:
		status = verbs.StatusFatal
		cause = fmt.Errorf("peer closed inside a message: %w", io.ErrUnexpectedEOF)
	default:
		cause = nil
	}
	q.hangUp(status, cause)
}

// onTerminate handles a Terminate of the peer.
func (q *qp) onTerminate(c termCode) {
	q.End.Code = uint32(c)
	status := verbs.StatusFatal
	switch {
	case c.layer() == 0 && c.etype() == 1, c.layer() == 1 && c.etype() == 1:
		status = verbs.StatusRemoteAccess
	case c.layer() == 0 && c.etype() == 2:
		status = verbs.StatusRemoteInvalid
	case c == termNoBuffer:
		status = verbs.StatusRetryExceeded
	}
	if q.readHead != q.readTail && status != verbs.StatusFatal {
		// A READ waits for its response: most likely the Terminate is about it.
		r := &q.reads[q.readHead%uint64(len(q.reads))]
		q.SQ.At(r.entry).Status = status
	}
	q.hangUp(status, fmt.Errorf("%w: %s", errTerminated, c))
}

func (q *qp) logEnd() {
	log, level := q.dev.cfg.Logger, "closed"
	if q.End.Status != verbs.StatusOK {
		level = "failed"
	}
	if q.End.Cause != nil {
		log = log.With("cause", q.End.Cause)
	}
	log.Info("iwarp connection "+level, "local", q.LocalAddr(), "remote", q.RemoteAddr())
}

// closeSocket sends a FIN and closes the descriptor.
func (q *qp) closeSocket() {
	if q.fd < 0 {
		return
	}
	q.sendAlert()
	q.cq.Unwatch(q.fd)
	unix.Shutdown(q.fd, unix.SHUT_WR) // a child process that was just forked may have a copy
	unix.Close(q.fd)
	q.fd = -1
}

// flushRequests returns the outstanding requests, then OpDisconnected.
func (q *qp) flushRequests(wcs []verbs.WC) int {
	n, last := q.Flush(wcs, q.oldestRequest())
	if last {
		q.cq.detachConn(q)
	}
	return n
}
