//go:build linux && cgo && ibverbs

package ibverbs

// #include "lib.h"
import "C"

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. The functions in the order in which a request meets them:
//
//	PostSend, postSend    checks; into the array of the completion queue
//	PostRecv, postRecv    the same; before the connection is up, into first
//	                      ... cq.go: Poll posts, and takes completions ...
//	sendDone, recvDone    find the request of a completion
//	flush                 requests without a completion at the end

// qpPhase is the life of a queue pair:
//
//	idle -> connecting -> up -> ending -> gone -> down
//	        connecting -> failed
type qpPhase uint32

const (
	phaseIdle       qpPhase = iota
	phaseConnecting         // Connect or Accept is under way
	phaseUp                 // the owner posts and polls
	phaseEnding             // Disconnect was called; the owner learns of it
	phaseGone               // the library's queue pair is destroyed
	phaseDown               // OpDisconnected was delivered
	phaseFailed             // never came up
)

var errUsed = errors.New("queue pair was used before")

// sentRequest and awaited describe a request until it completes.
type sentRequest struct {
	id uint64
	op verbs.Opcode
}

// qp implements verbs.QP.
type qp struct {
	softverbs.Queued // in cq.Pending

	dev  *Device
	pd   *pd
	cq   *compQueue
	cfg  verbs.QPConfig
	slot uint64 // in the completion queue, as the upper half of a wr_id

	state   atomic.Uint32
	answers eventWaiter

	mu            sync.Mutex // taken before no other
	id            *cmID
	local, remote netip.AddrPort
	num           uint32

	// The owner's; before the connection is up, the creator's.
	c       *cQP
	sends   indexedQueue[sentRequest]
	recvs   indexedQueue[uint64]
	first   []cRecv // receives that wait for the connection
	closing bool    // the owner has stopped posting
}

func newQP(d *Device, p *pd, c *compQueue, cfg verbs.QPConfig) *qp {
	return &qp{dev: d, pd: p, cq: c, cfg: cfg, answers: make(eventWaiter, 16),
		sends: newRing[sentRequest](cfg.SendQueue), recvs: newRing[uint64](cfg.RecvQueue)}
}

func (q *qp) inPhase(p qpPhase) bool { return qpPhase(q.state.Load()) == p }

func (q *qp) setPhase(from, to qpPhase) bool { return q.state.CompareAndSwap(uint32(from), uint32(to)) }

