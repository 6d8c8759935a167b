package rtrs

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH, shared by client and server: one connection. Its functions, in the
// order in which a connection meets them:
//
//	newConn      control path: queue pair, slot in the poller
//	postRecvs    receives, before the connection is up or by the owner
//	post         owner: a chain of work requests; they leave at the next Poll
//	dispatch     owner: one completion
//	repost       owner: a consumed receive goes back, in batches
//	destroy      control path: after connDown, or if it was never connected
//
// A connection belongs to the owner of its poller. Nothing here is locked.

// connHandler is the side of a connection, client or server. The owner calls it.
type connHandler interface {
	// connRecv handles a good receive: OpRecv or OpRecvImm.
	connRecv(wc *verbs.WC)
	// connCredit is called when the send queue has room again.
	connCredit()
	// connFailed is called for every completion that failed other than by
	// flushing, and for posts that failed; the connection is ending.
	connFailed(err error)
	// connDown is called once: nothing more will be completed.
	connDown()
}

// connConfig sizes a connection.
type connConfig struct {
	cid       int
	sendQueue int // work requests
	recvQueue int
	maxSGE    int
	interval  int  // signal one in about so many work requests
	prepost   bool // receives have no buffer: post them again before processing
}

// conn is one queue pair with its share of a completion queue.
type conn struct {
	poller *Poller
	dev    verbs.Device
	qp     verbs.QP
	cq     *pollerCQ
	h      connHandler
	ctx    uint64 // WC.QP
	cid    int

	prepost  bool
	entries  int // of the completion queue
	interval uint32
	depth    uint32 // of the send queue

	// Owner only. posted and acked count work requests and wrap around.
	posted   uint32
	acked    uint32
	signaled uint32 // value of posted at the last signalled request
	down     bool   // connDown was called
	left     bool   // the peer has ended the connection in order; set before connDown is called
	recvSize int
	recvMem  []byte // receive i uses recvMem[i*recvSize:][:recvSize]
	recvKey  uint32
	due      []verbs.RecvWR // consumed receives to post again
	hbChain  [1]verbs.SendWR
	found    int // completions of this batch

	stats connStats
}

// newConn makes a queue pair on p. The caller posts receives and connects or
// accepts it.
func newConn(p *Poller, dev verbs.Device, pd verbs.PD, h connHandler, cfg connConfig) (*conn, error) {
	maxWR := dev.Info().MaxQPWR
	sq, rq := min(cfg.sendQueue, maxWR), min(cfg.recvQueue, maxWR)
	c := &conn{
		poller:   p,
		dev:      dev,
		h:        h,
		cid:      cfg.cid,
		prepost:  cfg.prepost,
		entries:  sq + rq,
		interval: uint32(max(1, min(cfg.interval, sq/4))),
		depth:    uint32(sq),
		due:      make([]verbs.RecvWR, 0, pollBatch),
	}
	var err error
	if c.cq, err = p.reserveCQ(dev, c.entries); err != nil {
		return nil, fmt.Errorf("connection %d: %w", cfg.cid, err)
	}
	p.addConn(c)
	c.qp, err = dev.CreateQP(pd, verbs.QPConfig{CQ: c.cq.CQ, Context: c.ctx, SendQueue: sq, RecvQueue: rq, MaxSGE: cfg.maxSGE})
	if err != nil {
		p.removeConn(c)
		p.releaseCQ(c.cq, c.entries)
		return nil, fmt.Errorf("connection %d: queue pair on %s: %w", cfg.cid, dev.Info().Name, err)
	}
	return c, nil
}

// destroyQP frees the queue pair. Any goroutine, once.
func (c *conn) destroyQP() {
	c.poller.removeConn(c)
	c.qp.Destroy()
	c.poller.releaseCQ(c.cq, c.entries)
}

// setRecvBuffers gives every receive posted by postRecvs or repost size bytes
// of mem. mem is registered as lkey. Without it they have no buffer.
func (c *conn) setRecvBuffers(mem []byte, size int, lkey uint32) {
	c.recvMem, c.recvSize, c.recvKey = mem, size, lkey
}

// recvBuf returns the buffer of receive id, empty without buffers.
func (c *conn) recvBuf(id uint64) []byte {
	return c.recvMem[int(id)*c.recvSize:][:c.recvSize:c.recvSize]
}

