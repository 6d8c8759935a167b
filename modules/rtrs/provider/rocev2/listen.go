package rocev2

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The passive side of the connection manager.

// listener implements verbs.Listener.
type listener struct {
	dev  *Device
	addr netip.AddrPort // port 0: of a service that is none of rdma_cm
	id   uint64         // of the service
	pkey uint16         // 0: any
	more chan struct{}  // has a token when queue may not be empty
	done chan struct{}  // closed by Close
	once sync.Once

	queue []*connRequest // for Accept, oldest first; guarded by manager.mu
}

// Listen implements verbs.Device. The port of addr is one of rdma_cm, not of UDP.
// The unspecified address stands for Config.Addrs, or for all addresses of the
// host if there are none.
func (d *Device) Listen(addr netip.AddrPort) (verbs.Listener, error) {
	addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
	if d.isClosed() {
		return nil, fmt.Errorf("listen at %s: %w", addr, verbs.ErrClosed)
	}
	addrs := []netip.Addr{addr.Addr()}
	if addr.Addr().IsUnspecified() {
		var err error
		if addrs, err = d.allAddrs(addr.Addr()); err != nil {
			return nil, fmt.Errorf("listen at %s: %w", addr, err)
		}
	}
	for _, a := range addrs {
		if _, err := d.portAt(a); err != nil {
			return nil, fmt.Errorf("listen at %s: %w", addr, err)
		}
	}
	l, err := d.cm.listenOn(addr)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", addr, err)
	}
	return l, nil
}

