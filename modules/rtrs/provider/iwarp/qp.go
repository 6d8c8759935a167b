package iwarp

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
// idle and connecting go to down only by Destroy.
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

	phase      atomic.Uint32            // any goroutine
	local      atomic.Pointer[addrPair] // any goroutine
	disconnect atomic.Bool              // any goroutine: wanted
	destroyed  atomic.Bool              // any goroutine
	queued     bool                     // is in cq.pending; guarded by cq.mu

	fd       int // -1: none
	slot     int // in cq.slots
	attached bool
	listed   bool // is in cq.active
	terms    terms

	// Send queue: entries head..built are on their way or done, built..tail
	// wait for tx. The ring has room for a few at first and grows with use.
	sq                      []sendEntry
	sges                    []verbs.SGE // maxSGE for each entry
	sqMask                  uint64
	sqHead, sqBuilt, sqTail uint64
	sqDepth                 uint64

	// Receive queue.
	rq             []recvEntry
	rqMask         uint64
	rqHead, rqTail uint64
	rqDepth        uint64
	recvStatus     verbs.Status // of the receive at the head when the connection ends

	reads                []readEntry // outstanding RDMA READs, oldest first
	readHead, readTail   uint64
	serves               []serveEntry // reads to answer, oldest first
	serveHead, serveTail uint64

	tx transmitter
	rx receiver

	readable bool // the socket may have something
	more     bool // parsed segments wait for room in the caller's completions
	hangup   bool // the peer's end was seen by epoll: read until it shows
	quiet    int  // polls since something was received or posted

	end      ending
	rnrSince int64 // a message waits for a receive since; 0: none
	deadline int64 // monotonic ns, 0: none
	pokeStep int
}

// sendEntry is a work request in the send queue.
type sendEntry struct {
	id       uint64
	addr     uint64
	end      uint64 // stream position behind its last byte, once built
	key      uint32
	imm      uint32
	length   uint32
	op       verbs.Opcode
	status   verbs.Status
	nsge     uint8
	signaled bool
	done     bool // reads and local work: finished
}

type recvEntry struct {
	id   uint64
	buf  []byte
	lkey uint32
}

type addrPair struct{ local, remote netip.AddrPort }

// ending is how a connection ends.
type ending struct {
	state  endState
	status verbs.Status
	code   termCode
	cause  error
}

type endState uint8

const (
	endNone        endState = iota
	endTerminating          // our Terminate waits for the socket
	endFlushing             // the socket is closed, completions are flushed
	endDone                 // OpDisconnected was returned
)

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
	q := &qp{dev: d, pd: dom, cq: queue, context: cfg.Context, fd: -1, maxSGE: max(cfg.MaxSGE, 1)}
	q.sqDepth, q.rqDepth = uint64(max(cfg.SendQueue, 1)), uint64(max(cfg.RecvQueue, 1))
	q.sq = make([]sendEntry, min(ringSize(q.sqDepth), firstRing))
	q.rq = make([]recvEntry, ringSize(q.rqDepth))
	q.sqMask, q.rqMask = uint64(len(q.sq)-1), uint64(len(q.rq)-1)
	q.sges = make([]verbs.SGE, len(q.sq)*q.maxSGE)
	return q, nil
}

// firstRing is the room of a send queue that has not had more in it yet.
const firstRing = 64

// growSend doubles the ring of the send queue.
func (q *qp) growSend() {
	old, sges, mask := q.sq, q.sges, q.sqMask
	q.sq = make([]sendEntry, 2*len(old))
	q.sges = make([]verbs.SGE, 2*len(sges))
	q.sqMask = uint64(len(q.sq) - 1)
	for at := q.sqHead; at != q.sqTail; at++ {
		from := at & mask
		q.sq[at&q.sqMask] = old[from]
		copy(q.entrySGEs(at&q.sqMask), sges[int(from)*q.maxSGE:])
	}
}

// ringSize is the power of two that holds n.
func ringSize(n uint64) uint64 { return 1 << bits.Len64(n-1) }

func (q *qp) is(p phase) bool { return phase(q.phase.Load()) == p }

// move changes the phase if it is from. Any goroutine.
func (q *qp) move(from, to phase) bool { return q.phase.CompareAndSwap(uint32(from), uint32(to)) }

// PostSend implements verbs.QP.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	if !q.is(phaseUp) {
		return 0, fmt.Errorf("post send: %w", verbs.ErrNotConnected)
	}
	q.quiet = 0
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
	errPostFull   = fmt.Errorf("post send: %w", verbs.ErrQueueFull)
	errPostAccess = fmt.Errorf("post send: %w", verbs.ErrAccess)
	errPostSGEs   = errors.New("post send: too many elements")
	errPostLength = errors.New("post send: 4 GiB or more")
)

