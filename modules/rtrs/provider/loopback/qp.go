package loopback

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

type qpState uint8

const (
	stateIdle       qpState = iota // may be connected
	stateConnecting                // Connect is under way
	stateUp
	stateDead // flushed, or never to be connected
)

// sendEntry is a posted request. Requests are numbered from 0; entry i%len
// belongs to request i.
type sendEntry struct {
	wr       verbs.SendWR // SGEs points into sges
	sges     []verbs.SGE  // capacity MaxSGE
	size     int
	end      int // of its bytes among those that the connection has sent
	readDone bool
	status   verbs.Status // of a local operation, or after its memory was taken back
}

type queuePair struct {
	cq  *compQueue
	pd  *protDomain
	cfg verbs.QPConfig

	// All below is guarded by the network's mu.
	state         qpState
	dial          *dialRequest // while connecting
	conn          *connPair
	side          int // index in conn.ends
	local, remote netip.AddrPort
	destroyed     bool

	watched bool // a timer looks whether requests make progress

	sends                                    []sendEntry
	sendPosted, sendSent, sendDone, sendFree uint64 // counters of requests
	recvs                                    []verbs.RecvWR
	recvPosted, recvDone, recvFree           uint64 // counters of receives
}

func (d *loopDevice) CreateQP(pd verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	if err := d.checkConfig(&cfg); err != nil {
		return nil, fmt.Errorf("loopback: create queue pair: %w", err)
	}
	q := &queuePair{cq: cfg.CQ.(*compQueue), pd: pd.(*protDomain), cfg: cfg}
	q.sends = make([]sendEntry, cfg.SendQueue)
	q.recvs = make([]verbs.RecvWR, cfg.RecvQueue)
	sges := make([]verbs.SGE, cfg.SendQueue*cfg.MaxSGE)
	for i := range q.sends {
		q.sends[i].sges = sges[i*cfg.MaxSGE : i*cfg.MaxSGE : (i+1)*cfg.MaxSGE]
	}
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	q.pd.uses++
	q.cq.uses++
	return q, nil
}

func (d *loopDevice) checkConfig(cfg *verbs.QPConfig) error {
	if cfg.MaxSGE == 0 {
		cfg.MaxSGE = 1
	}
	if cfg.SendQueue <= 0 || cfg.SendQueue > d.info.MaxQPWR || cfg.RecvQueue <= 0 || cfg.RecvQueue > d.info.MaxQPWR {
		return fmt.Errorf("queues of %d sends and %d receives, at most %d: %w", cfg.SendQueue, cfg.RecvQueue, d.info.MaxQPWR, syscall.EINVAL)
	}
	if cfg.MaxSGE < 0 || cfg.MaxSGE > d.info.MaxSGE {
		return fmt.Errorf("%d elements, at most %d: %w", cfg.MaxSGE, d.info.MaxSGE, syscall.EINVAL)
	}
	return nil
}

func (q *queuePair) LocalAddr() netip.AddrPort {
	q.cq.net.mu.Lock()
	defer q.cq.net.mu.Unlock()
	return q.local
}

func (q *queuePair) RemoteAddr() netip.AddrPort {
	q.cq.net.mu.Lock()
	defer q.cq.net.mu.Unlock()
	return q.remote
}