// PostSend implements verbs.QP.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	for i := range wrs {
		if err := q.postSend(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (q *qp) postSend(wr *verbs.SendWR) error {
	opcode, need := opcodeOf(wr.Op)
	switch {
	case !q.inPhase(phaseUp) || q.closing:
		return verbs.ErrNotConnected
	case opcode < 0 || q.dev.info.Caps&need != need:
		return verbs.ErrUnsupported
	case len(wr.SGEs) > q.cfg.MaxSGE:
		return verbs.ErrUnsupported
	case q.sends.full():
		return verbs.ErrQueueFull
	}
	var w *cWindow
	if need == verbs.CapKeyRotation {
		if w = q.pd.windowFor(wr.RKey); w == nil {
			return verbs.ErrAccess
		}
	}
	s := q.cq.nextSend(len(wr.SGEs))
	s.qp, s.window, s.opcode = q.c, w, opcode
	s.wr_id = C.uint64_t(q.slot | uint64(q.sends.push(sentRequest{wr.ID, wr.Op})))
	s.remote_addr, s.rkey, s.imm = C.uint64_t(wr.RemoteAddr), C.uint32_t(wr.RKey), C.uint32_t(wr.Imm)
	s.signaled = 0
	if wr.Signaled {
		s.signaled = 1
	}
	s.num_sge = 0
	for i := range wr.SGEs {
		if g := &wr.SGEs[i]; len(g.Buf) > 0 { // an element of length 0 would be one of 2^31
			q.cq.addSGE(g)
			s.num_sge++
		}
	}
	return nil
}

// opcodeOf returns C's name of op and the ability that it needs; -1: not for
// a send queue.
func opcodeOf(op verbs.Opcode) (C.int, verbs.Cap) {
	switch op {
	case verbs.OpSend:
		return C.IBV_WR_SEND, 0
	case verbs.OpSendImm:
		return C.IBV_WR_SEND_WITH_IMM, verbs.CapSendImm
	case verbs.OpSendInv:
		return C.IBV_WR_SEND_WITH_INV, verbs.CapSendInv
	case verbs.OpWrite:
		return C.IBV_WR_RDMA_WRITE, 0
	case verbs.OpWriteImm:
		return C.IBV_WR_RDMA_WRITE_WITH_IMM, verbs.CapWriteImm
	case verbs.OpRead:
		return C.IBV_WR_RDMA_READ, 0
	case verbs.OpLocalInv:
		return C.RV_INVALIDATE, verbs.CapKeyRotation
	case verbs.OpRegMR:
		return C.RV_REGISTER, verbs.CapKeyRotation
	}
	return -1, 0
}

// recvBit marks the wr_id of a receive.
const recvBit = 1 << 31

// PostRecv implements verbs.QP.
func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	for i := range wrs {
		if err := q.postRecv(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (q *qp) postRecv(wr *verbs.RecvWR) error {
	var r *cRecv
	switch {
	case q.recvs.full():
		return verbs.ErrQueueFull
	case q.inPhase(phaseUp) && !q.closing:
		r = q.cq.nextRecv()
	case q.inPhase(phaseIdle):
		q.first = append(q.first, cRecv{})
		r = &q.first[len(q.first)-1]
	default:
		return verbs.ErrNotConnected
	}
	r.qp = q.c
	r.wr_id = C.uint64_t(q.slot | recvBit | uint64(q.recvs.push(wr.ID)))
	r.sge.addr, r.sge.length, r.sge.lkey = addrOf(wr.Buf), C.uint32_t(len(wr.Buf)), C.uint32_t(wr.LKey)
	return nil
}

// fillCompletion fills out for a completion of q and reports whether it is one.
func (q *qp) fillCompletion(c *cWC, out *verbs.WC) bool {
	*out = verbs.WC{QP: q.cfg.Context, Status: statusOf(c.status)}
	if out.Status != verbs.StatusOK {
		out.VendorCode = uint32(c.status)<<24 | uint32(c.vendor_err)&0xffffff
		q.Disconnect()
	}
	index := uint32(c.wr_id) &^ recvBit
	if c.wr_id&recvBit == 0 {
		return q.sendDone(index, out)
	}
	return q.recvDone(index, c, out)
}

// sendDone takes the request with this index and those before it. The earlier
// ones were not signalled and are done.
func (q *qp) sendDone(index uint32, out *verbs.WC) bool {
	s, ok := q.sends.popTo(index)
	out.ID, out.Op = s.id, s.op
	return ok
}

func (q *qp) recvDone(index uint32, c *cWC, out *verbs.WC) (ok bool) {
	out.ID, ok = q.recvs.popTo(index)
	out.Op = verbs.OpRecv
	if out.Status != verbs.StatusOK {
		return ok
	}
	if c.opcode == C.IBV_WC_RECV_RDMA_WITH_IMM {
		out.Op = verbs.OpRecvImm
	}
	out.ByteLen = uint32(c.byte_len)
	out.HasImm = c.flags&C.IBV_WC_WITH_IMM != 0
	out.HasInv = !out.HasImm && c.flags&C.IBV_WC_WITH_INV != 0
	out.Imm, out.InvKey = uint32(c.imm), uint32(c.inv_key)
	return ok
}

// flushRequests fills wcs with the requests that did not complete, and then
// OpDisconnected; last reports whether that was included.
func (q *qp) flushRequests(wcs []verbs.WC) (n int, last bool) {
	for ; n < len(wcs); n++ {
		wcs[n] = verbs.WC{QP: q.cfg.Context, Status: verbs.StatusFlushed}
		if s, ok := q.sends.pop(); ok {
			wcs[n].ID, wcs[n].Op = s.id, s.op
		} else if id, ok := q.recvs.pop(); ok {
			wcs[n].ID, wcs[n].Op = id, verbs.OpRecv
		} else {
			wcs[n].Op, wcs[n].Status = verbs.OpDisconnected, verbs.StatusOK
			q.state.Store(uint32(phaseDown))
			return n + 1, true
		}
	}
	return n, false
}

func statusOf(s C.int) verbs.Status {
	switch s {
	case C.IBV_WC_SUCCESS:
		return verbs.StatusOK
	case C.IBV_WC_WR_FLUSH_ERR:
		return verbs.StatusFlushed
	case C.IBV_WC_LOC_LEN_ERR:
		return verbs.StatusLocalLength
	case C.IBV_WC_LOC_PROT_ERR, C.IBV_WC_MW_BIND_ERR, C.IBV_WC_LOC_ACCESS_ERR:
		return verbs.StatusLocalProt
	case C.IBV_WC_REM_ACCESS_ERR:
		return verbs.StatusRemoteAccess
	case C.IBV_WC_REM_INV_REQ_ERR, C.IBV_WC_REM_OP_ERR, C.IBV_WC_BAD_RESP_ERR:
		return verbs.StatusRemoteInvalid
	case C.IBV_WC_RETRY_EXC_ERR, C.IBV_WC_RNR_RETRY_EXC_ERR, C.IBV_WC_RESP_TIMEOUT_ERR:
		return verbs.StatusRetryExceeded
	}
	return verbs.StatusFatal
}

// Control path.

// createQP makes the library's queue pair for id and posts the receives that
// wait for it.
func (q *qp) createQP(id *cmID) error {
	if q.dev.lost.Load() {
		return ErrNoDevice
	}
	var first *cRecv
	if len(q.first) > 0 {
		first = &q.first[0]
	}
	err := errnoOf(C.rv_create_qp(id.id, q.pd.c, q.cq.c, C.int(q.cfg.SendQueue), C.int(q.cfg.RecvQueue), C.int(q.cfg.MaxSGE),
		first, C.int(len(q.first))))
	q.first = nil
	if err != nil {
		return fmt.Errorf("create queue pair: %w", err)
	}
	q.c = C.rv_qp(id.id)
	q.num = uint32(C.rv_qp_num(id.id))
	q.dev.addQP(q.num, q)
	return nil
}

// goUp opens the queue pair for its owner.
func (q *qp) goUp() bool {
	if !q.setPhase(phaseConnecting, phaseUp) {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dev.f.cfg.Logger.Info("ibverbs: connection up", "device", q.dev.info.Name,
		"local", verbs.AddrPortString(q.local), "remote", verbs.AddrPortString(q.remote), "qpn", q.num)
	return true
}

// setRetries lets a peer that finds no receive try again soon.
func (q *qp) setRetries() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.id != nil {
		C.rv_patience(q.id.id)
	}
}

// Disconnect implements verbs.QP.
func (q *qp) Disconnect() {
	if q.setPhase(phaseUp, phaseEnding) {
		go q.hangUp()
	}
}

// hangUp disconnects from the peer, stops the queue pair and tells its owner,
// unless the owner has destroyed it first.
func (q *qp) hangUp() {
	if q.tellPeer() {
		q.cq.Submit(q)
	}
}

// tellPeer tells the peer of the end and stops the queue pair, unless it was destroyed.
func (q *qp) tellPeer() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.id == nil {
		return false
	}
	C.rv_disconnect(q.id.id)
	return true
}

// destroyQP destroys the library's queue pair: after that the device touches no
// memory for it. The owner has stopped posting.
func (q *qp) destroyQP() {
	q.dev.removeQP(q.num)
	q.mu.Lock()
	if q.id != nil {
		C.rv_destroy_qp(q.id.id)
	}
	q.mu.Unlock()
	q.state.Store(uint32(phaseGone))
	q.cq.Submit(q)
}

// Destroy implements verbs.QP.
func (q *qp) Destroy() {
	q.cq.removeQP(q)
	q.freeID()
}

func (q *qp) setID(id *cmID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.id = id
}

// freeID destroys the identifier and its resources.
func (q *qp) freeID() {
	if id := q.takeID(); id != nil {
		id.destroyID()
	}
}

// takeID takes the identifier from the queue pair.
func (q *qp) takeID() *cmID {
	if q.num != 0 {
		q.dev.removeQP(q.num)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	id := q.id
	q.id = nil
	return id
}

func (q *qp) setAddrs(id *cmID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.local, q.remote = id.localAddr(), id.remoteAddr()
}

// LocalAddr implements verbs.QP.
func (q *qp) LocalAddr() netip.AddrPort {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.local
}

// RemoteAddr implements verbs.QP.
func (q *qp) RemoteAddr() netip.AddrPort {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.remote
}