func (q *qp) post(wr *verbs.SendWR) error {
	if q.sqTail-q.sqHead >= q.sqDepth && !q.retireUnsignaled() {
		return errPostFull
	}
	if err := q.supports(wr.Op); err != nil {
		return err
	}
	if len(wr.SGEs) > q.maxSGE {
		return errPostSGEs
	}
	if q.sqTail-q.sqHead == uint64(len(q.sq)) {
		q.growSend()
	}
	slot := q.sqTail & q.sqMask
	length, err := q.takeSGEs(slot, wr.SGEs)
	if err != nil {
		return err
	}
	q.sq[slot] = sendEntry{
		id: wr.ID, op: wr.Op, signaled: wr.Signaled, nsge: uint8(len(wr.SGEs)),
		addr: wr.RemoteAddr, key: wr.RKey, imm: wr.Imm, length: length,
	}
	q.sqTail++
	return nil
}

// supports tells whether the connection carries op.
func (q *qp) supports(op verbs.Opcode) error {
	ok := false
	switch op {
	case verbs.OpSend, verbs.OpSendInv, verbs.OpWrite, verbs.OpLocalInv, verbs.OpRegMR:
		ok = true
	case verbs.OpRead:
		ok = q.terms.ord > 0
	case verbs.OpSendImm:
		ok = q.terms.features&featureSendImm != 0
	case verbs.OpWriteImm:
		ok = q.terms.features&featureImmediate != 0
	}
	if !ok {
		return fmt.Errorf("post send: opcode %d: %w", op, verbs.ErrUnsupported)
	}
	return nil
}

func (q *qp) takeSGEs(slot uint64, sges []verbs.SGE) (uint32, error) {
	own := q.entrySGEs(slot)
	var sum uint64
	for i := range sges {
		if !q.pd.Holds(sges[i].LKey, sges[i].Buf) {
			return 0, errPostAccess
		}
		own[i] = sges[i]
		sum += uint64(len(sges[i].Buf))
	}
	if sum > 1<<32-1 {
		return 0, errPostLength
	}
	return uint32(sum), nil
}

// entrySGEs is the room for the elements of a send queue slot.
func (q *qp) entrySGEs(slot uint64) []verbs.SGE {
	at := int(slot) * q.maxSGE
	return q.sges[at : at+q.maxSGE]
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
	if q.rnrSince != 0 { // only the owner sees this: a message waits
		q.cq.activate(q)
	}
	return len(wrs), nil
}

// sent tells whether e is finished.
func (q *qp) sent(e *sendEntry) bool {
	return e.done || e.op != verbs.OpRead && e.end <= q.tx.accepted
}

// retireUnsignaled frees finished entries that need no completion. It tells
// whether there is room now.
func (q *qp) retireUnsignaled() bool {
	for q.sqHead < q.sqBuilt {
		e := &q.sq[q.sqHead&q.sqMask]
		if !q.sent(e) || e.signaled || e.status != verbs.StatusOK {
			break
		}
		q.sqHead++
	}
	return q.sqTail-q.sqHead < q.sqDepth
}

// reap returns the completions of finished sends, in order.
func (q *qp) reap(wcs []verbs.WC) int {
	n := 0
	for n < len(wcs) {
		q.retireUnsignaled()
		if q.sqHead == q.sqBuilt {
			break
		}
		e := &q.sq[q.sqHead&q.sqMask]
		if !q.sent(e) {
			break
		}
		wcs[n] = q.sendWC(e, e.status)
		n++
		q.sqHead++
	}
	return n
}

func (q *qp) reapable() bool {
	q.retireUnsignaled()
	return q.sqHead < q.sqBuilt && q.sent(&q.sq[q.sqHead&q.sqMask])
}

func (q *qp) sendWC(e *sendEntry, status verbs.Status) verbs.WC {
	wc := verbs.WC{ID: e.id, QP: q.context, Op: e.op, Status: status}
	if status == verbs.StatusOK {
		wc.ByteLen = e.length
	} else {
		wc.VendorCode = uint32(q.end.code)
	}
	return wc
}

// LocalAddr implements verbs.QP.
func (q *qp) LocalAddr() netip.AddrPort {
	if a := q.local.Load(); a != nil {
		return a.local
	}
	return netip.AddrPort{}
}

// RemoteAddr implements verbs.QP.
func (q *qp) RemoteAddr() netip.AddrPort {
	if a := q.local.Load(); a != nil {
		return a.remote
	}
	return netip.AddrPort{}
}
