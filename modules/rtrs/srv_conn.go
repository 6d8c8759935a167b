package rtrs

import (
	"context"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The connections of a path: how they begin, what arrives on them, how they end.
// DATA PATH: connRecv and onImm, which lead to srv_io.go.

// infoReqRecv is the id of the receive of INFO_REQ.
const infoReqRecv = 1 << 32

// srvConn is a connection of a path.
type srvConn struct {
	*conn
	path        *srvPath
	sess        *SrvSession
	handler     ServerHandler
	shift       uint // of the chunk in a request's immediate
	pollerIndex int

	// Owner only.
	inflight   int   // ops of this connection
	parked     []*Op // those among them that wait for news: (*Op).Park
	head, tail *Op   // list of those that wait for room in the send queue
	chain      [maxChain]verbs.SendWR
	filled     int // work requests in chain
	data, rkey [1]verbs.SGE
}

func newSrvConn(p *srvPath, cid int) (*srvConn, error) {
	cfg := &p.sess.srv.cfg
	perOp, depth := 3, cfg.QueueDepth+1
	if p.newRkey {
		perOp = 5
	}
	sends, interval := perOp*cfg.QueueDepth+1, cfg.QueueDepth
	if cid == 0 {
		sends = 2*rtrswire.ServiceDepth + 2
		depth, interval = sends, min(interval, rtrswire.ServiceDepth)
	}
	c := &srvConn{path: p, sess: p.sess, handler: cfg.Handler, shift: p.sess.srv.shift}
	if cid > 0 {
		c.pollerIndex = (cid - 1) % len(cfg.Pollers)
	}
	var err error
	c.conn, err = newConn(cfg.Pollers[c.pollerIndex], p.dev, p.pd, c, connConfig{
		cid: cid, sendQueue: max(sends, minSends), recvQueue: depth, maxSGE: 1, interval: interval,
	})
	if err != nil {
		return nil, err
	}
	if cid != 0 {
		return c, nil
	}
	recvs := append(p.proofs.proofRecvs(), verbs.RecvWR{ID: infoReqRecv, Buf: p.ctl.infoReq, LKey: p.ctl.key})
	if _, err := c.qp.PostRecv(recvs); err != nil {
		c.destroyQP()
		return nil, err
	}
	return c, nil
}

// onOwner runs f on the owner and waits for it.
func (c *srvConn) onOwner(ctx context.Context, f func() error) error {
	var err error
	if e := c.poller.Call(ctx, func() { err = f() }); e != nil {
		return e // err may still be written to
	}
	return err
}

// postAllRecvs posts the receives of requests. From now on a receive is posted
// again before its request is processed.
func (c *srvConn) postAllRecvs() error {
	c.prepost = true
	if c.cid == 0 {
		return c.postRecvs(rtrswire.ServiceDepth)
	}
	return c.postRecvs(c.path.sess.QueueDepth())
}

// postReason sends a REASON. It takes the memory of the INFO_REQ, which has been read. Owner.
func (c *srvConn) postReason(m rtrswire.ReasonMsg) error {
	out := c.path.ctl.infoReq
	c.rkey[0] = verbs.SGE{Buf: out[:copy(out, m)], LKey: c.path.ctl.key}
	c.chain[0] = verbs.SendWR{Op: verbs.OpSend, Signaled: true, SGEs: c.rkey[:]}
	return c.postChain(c.chain[:1])
}

func (c *srvConn) postInfoRsp() error {
	c.rkey[0] = verbs.SGE{Buf: c.path.ctl.infoRsp, LKey: c.path.ctl.key}
	c.chain[0] = verbs.SendWR{Op: verbs.OpSend, Signaled: true, SGEs: c.rkey[:]}
	return c.postChain(c.chain[:1])
}

// connRecv handles the completion of a receive. The first one of connection 0 is
// the INFO_REQ, or before it the messages of a challenge. Later receives have no buffer, so a SEND without an immediate is
// empty and is dropped.
func (c *srvConn) connRecv(wc *verbs.WC) {
	switch {
	case wc.ID >= infoReqRecv && wc.Op == verbs.OpRecv:
		c.path.onSetup(wc.ID, int(wc.ByteLen))
	case wc.ID >= infoReqRecv:
		c.path.close(protocolErrorf("immediate %#08x before INFO_REQ", wc.Imm))
	case wc.Op == verbs.OpRecvImm:
		c.onImm(rtrswire.Imm(wc.Imm))
	}
}

func (c *srvConn) onImm(imm rtrswire.Imm) {
	switch {
	case imm.Type() == rtrswire.ImmIOReq:
		c.onRequest(imm)
	case c.cid == 0:
		c.path.hb.onImm(c.conn, imm)
		if imm.Type() == rtrswire.ImmHeartbeat {
			c.path.followBeat(time.Now())
		}
	case imm.Type() == rtrswire.ImmHeartbeat: // see link.watchConn
		c.postImm(rtrswire.HeartbeatAckImm)
	}
}

// connFailed ends the path.
func (c *srvConn) connFailed(err error) { c.path.close(err) }

// connDown drops the ops that wait for room and cancels those that are parked. The
// connection ends when the consumer has answered the rest.
func (c *srvConn) connDown() {
	if c.cid == 0 {
		c.poller.alarms.setAlarm(&c.path.hb.alarm, time.Time{})
	}
	if c.left {
		c.path.close(errLeft)
	} else {
		c.path.close(ErrConnLost)
	}
	if c.inflight == 0 {
		c.path.live.Done()
		return
	}
	for c.head != nil {
		c.popWaiting().dropAnswer()
	}
	for len(c.parked) > 0 {
		op, cancel := c.parked[0], c.parked[0].cancel
		c.resumeOp(op)
		cancel(op)
	}
}
