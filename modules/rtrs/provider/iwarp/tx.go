package iwarp

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. Sending. Work requests become segments, segments become entries of
// one scatter/gather list, and one sendmsg or sendto takes the list. Entries that the
// socket does not take stay in the list. It is filled again only when it is
// empty. A request meets, in this order:
//
//	wants          reports whether there is something to send
//	transmit       builds a list and passes it to the socket
//	build          fills the list
//	nextMessage    chooses the next message: startServe, startEntry
//	buildSegment   cuts it into segments: segment.go
//	accept         the socket has taken bytes; qp.go finds finished requests

const (
	batchVecs  = 512       // entries of a list
	batchBytes = 512 << 10 // payload of a list: checksummed bytes are still in the cache when they are sent
	batchHead  = 16 << 10  // headers, pads and CRCs of a list
	batchRuns  = 8         // lists per call, so that one connection cannot keep the queue

	// inlineMax is the size in bytes up to which an element of a message is copied
	// between the headers: an entry of a list costs the kernel more than these bytes.
	// A message of RTRS has that size. Of a disk's payload it is what is left for the
	// last segment at most.
	inlineMax = 128

	// segmentHead is the most that one segment takes of batchHead, without such elements.
	segmentHead = fpduUntagged + maxTerminateLen + 3 + crcLen
)

// transmitHalf is the sending half of a connection.
type transmitHalf struct {
	v        iovecList
	at, n    int    // entries at..n of v wait for the socket
	head     []byte // headers of the list
	headUsed int
	headVec  bool // the last entry is of head, its neighbour extends it
	served   bool // responses to READs are in the list

	queued   uint64     // stream position behind the list
	accepted uint64     // stream position that the socket has taken
	blocked  bool       // the socket is full
	dead     bool       // the socket failed; received bytes may still be read
	errno    unix.Errno // of the failure

	hold      bool // responder: nothing is sent before the first FPDU of the peer
	opening   bool // an empty Write comes first
	poke      bool
	term      bool // send a Terminate and no more
	termBuilt bool

	// The message in progress.
	cur       cutMessage
	msn       [2]uint32 // next MSN of the send and the read queue
	lastWrite bool      // the previous message was a Write
	sink      uint32    // last STag given to a READ of this end

	maxTagged, maxUntagged int // payload of a segment
	crc                    bool
	off                    faultySegment // quoted by a Terminate
}

// cutMessage is the one being cut into segments. Messages are never interleaved.
type cutMessage struct {
	op      opcode
	active  bool
	serve   bool // Read Response: payload from the region, not from elements
	imm     bool // an Immediate Data follows the Write
	stag    uint32
	to      uint64
	length  uint32
	off     uint32
	entry   uint64 // position in the send queue; its elements are the payload
	at      softverbs.Cursor
	msn     uint32
	immData uint32
}

// readEntry is an RDMA READ that this end issued and that waits for its
// response. Its sink has an STag of its own, with tagged offsets from 0.
type readEntry struct {
	entry  uint64 // position in the send queue
	stag   uint32
	to     uint64 // of the first byte
	length uint32
	got    uint32
	at     softverbs.Cursor // where got stands in the elements
}

const noEntry = ^uint64(0) // not of the send queue

// serveEntry is an RDMA READ of the peer that waits for its response.
type serveEntry struct {
	request [readRequestLen]byte
}

func (t *transmitHalf) init(mulpdu int, tm *connTerms) {
	t.v = newVec(batchVecs)
	t.head = make([]byte, batchHead)
	t.msn = [2]uint32{1, 1}
	t.maxTagged, t.maxUntagged = segmentPayload(mulpdu)
	t.crc = tm.crc
	t.hold = !tm.initiator
	t.opening = tm.opening
}

// segmentPayload returns the payload of a full segment in bytes. It is the same
// for both kinds and a multiple of 4, of 64 if the segment is long.
func segmentPayload(mulpdu int) (tagged, untagged int) {
	n := mulpdu - untaggedHeaderLen
	if n >= 4096 {
		n &^= 63
	}
	n &^= 3
	return n, n
}

// hasWork reports whether there is something to send.
func (q *qp) hasWork() bool {
	t := &q.tx
	switch {
	case t.dead || q.fd < 0:
		return false
	case t.at < t.n, q.tls != nil && q.tls.at < q.tls.n:
		return true
	case t.term:
		return q.End.State == softverbs.EndNotified
	case t.hold:
		return false
	}
	return t.cur.active || t.poke || t.opening || q.serveHead != q.serveTail || q.built != q.SQ.Tail && !q.readBlocked()
}

// readBlocked reports whether the next work request is a READ that must wait for
// the response to an earlier one.
func (q *qp) readBlocked() bool {
	return q.SQ.At(q.built).Op == verbs.OpRead && q.readTail-q.readHead >= uint64(len(q.reads))
}

// transmit sends until there is nothing left or the socket is full.
func (q *qp) transmit() {
	t := &q.tx
	if q.tls != nil {
		q.transmitRecords()
		return
	}
	for range batchRuns {
		if t.dead || q.fd < 0 {
			return
		}
		if t.at == t.n {
			t.clearList()
			q.buildList()
		}
		if t.at == t.n {
			q.onAllSent()
			return
		}
		n, errno := t.v.send(q.fd, t.at, t.n)
		if !q.sentSome(n, errno) {
			return
		}
		if errno == 0 {
			q.consumeSent(n)
		}
	}
}

// clearList makes the list empty.
func (t *transmitHalf) clearList() {
	t.at, t.n, t.headUsed, t.headVec, t.served = 0, 0, 0, false, false
}