func (q *queuePair) PostSend(wrs []verbs.SendWR) (int, error) {
	q.cq.enterOwner()
	defer q.cq.leaveOwner()
	q.cq.net.mu.Lock()
	defer q.cq.net.mu.Unlock()
	for i := range wrs {
		if err := q.postSend(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (q *queuePair) postSend(wr *verbs.SendWR) error {
	if err := q.checkSend(wr); err != nil {
		return err
	}
	e := &q.sends[q.sendPosted%uint64(len(q.sends))]
	e.wr, e.size, e.readDone, e.status = *wr, 0, false, verbs.StatusOK
	e.sges = append(e.sges[:0], wr.SGEs...)
	e.wr.SGEs = e.sges
	for i := range e.sges {
		e.size += len(e.sges[i].Buf)
	}
	q.sendPosted++
	q.cq.posted.Store(true)
	return nil
}

func (q *queuePair) checkSend(wr *verbs.SendWR) error {
	if q.state != stateUp {
		return verbs.ErrNotConnected
	}
	if q.sendPosted-q.sendFree >= uint64(len(q.sends)) {
		return verbs.ErrQueueFull
	}
	if need, ok := needCap[wr.Op]; !ok || q.pd.dev.info.Caps&need != need {
		return verbs.ErrUnsupported
	}
	if len(wr.SGEs) > q.cfg.MaxSGE {
		return fmt.Errorf("%d elements, at most %d: %w", len(wr.SGEs), q.cfg.MaxSGE, syscall.EINVAL)
	}
	for i := range wr.SGEs {
		if !q.pd.holdsBuffer(wr.SGEs[i].LKey, wr.SGEs[i].Buf) {
			return verbs.ErrAccess
		}
	}
	return nil
}

// needCap has the operations of a send queue and the capabilities that they
// need.
var needCap = map[verbs.Opcode]verbs.Cap{
	verbs.OpSend:     0,
	verbs.OpSendImm:  verbs.CapSendImm,
	verbs.OpSendInv:  verbs.CapSendInv,
	verbs.OpWrite:    0,
	verbs.OpWriteImm: verbs.CapWriteImm,
	verbs.OpRead:     0,
	verbs.OpLocalInv: verbs.CapKeyRotation,
	verbs.OpRegMR:    verbs.CapKeyRotation,
}

func (q *queuePair) PostRecv(wrs []verbs.RecvWR) (int, error) {
	q.cq.net.mu.Lock()
	defer q.cq.net.mu.Unlock()
	for i := range wrs {
		if err := q.postRecv(wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (q *queuePair) postRecv(wr verbs.RecvWR) error {
	switch {
	case q.state == stateDead:
		return verbs.ErrNotConnected
	case q.recvPosted-q.recvFree >= uint64(len(q.recvs)):
		return verbs.ErrQueueFull
	case !q.pd.holdsBuffer(wr.LKey, wr.Buf):
		return verbs.ErrAccess
	}
	q.recvs[q.recvPosted%uint64(len(q.recvs))] = wr
	q.recvPosted++
	if q.state == stateUp && q.conn.pipes[1-q.side].len() > 0 {
		q.cq.ready.Store(true) // a message waits for this receive
	}
	return nil
}

// makeUsable makes q usable by its owner.
func (q *queuePair) makeUsable() {
	q.state = stateUp
	q.cq.qps = append(q.cq.qps, q)
	q.cq.kickOwner()
}

func (q *queuePair) Disconnect() {
	n := q.cq.net
	n.mu.Lock()
	defer n.mu.Unlock()
	switch q.state {
	case stateConnecting:
		if q.dial != nil {
			n.abandonDial(q.dial, fmt.Errorf("disconnected by the caller: %w", verbs.ErrClosed))
		}
	case stateUp:
		q.conn.sendBye(q.side)
		q.endQP(verbs.StatusOK)
	}
}

// endQP ends q: all that is outstanding is flushed, OpDisconnected follows.
func (q *queuePair) endQP(status verbs.Status) {
	if q.state != stateUp {
		return
	}
	q.state = stateDead
	for ; q.sendDone < q.sendPosted; q.sendDone++ {
		q.completeSend(verbs.StatusFlushed, true)
	}
	for ; q.recvDone < q.recvPosted; q.recvDone++ {
		wr := &q.recvs[q.recvDone%uint64(len(q.recvs))]
		q.cq.pushCompletion(pendingWC{qp: q, recv: true, wc: verbs.WC{ID: wr.ID, QP: q.cfg.Context, Op: verbs.OpRecv, Status: verbs.StatusFlushed}})
	}
	q.cq.pushCompletion(pendingWC{qp: q, wc: verbs.WC{QP: q.cfg.Context, Op: verbs.OpDisconnected, Status: status}})
	if i := slices.Index(q.cq.qps, q); i >= 0 {
		q.cq.qps = slices.Delete(q.cq.qps, i, i+1)
	}
	q.cq.kickOwner()
	q.conn.freeUnreceived()
}

// completeSend reports request sendDone, if it is to be reported.
func (q *queuePair) completeSend(status verbs.Status, always bool) {
	e := &q.sends[q.sendDone%uint64(len(q.sends))]
	if e.wr.Signaled || always {
		wc := verbs.WC{ID: e.wr.ID, QP: q.cfg.Context, Op: e.wr.Op, Status: status, ByteLen: uint32(e.size)}
		q.cq.pushCompletion(pendingWC{qp: q, num: q.sendDone, send: true, wc: wc})
	}
}

func (q *queuePair) Destroy() {
	n := q.cq.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if q.destroyed {
		return
	}
	q.destroyed = true
	if q.state == stateUp {
		q.conn.sendBye(q.side)
		q.endQP(verbs.StatusOK)
	}
	q.state = stateDead
	q.pd.uses--
	q.cq.uses--
}
