package rocev2

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The active side of the connection manager.

// Ports of rdma_cm that are chosen if none is asked for.
const (
	ephemeralFirst = 32768
	ephemeralLast  = 60999
)

func ephemeralPort() uint16 {
	return uint16(ephemeralFirst + rand.IntN(ephemeralLast-ephemeralFirst+1))
}

var errConnectTimeout = errors.New("peer does not answer: check the address, the port and that UDP 4791 passes")

// Connect implements verbs.Device.
func (d *Device) Connect(ctx context.Context, v verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	q, ok := v.(*qp)
	if !ok || q.dev != d {
		return nil, fmt.Errorf("connect to %s: %w", p.Dst, softverbs.ErrForeign)
	}
	p, err := p.IP()
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if err := q.Begin(p.Private, reqPrivateLen-ipHeaderLen); err != nil {
		return nil, fmt.Errorf("connect to %s: %w", p.Dst, err)
	}
	private, err := d.connectTo(ctx, q, connTarget{
		src: p.Src.Unmap(), dst: p.Dst.Addr().Unmap(), service: servicePortSpace | uint64(p.Dst.Port()), pkey: verbs.DefaultPKey, private: p.Private})
	if err != nil {
		if q.Move(softverbs.Connecting, softverbs.Down) {
			q.cq.giveNumber(q)
		}
		return nil, fmt.Errorf("connect to %s: %w", p.Dst, err)
	}
	return private, nil
}

// connTarget describes a connection to be made.
type connTarget struct {
	src, dst netip.Addr
	service  uint64
	pkey     uint16
	private  []byte
}

func (d *Device) connectTo(ctx context.Context, q *qp, to connTarget) ([]byte, error) {
	src, dst := to.src, to.dst
	if !src.IsValid() || src.IsUnspecified() {
		var err error
		if src, err = d.localAddr(dst); err != nil {
			return nil, err
		}
	}
	if src.Is4() != dst.Is4() {
		return nil, fmt.Errorf("source %s is of another address family", src)
	}
	at, err := d.portAt(src)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, d.cfg.ConnectTimeout, errConnectTimeout)
	defer cancel()
	mtu := uint8(maxMTUCode)
	if n := routeMTU(src, dst); n > 0 {
		mtu = mtuCode(n)
	}
	for {
		c := d.cm.sendRequest(at, q, to, mtu)
		private, err := d.cm.awaitAnswer(ctx, c)
		var less *mtuError
		if !errors.As(err, &less) || less.code >= decodeREQ(c.last).mtu {
			return private, err
		}
		mtu = less.code
	}
}

// mtuError is a refusal because of the path MTU.
type mtuError struct{ code uint8 } // that the peer takes

func (e *mtuError) Error() string {
	return fmt.Sprintf("connection refused: %s, which takes %d", reasonInvalidMTU, mtuBytes(e.code))
}

// awaitAnswer returns the answer to a request.
func (m *connManager) awaitAnswer(ctx context.Context, c *cmConn) ([]byte, error) {
	select {
	case r := <-c.answer:
		return r.private, r.err
	case <-ctx.Done():
	}
	if m.giveUp(c) {
		return nil, context.Cause(ctx)
	}
	r := <-c.answer // it came just in time
	return r.private, r.err
}

