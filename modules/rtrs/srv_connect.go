package rtrs

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A path connects: each of its connections is accepted, then the INFO_REQ on the
// first one completes it.

// mayJoin returns the reason why the connection of f does not belong to p. The
// caller holds accepting.
func (p *srvPath) mayJoin(mode AuthMode, req verbs.ConnRequest, f *rtrswire.ConnReqFields) error {
	switch {
	case p.State() != SrvPathConnecting:
		return protocolErrorf("path %d is %s", p.id, p.State())
	case mode != p.auth || needsChallenge(mode, req, f) != (p.proofs != nil):
		return protocolErrorf("path %d has connections with a challenge and without", p.id)
	case int(f.CIDNum) != len(p.conns):
		return protocolErrorf("path %d has %d connections, not %d", p.id, len(p.conns), f.CIDNum)
	case p.conns[f.CID] != nil:
		return protocolErrorf("path %d has connection %d already", p.id, f.CID)
	}
	return nil
}

// isSucceededBy reports whether f begins a successor of p: a client makes a later
// attempt only without the connections of the path. p goes on until the successor
// has proved itself, since anybody may send f.
func (p *srvPath) isSucceededBy(f *rtrswire.ConnReqFields) bool {
	return p.isConnected() && f.CID == 0 && int16(f.ReconCnt-p.reconCnt) > 0
}

// endPredecessor ends the path that p succeeds, and waits for its end. p counts
// from then on, so that the session goes on. The client of p has received the
// answers to its connection requests, and has proved its identity if that is asked
// of it.
func (p *srvPath) endPredecessor() error {
	old, s := p.predecessor, p.sess
	if old == nil {
		return nil
	}
	p.predecessor = nil
	s.keepUp(p)
	old.close(errSuperseded)
	select {
	case <-old.closed:
	case <-p.closing:
		return p.cause
	}
	if n := s.retiredOf(p.uuid); n > 0 { // or the client would take the predecessor for fenced
		return withReason(rtrswire.ReasonHangs, fmt.Sprintf("%d chunks", n), fmt.Errorf("the path has %d chunks whose requests do not end: %w", n, syscall.EBUSY))
	}
	return nil
}

// addConn accepts req as connection cid. An error is the client's answer, and
// the end of the path. The caller holds accepting.
func (p *srvPath) addConn(req verbs.ConnRequest, cid int) error {
	c, err := p.newConn(cid)
	if err != nil {
		p.close(err)
		return err
	}
	p.conns[cid] = c
	p.filled++
	p.live.Add(1)
	var rsp [rtrswire.ConnRspLen]byte
	p.answerConnects(rsp[:])
	p.proofs.keepPrivateData(cid, req.Private(), rsp[:])
	if err := req.Accept(c.qp, rsp[:]); err != nil {
		p.conns[cid] = nil
		p.live.Done()
		p.destroyConn(c)
		p.close(fmt.Errorf("accept connection %d: %w", cid, err))
	}
	return nil
}

// newConn makes a connection, if the client may have one more.
func (p *srvPath) newConn(cid int) (*srvConn, error) {
	a := &p.sess.srv.accounts
	if err := a.takeConn(accountedAddr(p.client)); err != nil {
		return nil, err
	}
	c, err := newSrvConn(p, cid)
	if err != nil {
		a.discharge(accountedAddr(p.client), resourceAccount{conns: 1})
	}
	return c, err
}

// destroyConn frees a connection of newConn.
func (p *srvPath) destroyConn(c *srvConn) {
	c.destroyQP()
	p.sess.srv.accounts.discharge(accountedAddr(p.client), resourceAccount{conns: 1})
}

// answerConnects writes the answer to every connection request of p.
func (p *srvPath) answerConnects(rsp rtrswire.ConnRsp) {
	cfg := &p.sess.srv.cfg
	f := rtrswire.ConnRspFields{
		QueueDepth: uint16(cfg.QueueDepth),
		MaxIOSize:  uint32(cfg.ChunkSize - maxHdrSize),
		MaxHdrSize: maxHdrSize,
		Features:   rtrswire.FeatureFence | rtrswire.FeatureIncarnation | rtrswire.FeatureBeats | rtrswire.FeatureReason,

		Incarnation: p.life,
	}
	if p.newRkey {
		f.Flags = rtrswire.FlagNewRkey
	}
	if p.proofs != nil {
		f.Features |= rtrswire.FeatureProof
	}
	rsp.Put(&f)
}

// onInfoReq serves the INFO_REQ of n bytes. It runs on a goroutine of its own.
func (p *srvPath) onInfoReq(n int) {
	if err := p.onInfoRequest(p.ctl.infoReq[:n]); err != nil {
		p.refuseSession(err)
	}
}

// onInfoRequest checks the INFO_REQ and connects the path: receives on every
// connection, session up, INFO_RSP.
func (p *srvPath) onInfoRequest(m rtrswire.InfoReq) error {
	if err := m.Check(); err != nil {
		return protocolErrorf("%v", err)
	}
	p.takesReasons = m.Features()&rtrswire.FeatureReason != 0
	if err := p.checkComplete("INFO_REQ"); err != nil {
		return err
	}
	if err := p.awaitProof(m.Name()); err != nil {
		return err
	}
	if err := p.takeName(m.Name()); err != nil {
		return err
	}
	if err := p.endPredecessor(); err != nil {
		return err
	}
	for _, c := range p.conns {
		if err := p.onOwner(c, c.postAllRecvs); err != nil {
			return err
		}
	}
	if err := p.sess.awaitChunks(p); err != nil {
		return err
	}
	if err := p.sess.pathUp(p); err != nil {
		return err
	}
	p.infoTimer.Stop()
	p.sess.srv.accounts.removeUnfinished(p)
	p.logConnected()
	return p.onOwner(p.conns[0], func() error {
		p.startBeats(time.Now())
		return p.conns[0].postInfoRsp()
	})
}

// onOwner runs f on the owner of c, within the time limit of a connection.
func (p *srvPath) onOwner(c *srvConn, f func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), p.sess.srv.Timing().ConnectTimeout)
	defer cancel()
	return c.onOwner(ctx, f)
}

// checkComplete returns an error unless all connections are there when message comes.
func (p *srvPath) checkComplete(message string) error {
	p.sess.srv.accepting.Lock()
	defer p.sess.srv.accepting.Unlock()
	if p.State() != SrvPathConnecting || p.filled != len(p.conns) {
		return protocolErrorf("%s with %d of %d connections, path %s", message, p.filled, len(p.conns), p.State())
	}
	return nil
}

// takeName gives the session the name. If an ending session has it, takeName
// waits for its end: a client may connect again before this server has finished
// with its last session.
func (p *srvPath) takeName(name string) error {
	for {
		holder, err := p.sess.setName(name)
		if holder == nil {
			return err
		}
		select {
		case <-holder.closed:
		case <-p.closing: // InfoTimeout has passed, or the client has given up
			return err
		case <-time.After(p.sess.srv.nameGrace):
			if holder.goesOn() {
				return err
			}
		}
	}
}