// onAllSent ends the connection if all was sent and a Terminate was the last.
func (q *qp) onAllSent() {
	if q.tx.termBuilt && q.End.State == softverbs.EndNotified {
		q.hangUp(verbs.StatusFatal, nil)
	}
}

// sentSome judges a send call of n bytes and reports whether to go on.
func (q *qp) sentSome(n int, errno unix.Errno) bool {
	switch errno {
	case 0:
		q.tx.blocked = false
		q.cq.stats.sent.Add(uint64(n))
	case unix.EINTR:
	case unix.EAGAIN:
		q.tx.blocked = true
		return false
	default:
		q.sendFailed(errno)
		return false
	}
	return true
}

// consumeSent takes n bytes off the list.
func (q *qp) consumeSent(n int) {
	t := &q.tx
	t.accepted += uint64(n)
	for n > 0 {
		if l := int(t.v.iov[t.at].Len); n >= l {
			n -= l
			t.at++
		} else {
			t.v.dropFront(t.at, n)
			n = 0
		}
	}
}

// sendFailed stops sending. Bytes that the peer sent before are still read:
// there may be a Terminate with the reason.
func (q *qp) sendFailed(errno unix.Errno) {
	q.tx.dead, q.tx.errno = true, errno
	if q.End.State == softverbs.EndNotified {
		q.hangUp(verbs.StatusFatal, fmt.Errorf("send: %w", errno))
		return
	}
	q.readable, q.hangup = true, true
	if q.rnrSince != 0 {
		q.waitLess()
	}
	q.cq.activate(q)
}

// buildList fills the list.
func (q *qp) buildList() {
	t := &q.tx
	limit := t.queued + batchBytes
	for t.hasRoom() && t.queued < limit && !t.termBuilt {
		switch {
		case t.term:
			q.buildTerminate()
		case t.hold:
			return
		case t.cur.active:
			q.buildSegment()
		case !q.nextMessage():
			return
		}
	}
}

func (t *transmitHalf) hasRoom() bool {
	return t.n+maxSGE+2 <= batchVecs && t.headUsed+segmentHead <= batchHead
}

// nextMessage starts the next message and reports whether there is one. The
// opening comes first, then responses to READs, then the send queue.
func (q *qp) nextMessage() bool {
	t := &q.tx
	switch {
	case t.opening, t.poke:
		t.opening, t.poke = false, false
		t.cur = cutMessage{op: opWrite, active: true, stag: emptySTag, entry: noEntry}
	case q.serveHead != q.serveTail:
		q.startServe()
	case q.built != q.SQ.Tail && !q.readBlocked():
		q.startEntry()
	default:
		return false
	}
	return true
}

// emptySTag is the STag of empty Writes. No receiver checks it. siw sends 1,
// too.
const emptySTag = 1

// startServe begins the response to the oldest READ of the peer.
func (q *qp) startServe() {
	r := readRequest(q.serves[q.serveHead%uint64(len(q.serves))].request[:])
	q.tx.cur = cutMessage{op: opReadResponse, active: true, serve: true, stag: r.sinkSTag(), to: r.sinkTO(), length: r.size(), entry: noEntry}
}

// startEntry begins the next work request of the send queue. Local work is done
// here, in order with the requests around it.
func (q *qp) startEntry() {
	t := &q.tx
	at := q.built
	e := q.SQ.At(at)
	switch e.Op {
	case verbs.OpLocalInv, verbs.OpRegMR:
		q.localWork(e)
		q.built++
		return
	case verbs.OpRead:
		q.startRead(e, at)
		return
	case verbs.OpWriteImm:
		if e.Length == 0 && !t.lastWrite {
			// The Immediate is enough. After another Write an empty Write is
			// needed, or the peer would report the length of the other one.
			q.emitImmediate(e.Imm)
			q.finishEntry(e)
			return
		}
	}
	m := &t.cur // field by field, as in SendQueue.Post
	*m = cutMessage{}
	m.active, m.entry, m.length = true, at, e.Length
	switch e.Op {
	case verbs.OpWrite, verbs.OpWriteImm:
		m.op, m.stag, m.to = opWrite, e.Key, e.Addr
		m.imm, m.immData = e.Op == verbs.OpWriteImm, e.Imm
	case verbs.OpSendInv:
		m.op, m.stag = opSendInv, e.Key
	case verbs.OpSendImm:
		m.op, m.stag = opSendImm, e.Imm
	default:
		m.op = opSend
	}
	if !m.op.tagged() {
		m.msn = t.msn[queueSend]
		t.msn[queueSend]++
	}
}

// finishEntry notes that the request at built has become segments.
func (q *qp) finishEntry(e *softverbs.Send) {
	e.End = q.tx.queued
	q.built++
}

// localWork executes OpLocalInv and OpRegMR. A failure ends the connection, as
// every failure in the send queue does.
func (q *qp) localWork(e *softverbs.Send) {
	res := q.Domain.Rotate(e.Op, e.Key)
	e.End = q.tx.queued
	if res != softverbs.KeyOK {
		e.Status, e.Done = verbs.StatusLocalProt, true
		q.terminateFor(termLocal, verbs.StatusLocalProt, fmt.Errorf("key %#x cannot be changed: %s", e.Key, res))
	}
}

// startRead sends a Read Request. The STag of its sink names the elements of
// the request. Read Responses of this connection alone are compared with it.
func (q *qp) startRead(e *softverbs.Send, at uint64) {
	t := &q.tx
	t.sink += 1 << 8
	q.reads[q.readTail%uint64(len(q.reads))] = readEntry{entry: at, stag: t.sink, length: e.Length}
	q.readTail++
	q.emitReadRequest(t.sink, e.Length, e.Key, e.Addr)
	q.finishEntry(e)
}