// localAddr returns the local address for dst: the one that the system chooses,
// unless Config.Addrs names others.
func (d *Device) localAddr(dst netip.Addr) (netip.Addr, error) {
	src, err := sourceFor(dst)
	if err != nil {
		return src, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ports[src] != nil {
		return src, nil
	}
	for _, a := range d.cfg.Addrs {
		if a = a.Unmap(); a.Is4() == dst.Is4() && d.ports[a] != nil {
			return a, nil
		}
	}
	return src, nil
}

// sendRequest sends a request for a path MTU of at most the code mtu.
func (m *connManager) sendRequest(p *udpPort, q *qp, to connTarget, mtu uint8) *cmConn {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.newConn(p, to.dst, connReqSent)
	c.q, c.localQPN, c.tid, c.answer = q, q.qpn, random64(), make(chan connResult, 1)
	f := reqFields{
		id: c.local, service: to.service, pkey: to.pkey, guid: m.guid,
		qpn: q.qpn, psn: random32() & psnMask,
		respRes: uint8(m.dev.cfg.IRD), initDepth: uint8(m.dev.cfg.ORD),
		mtu: min(mtu, m.mtuTo(p, to.dst)), ackTimeout: ackTimeoutCode, srcGID: p.addr.As16(), dstGID: to.dst.As16(),
		sourcePort: ephemeralPort(), source: p.addr, dest: to.dst, private: to.private,
	}
	if m.stopped {
		c.answer <- connResult{err: verbs.ErrClosed}
		return c
	}
	c.sendKept(f.encode(c.tid))
	c.scheduleRepeat(firstRepeat, cmRetries)
	return c
}

// giveUp withdraws a request. It returns false if the answer has come.
func (m *connManager) giveUp(c *cmConn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.state != connReqSent || len(c.answer) > 0 {
		return false
	}
	r := rejFields{about: aboutOther, reason: reasonTimeout, ari: be.AppendUint64(nil, m.guid)}
	m.sendMessage(c.port, c.peer, r.encode(c.tid, c.local, c.remote))
	c.removeTraces()
	return true
}

// onREP handles the answer to a request of this end.
func (m *connManager) onREP(c *cmConn, msg mad, fixedID bool) dropReason {
	if msg.tid() != c.tid {
		return dropState
	}
	if c.state == connEstablished && msg.sender() == c.remote && c.answer != nil {
		m.sendMessage(c.port, c.peer, newMAD(attrRTU, c.tid, c.local, c.remote)) // our RTU was lost
		return dropNone
	}
	if c.state != connReqSent {
		return dropState
	}
	f := decodeREP(msg)
	c.remote, c.guid, c.remoteQPN, c.fixedID = msg.sender(), f.guid, f.qpn, fixedID
	if err := m.onAccepted(c, &f); err != nil {
		c.answer <- connResult{err: err}
		c.removeTraces()
		return dropNone
	}
	c.answer <- connResult{private: append([]byte(nil), f.private...)}
	return dropNone
}

// onAccepted establishes the connection that a REP offers.
func (m *connManager) onAccepted(c *cmConn, f *repFields) error {
	sent := decodeREQ(c.last)
	if !validQPN(f.qpn) || m.byQPN[c.qpnKey()] != nil {
		m.sendMessage(c.port, c.peer, (&rejFields{about: aboutREP, reason: reasonStale}).encode(c.tid, c.local, c.remote))
		return fmt.Errorf("peer answers with queue pair %#x, which is in use", f.qpn)
	}
	l := &connAgreement{
		port: c.port, peer: c.peer, peerQPN: f.qpn, pkey: sent.pkey, mtu: sent.mtu, sendPSN: f.psn, recvPSN: sent.psn,
		local:  netip.AddrPortFrom(c.port.addr, sent.sourcePort),
		remote: netip.AddrPortFrom(c.peer, portOf(sent.service)),
		ird:    m.dev.cfg.IRD, ord: min(m.dev.cfg.ORD, int(f.respRes)),
	}
	if err := m.establishConn(c, c.q, l, false); err != nil {
		m.sendMessage(c.port, c.peer, (&rejFields{about: aboutREP, reason: reasonConsumer}).encode(c.tid, c.local, c.remote))
		return err
	}
	c.state = connEstablished
	c.sendKept(newMAD(attrRTU, c.tid, c.local, c.remote))
	c.scheduleRepeat(rtuRepeat, rtuRepeats)
	return nil
}

// validQPN reports whether a reliable connection may have the queue pair number.
func validQPN(qpn uint32) bool { return qpn > cmQPN && qpn != qpnMask }

// onMRA handles a message that asks for more time.
func (m *connManager) onMRA(c *cmConn, msg mad) dropReason {
	if c.state != connReqSent || msg.tid() != c.tid || msg.rejectedMessage() != aboutREQ {
		return dropState
	}
	c.remote = msg.sender()
	c.setTimer(min(time.Duration(4096)<<msg.mraTimeout(), maxMRA))
	return dropNone
}