// allAddrs returns the addresses that an unspecified one stands for: those of IPv4
// for 0.0.0.0, all for [::].
func (d *Device) allAddrs(any netip.Addr) ([]netip.Addr, error) {
	if len(d.cfg.Addrs) > 0 {
		return d.cfg.Addrs, nil
	}
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, a := range list {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		addr, _ := netip.AddrFromSlice(n.IP)
		if addr = addr.Unmap(); addr.IsLinkLocalUnicast() || any.Is4() && !addr.Is4() {
			continue
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

func (m *connManager) listenOn(addr netip.AddrPort) (*listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for port, tries := addr.Port(), 0; tries < 100; tries++ {
		if addr.Port() == 0 {
			port = ephemeralPort()
		}
		id := servicePortSpace | uint64(port)
		if !m.idTaken(id, addr.Addr(), 0) {
			return m.newListener(netip.AddrPortFrom(addr.Addr(), port), id, 0), nil
		}
	}
	return nil, errors.New("port is in use by another listener of this device: choose another one")
}

// newListener adds a listener for a service. m.mu is held.
func (m *connManager) newListener(addr netip.AddrPort, id uint64, pkey uint16) *listener {
	l := &listener{dev: m.dev, addr: addr, id: id, pkey: pkey, more: make(chan struct{}, 1), done: make(chan struct{})}
	m.listeners[id] = append(m.listeners[id], l)
	return l
}

func (m *connManager) idTaken(id uint64, addr netip.Addr, pkey uint16) bool {
	return slices.ContainsFunc(m.listeners[id], func(l *listener) bool {
		return (l.addr.Addr() == addr || l.addr.Addr().IsUnspecified() || addr.IsUnspecified()) && l.servesPartition(pkey)
	})
}

// servesPartition reports whether the listener takes requests in a partition.
func (l *listener) servesPartition(pkey uint16) bool {
	return l.pkey == 0 || verbs.SamePartition(l.pkey, pkey)
}

// listenerFor returns the listener for a service at a local address, or nil.
func (m *connManager) listenerFor(service uint64, addr netip.Addr, pkey uint16) *listener {
	for _, l := range m.listeners[service] {
		if a := l.addr.Addr(); l.servesPartition(pkey) && (a == addr || a.IsUnspecified() && (a.Is6() || addr.Is4())) {
			return l
		}
	}
	return nil
}

// Addr implements verbs.Listener.
func (l *listener) Addr() netip.AddrPort { return l.addr }

// Accept implements verbs.Listener.
func (l *listener) Accept() (verbs.ConnRequest, error) {
	for {
		select {
		case <-l.done: // even when requests wait
		default:
			if r := l.takeRequest(); r != nil {
				return r, nil
			}
		}
		select {
		case <-l.more:
		case <-l.done:
			return nil, fmt.Errorf("accept at %s: %w", l.addr, verbs.ErrClosed)
		}
	}
}

// queueRequest queues a request for Accept. manager.mu is held.
func (l *listener) queueRequest(r *connRequest) {
	r.pkey = cmp.Or(l.pkey, verbs.DefaultPKey)
	l.queue = append(slices.DeleteFunc(l.queue, (*connRequest).isOver), r)
	l.wakeAccept()
}

// takeRequest returns the oldest request with a peer that still waits for the answer,
// or nil.
func (l *listener) takeRequest() *connRequest {
	m := &l.dev.cm
	m.mu.Lock()
	defer m.mu.Unlock()
	l.queue = slices.DeleteFunc(l.queue, (*connRequest).isOver)
	if len(l.queue) == 0 {
		return nil
	}
	r := l.queue[0]
	l.queue = slices.Delete(l.queue, 0, 1)
	l.wakeAccept() // another Accept may wait
	return r
}

func (l *listener) wakeAccept() {
	select {
	case l.more <- struct{}{}:
	default:
	}
}

// Close implements verbs.Listener. Requests that Accept did not return are
// refused.
func (l *listener) Close() error {
	l.once.Do(func() {
		m := &l.dev.cm
		m.mu.Lock()
		defer m.mu.Unlock()
		close(l.done)
		m.listeners[l.id] = slices.DeleteFunc(m.listeners[l.id], func(o *listener) bool { return o == l })
		if len(m.listeners[l.id]) == 0 {
			delete(m.listeners, l.id)
		}
		for _, r := range l.queue {
			m.rejectRequest(r.c, &rejFields{about: aboutREQ, reason: reasonInvalidService})
		}
		l.queue = nil
	})
	return nil
}

func (m *connManager) closeListeners() {
	m.mu.Lock()
	var open []*listener
	for _, ls := range m.listeners {
		open = append(open, ls...)
	}
	m.mu.Unlock()
	for _, l := range open {
		l.Close()
	}
}

// onREQ handles a connection request.
func (m *connManager) onREQ(p *udpPort, peer netip.Addr, msg mad, fixedID bool) dropReason {
	f := decodeREQ(msg)
	if c := m.byPeer[peerKey{peer, f.guid, f.id}]; c != nil {
		return m.askedAgain(c)
	}
	l, no := m.checkRequest(p, peer, &f)
	if no != nil {
		m.sendMessage(p, peer, no.encode(msg.tid(), 0, f.id))
		return dropNone
	}
	c := m.newConn(p, peer, connReqReceived)
	c.remote, c.tid, c.guid, c.remoteQPN, c.fixedID = f.id, msg.tid(), f.guid, f.qpn, fixedID
	m.byPeer[c.peerKey()] = c
	m.admitHandshake(c)
	f.private = append([]byte(nil), f.private...)
	l.queueRequest(&connRequest{dev: m.dev, c: c, f: f})
	return dropNone
}

// askedAgain answers a REQ that was answered before.
func (m *connManager) askedAgain(c *cmConn) dropReason {
	switch {
	case c.state == connReqReceived:
		m.sendMessage(c.port, c.peer, newMRA(c.tid, c.local, c.remote, mraCode))
	case c.state == connLeft:
		m.sendMessage(c.port, c.peer, (&rejFields{about: aboutREQ, reason: reasonConsumer}).encode(c.tid, c.local, c.remote))
	case c.state == connRepSent, c.state == connTimeWait && c.last != nil && c.last.attribute() == attrREJ:
		m.sendMessage(c.port, c.peer, c.last)
	default:
		return dropState
	}
	return dropNone
}

// checkRequest returns the listener of a request, or its refusal.
func (m *connManager) checkRequest(p *udpPort, peer netip.Addr, f *reqFields) (*listener, *rejFields) {
	no := func(r rejectReason) (*listener, *rejFields) { return nil, &rejFields{about: aboutREQ, reason: r} }
	l := m.listenerFor(f.service, p.addr, f.pkey)
	source := peer.WithZone("")
	switch {
	case l == nil:
		return no(reasonInvalidService)
	case f.transport != 0:
		return no(reasonInvalidTransport)
	case !validQPN(f.qpn):
		return no(reasonUnsupported)
	case f.mtu < minMTUCode || f.mtu > m.mtuTo(p, peer):
		return nil, &rejFields{about: aboutREQ, reason: reasonInvalidMTU, ari: []byte{m.mtuTo(p, peer)}}
	case f.srcGID != source.As16() || f.dstGID != p.addr.As16():
		return no(reasonInvalidGID)
	case ofRDMACM(f.service) && (f.source != source || f.dest != p.addr.WithZone("")):
		return no(reasonConsumer)
	}
	return l, nil
}

// onRTU completes the passive side.
func (m *connManager) onRTU(c *cmConn, msg mad) dropReason {
	if c.state != connRepSent && c.state != connLeft || msg.sender() != c.remote || msg.tid() != c.tid {
		return dropState
	}
	m.removeHandshake(c)
	if c.state == connLeft {
		c.sayDREQ()
		return dropNone
	}
	c.state = connEstablished
	c.timer.Stop()
	m.endPredecessor(c)
	c.q.confirmed.Store(true)
	c.q.cq.Submit(c.q)
	return dropNone
}

// connRequest implements verbs.ConnRequest.
type connRequest struct {
	dev *Device
	c   *cmConn
	f   reqFields

	pkey uint16 // of the connection
}

// isOver reports whether the request cannot be answered any more. manager.mu is
// held.
func (r *connRequest) isOver() bool { return r.c.state != connReqReceived }

func (r *connRequest) Private() []byte { return r.f.private }

func (r *connRequest) LocalAddr() netip.AddrPort {
	return netip.AddrPortFrom(r.c.port.addr, portOf(r.f.service))
}

func (r *connRequest) RemoteAddr() netip.AddrPort {
	return netip.AddrPortFrom(r.c.peer, r.f.sourcePort)
}

// Accept implements verbs.ConnRequest.
func (r *connRequest) Accept(v verbs.QP, private []byte) error {
	q, ok := v.(*qp)
	if !ok || q.dev != r.dev {
		return fmt.Errorf("accept %s: %w", r.RemoteAddr(), softverbs.ErrForeign)
	}
	if err := q.Begin(private, repPrivateLen); err != nil {
		return fmt.Errorf("accept %s: %w", r.RemoteAddr(), err)
	}
	if err := r.dev.cm.acceptRequest(r, q, private); err != nil {
		if q.Move(softverbs.Connecting, softverbs.Down) {
			q.cq.giveNumber(q)
		}
		return fmt.Errorf("accept %s: %w", r.RemoteAddr(), err)
	}
	return nil
}

func (m *connManager) acceptRequest(r *connRequest, q *qp, private []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := r.c
	if c.state != connReqReceived || m.stopped {
		return fmt.Errorf("peer has given up: %w", verbs.ErrClosed)
	}
	f := repFields{
		guid: m.guid, qpn: q.qpn, psn: random32() & psnMask, private: private,
		respRes:   min(uint8(m.dev.cfg.IRD), r.f.initDepth),
		initDepth: min(uint8(m.dev.cfg.ORD), r.f.respRes),
	}
	l := &connAgreement{
		port: c.port, peer: c.peer, local: r.LocalAddr(), remote: r.RemoteAddr(), peerQPN: r.f.qpn, pkey: r.pkey, mtu: r.f.mtu,
		sendPSN: r.f.psn, recvPSN: f.psn, ird: int(f.respRes), ord: int(f.initDepth),
	}
	c.state = connRepSent
	if err := m.establishConn(c, q, l, true); err != nil {
		c.enterLinger(nil)
		return err
	}
	c.sendKept(f.encode(c.tid, c.local, c.remote))
	c.setTimer(m.dev.cfg.ConnectTimeout)
	return nil
}

// Reject implements verbs.ConnRequest.
func (r *connRequest) Reject(private []byte) error {
	private = private[:min(len(private), rejPrivateLen)]
	m := &r.dev.cm
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.rejectRequest(r.c, &rejFields{about: aboutREQ, reason: reasonConsumer, private: private}) {
		return fmt.Errorf("reject %s: peer has given up: %w", r.RemoteAddr(), verbs.ErrClosed)
	}
	return nil
}

// rejectRequest answers a request with f, and its repetitions too. It reports whether
// the request still waits for an answer.
func (m *connManager) rejectRequest(c *cmConn, f *rejFields) bool {
	if c.state != connReqReceived || m.stopped {
		return false
	}
	no := f.encode(c.tid, 0, c.remote)
	c.enterLinger(no)
	m.sendMessage(c.port, c.peer, no)
	return true
}
