package cm

import (
	"bytes"
	"errors"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// passiveConn is a connection that a peer sends on.
type passiveConn struct {
	m    *Manager
	from peerAddr
	id   uint64
	qp   verbs.QP
	mr   verbs.MR
	buf  []byte
	size int       // of one receive, with the headroom
	used time.Time // used by the owner alone, once the connection is listed
}

// acceptLoop answers the requests of a listener until it is closed.
func (m *Manager) acceptLoop(l verbs.Listener) {
	defer m.wg.Done()
	for {
		r, err := l.Accept()
		if err != nil {
			return // closed
		}
		if err := m.onRequest(r); err != nil {
			m.cfg.Logger.Debug("IPoIB connection was not accepted", "peer", r.RemoteAddr().Addr(), "err", err)
		}
	}
}

// onRequest answers one request.
func (m *Manager) onRequest(r verbs.ConnRequest) error {
	private := wire.CMPrivate(bytes.Clone(r.Private()))
	if !private.Valid() || private.QPN() <= 1 || private.QPN() == wire.MulticastQPN {
		m.updateStats(func(s *Stats) { s.BadRequests++ })
		return r.Reject(nil)
	}
	p := &passiveConn{m: m, from: peerAddr{r.RemoteAddr().Addr().Unmap(), private.QPN()}, size: m.cfg.Headroom + m.cfg.ReceiveMTU, used: time.Now()}
	if m.atLimit(p.from) {
		m.updateStats(func(s *Stats) { s.Crowded++ })
		return r.Reject(nil)
	}
	p.id = m.addHandler(p.onCompletion)
	err := p.openQP()
	if err == nil && !m.admitPassive(p) {
		err = errCrowded
	}
	if err != nil {
		r.Reject(nil)
	} else {
		err = r.Accept(p.qp, wire.NewCMPrivate(m.cfg.QPN, uint32(m.cfg.ReceiveMTU)))
	}
	if err != nil {
		m.removePassive(p)
		p.freeResources()
		return err
	}
	m.updateStats(func(s *Stats) { s.Accepts++ })
	return nil
}

var errCrowded = errors.New("too many connections")

// openQP makes the queue pair and posts its receives.
func (p *passiveConn) openQP() (err error) {
	m := p.m
	p.buf = make([]byte, m.cfg.Receives*p.size)
	if p.mr, err = m.pd.RegMR(p.buf, 0); err != nil {
		return err
	}
	if p.qp, err = m.cfg.Fabric.CreateQP(m.pd, verbs.QPConfig{CQ: m.cq, Context: p.id, SendQueue: 1, RecvQueue: m.cfg.Receives, MaxSGE: 1}); err != nil {
		return err
	}
	for k := range m.cfg.Receives {
		if err := p.postReceive(uint64(k)); err != nil {
			return err
		}
	}
	return nil
}

// postReceive posts the receive with the number k.
func (p *passiveConn) postReceive(k uint64) error {
	at := int(k)*p.size + p.m.cfg.Headroom
	wr := [1]verbs.RecvWR{{ID: k, Buf: p.buf[at : at+p.m.cfg.ReceiveMTU], LKey: p.mr.LKey()}}
	_, err := p.qp.PostRecv(wr[:])
	return err
}

// onCompletion handles a completion. Called by the owner.
func (p *passiveConn) onCompletion(wc *verbs.WC) {
	switch {
	case wc.Op == verbs.OpDisconnected:
		p.m.removePassive(p)
		p.freeResources()
		return
	case wc.Op != verbs.OpRecv || wc.Status != verbs.StatusOK:
		return // OpDisconnected follows
	}
	p.used = p.m.now
	at := int(wc.ID) * p.size
	p.m.received.Add(1)
	p.m.cfg.Receive(p.from.addr, p.from.qpn, p.buf[at:at+p.m.cfg.Headroom+int(wc.ByteLen)])
	if err := p.postReceive(wc.ID); err != nil {
		p.qp.Disconnect()
	}
}

func (p *passiveConn) freeResources() {
	if p.qp != nil {
		p.qp.Destroy()
	}
	if p.mr != nil {
		p.mr.Close()
	}
}