// postRecvs posts the receives 0 to n-1. Owner, or the creator before the
// connection is up.
func (c *conn) postRecvs(n int) error {
	for id := range n {
		c.due = append(c.due, c.recvWR(uint64(id)))
		if len(c.due) == cap(c.due) || id == n-1 {
			_, err := c.qp.PostRecv(c.due)
			c.due = c.due[:0]
			if err != nil {
				return fmt.Errorf("connection %d: post %d receives: %w", c.cid, n, err)
			}
		}
	}
	return nil
}

func (c *conn) recvWR(id uint64) verbs.RecvWR {
	if c.recvSize == 0 {
		return verbs.RecvWR{ID: id}
	}
	return verbs.RecvWR{ID: id, Buf: c.recvBuf(id), LKey: c.recvKey}
}

// sendRoom returns the number of work requests that the send queue has room for.
func (c *conn) sendRoom() int { return int(c.depth - (c.posted - c.acked)) }

// postChain queues chain. Its last request is signalled if the caller marked it, or if
// interval requests were posted since the last signalled one: a completion makes
// room in the send queue. Without room post returns errNoCredit and posts nothing;
// connCredit will be called. Any other error has ended the connection. Owner only.
func (c *conn) postChain(chain []verbs.SendWR) error {
	if c.sendRoom() < len(chain) {
		return errNoCredit
	}
	for i := range chain {
		c.posted++
		chain[i].ID = uint64(c.posted)
	}
	last := &chain[len(chain)-1]
	if last.Signaled || c.posted-c.signaled >= c.interval {
		last.Signaled = true
		c.signaled = c.posted
	}
	if _, err := c.qp.PostSend(chain); err != nil {
		c.qp.Disconnect()
		return fmt.Errorf("connection %d: post: %w", c.cid, err)
	}
	return nil
}

// postImm posts an empty WRITE WITH IMM: a heartbeat or its answer. Without
// room in the send queue it is dropped and postImm returns false; the traffic
// that fills the queue is a sign of life as well.
func (c *conn) postImm(imm rtrswire.Imm) bool {
	c.hbChain[0] = verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(imm)}
	err := c.postChain(c.hbChain[:])
	if err != nil && err != errNoCredit && !c.down {
		c.h.connFailed(err)
	}
	return err == nil
}

// onCompletion handles one completion.
func (c *conn) onCompletion(wc *verbs.WC) {
	switch {
	case wc.Op == verbs.OpDisconnected:
		c.down, c.left = true, wc.Status == verbs.StatusOK
		c.h.connDown()
	case wc.Status == verbs.StatusFlushed:
	case wc.Status != verbs.StatusOK:
		c.h.connFailed(wcError(c.cid, wc))
	case wc.Op == verbs.OpRecv || wc.Op == verbs.OpRecvImm:
		c.stats.noteHeard()
		c.h.connRecv(wc)
	default:
		c.acked = uint32(wc.ID)
		c.h.connCredit()
	}
}

// noteRecv marks the receive of wc as consumed before it is processed.
func (c *conn) noteRecv(wc *verbs.WC) {
	if wc.Status == verbs.StatusOK && (wc.Op == verbs.OpRecv || wc.Op == verbs.OpRecvImm) {
		c.repostReceive(wc.ID)
	}
}

// repostReceive gives receive id back; it is posted with the others of this batch.
func (c *conn) repostReceive(id uint64) { c.due = append(c.due, c.recvWR(id)) }

// flushRecv posts the receives given back.
func (c *conn) flushRecv() {
	if len(c.due) == 0 {
		return
	}
	_, err := c.qp.PostRecv(c.due)
	c.due = c.due[:0]
	if err != nil && !c.down {
		c.qp.Disconnect()
		c.h.connFailed(fmt.Errorf("connection %d: post receives: %w", c.cid, err))
	}
}

// countLook counts the batch, once.
func (c *conn) countLook() {
	if c.found > 0 {
		c.stats.looks[c.found].Add(1)
		c.found = 0
	}
}

// wcError describes a completion that failed.
func wcError(cid int, wc *verbs.WC) error {
	return fmt.Errorf("%w: connection %d: operation %d failed with status %d (detail %d)", ErrConnLost, cid, wc.Op, wc.Status, wc.VendorCode)
}
