package loopback

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// dialRequest is a connection request from Connect until its answer has arrived.
type dialRequest struct {
	net      *Network
	qp       *queuePair
	src, dst netip.AddrPort
	private  []byte
	done     chan struct{} // closed when the dialling end knows the answer

	// Guarded by net.mu.
	arrived  bool // the listener has it
	answered bool // by Accept or Reject, or by the end of the listener
	gone     bool // the dialling end gave up
	reply    []byte
	err      error
}

func (d *loopDevice) Connect(ctx context.Context, q verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	p, err := p.IP()
	if err != nil {
		return nil, fmt.Errorf("loopback: connect: %w", err)
	}
	private, err := d.connectQP(ctx, q.(*queuePair), p)
	if err != nil {
		return nil, fmt.Errorf("loopback: connect to %s: %w", p.Dst, err)
	}
	return private, nil
}

func (d *loopDevice) connectQP(ctx context.Context, q *queuePair, p verbs.ConnectParams) ([]byte, error) {
	if len(p.Private) > verbs.MaxPrivate {
		return nil, fmt.Errorf("%d bytes of private data, at most %d: %w", len(p.Private), verbs.MaxPrivate, syscall.EINVAL)
	}
	dl := &dialRequest{net: d.net, qp: q, dst: p.Dst, private: slices.Clone(p.Private), done: make(chan struct{})}
	if err := dl.claimPort(p.Src); err != nil {
		return nil, err
	}
	d.net.emitEvent(Event{Kind: KindConnect, From: dl.src, To: dl.dst, Data: dl.private})
	dl.sendRequest()
	select {
	case <-dl.done:
	case <-ctx.Done():
		dl.giveUp(ctx.Err())
	}
	return dl.awaitResult()
}

// awaitResult returns the answer, after done is closed.
func (dl *dialRequest) awaitResult() ([]byte, error) {
	dl.net.mu.Lock()
	defer dl.net.mu.Unlock()
	if dl.err != nil {
		return nil, dl.err
	}
	return dl.reply, nil
}

// claimPort claims the queue pair and a port.
func (dl *dialRequest) claimPort(src netip.Addr) error {
	n := dl.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if dl.qp.state != stateIdle {
		return fmt.Errorf("queue pair is in use: %w", syscall.EISCONN)
	}
	if !src.IsValid() {
		src = loopbackLike(dl.dst.Addr())
	}
	dl.src = netip.AddrPortFrom(src, n.allocPort())
	dl.qp.state, dl.qp.dial = stateConnecting, dl
	dl.qp.local, dl.qp.remote = dl.src, dl.dst
	return nil
}

func loopbackLike(like netip.Addr) netip.Addr {
	if like.Is6() && !like.Is4In6() {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// sendRequest brings the request to the listener; a stalled link keeps it.
func (dl *dialRequest) sendRequest() {
	n := dl.net
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dials = append(n.dials, dl)
	n.progressDials()
}

// progressDials moves requests and answers that no fault holds up.
func (n *Network) progressDials() {
	for _, dl := range slices.Clone(n.dials) {
		if !dl.arrived && !n.linkStalled(dl.src, dl.dst) {
			dl.onArrival()
		}
		if dl.answered && !n.linkStalled(dl.dst, dl.src) {
			dl.finishDial()
		}
	}
}

func (dl *dialRequest) onArrival() {
	dl.arrived = true
	l, err := dl.net.findListener(dl.dst)
	if err != nil {
		dl.answered, dl.err = true, err
		return
	}
	l.queue = append(l.queue, dl)
	l.wake.Broadcast()
}

// finishDial tells the dialling end.
func (dl *dialRequest) finishDial() {
	n := dl.net
	if i := slices.Index(n.dials, dl); i >= 0 {
		n.dials = slices.Delete(n.dials, i, i+1)
		dl.qp.dial = nil
		if dl.err != nil {
			dl.qp.state = stateDead
		} else {
			dl.qp.makeUsable()
		}
		close(dl.done)
	}
}

// giveUp ends the request for reason, unless the answer was there first.
func (dl *dialRequest) giveUp(reason error) {
	n := dl.net
	n.mu.Lock()
	defer n.mu.Unlock()
	n.abandonDial(dl, reason)
}

func (n *Network) abandonDial(dl *dialRequest, reason error) {
	i := slices.Index(n.dials, dl)
	if i < 0 {
		return
	}
	n.dials = slices.Delete(n.dials, i, i+1)
	dl.gone, dl.err = true, reason
	dl.qp.state, dl.qp.dial = stateDead, nil
	if c := dl.qp.conn; c != nil { // accepted, but we never heard of it
		c.sendBye(dl.qp.side)
		c.freeUnreceived()
	}
	close(dl.done)
}

// listener is a passive end point.
type listener struct {
	dev  *loopDevice
	addr netip.AddrPort

	// Guarded by net.mu.
	wake   *sync.Cond
	queue  []*dialRequest
	closed bool
}

func (d *loopDevice) Listen(addr netip.AddrPort) (verbs.Listener, error) {
	n := d.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("loopback: listen on %s: device: %w", addr, verbs.ErrClosed)
	}
	if addr.Port() == 0 {
		addr = netip.AddrPortFrom(addr.Addr(), n.allocPort())
	}
	if n.listeners[addr] != nil {
		return nil, fmt.Errorf("loopback: listen on %s: %w", addr, syscall.EADDRINUSE)
	}
	l := &listener{dev: d, addr: addr, wake: sync.NewCond(&n.mu)}
	n.listeners[addr] = l
	return l, nil
}

func (l *listener) Addr() netip.AddrPort { return l.addr }

func (l *listener) Accept() (verbs.ConnRequest, error) {
	l.dev.net.mu.Lock()
	defer l.dev.net.mu.Unlock()
	for len(l.queue) == 0 && !l.closed {
		l.wake.Wait()
	}
	if l.closed {
		return nil, fmt.Errorf("loopback: accept on %s: %w", l.addr, verbs.ErrClosed)
	}
	dl := l.queue[0]
	l.queue = l.queue[1:]
	return &connRequest{dial: dl}, nil
}

func (l *listener) Close() error {
	l.dev.net.mu.Lock()
	defer l.dev.net.mu.Unlock()
	l.close()
	return nil
}

// close refuses the requests that were not accepted.
func (l *listener) close() {
	n := l.dev.net
	if l.closed {
		return
	}
	l.closed = true
	delete(n.listeners, l.addr)
	for _, dl := range l.queue {
		n.answerDial(dl, nil, fmt.Errorf("listener closed: %w", syscall.ECONNREFUSED))
	}
	l.queue = nil
	l.wake.Broadcast()
}

// connRequest is a connection request at the passive end.
type connRequest struct {
	dial *dialRequest
	used bool // guarded by net.mu
}

func (r *connRequest) Private() []byte            { return r.dial.private }
func (r *connRequest) LocalAddr() netip.AddrPort  { return r.dial.dst }
func (r *connRequest) RemoteAddr() netip.AddrPort { return r.dial.src }

func (r *connRequest) Accept(q verbs.QP, private []byte) error {
	reply, err := r.claimAnswer(private)
	if err == nil {
		r.dial.net.emitEvent(Event{Kind: KindAccept, From: r.dial.dst, To: r.dial.src, Data: reply})
		err = r.acceptWith(q.(*queuePair), reply)
	}
	if err != nil {
		return fmt.Errorf("loopback: accept %s: %w", r.dial.src, err)
	}
	return nil
}

func (r *connRequest) acceptWith(q *queuePair, reply []byte) error {
	dl, n := r.dial, r.dial.net
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case q.state != stateIdle:
		n.answerDial(dl, nil, fmt.Errorf("the peer could not accept: %w", syscall.ECONNRESET))
		return fmt.Errorf("queue pair is in use: %w", syscall.EISCONN)
	case dl.gone:
		q.state = stateDead
		return fmt.Errorf("the peer gave up: %w", syscall.ECONNRESET)
	}
	q.local, q.remote = dl.dst, dl.src
	n.joinQPs(dl.qp, q)
	q.makeUsable()
	n.answerDial(dl, reply, nil)
	return nil
}

func (r *connRequest) Reject(private []byte) error {
	reply, err := r.claimAnswer(private)
	if err != nil {
		return fmt.Errorf("loopback: reject %s: %w", r.dial.src, err)
	}
	r.dial.net.emitEvent(Event{Kind: KindReject, From: r.dial.dst, To: r.dial.src, Data: reply})
	n := r.dial.net
	n.mu.Lock()
	defer n.mu.Unlock()
	n.answerDial(r.dial, nil, &verbs.RejectError{Private: reply})
	return nil
}

// answerDial sends the answer to the dialling end. An end that gave up keeps its own reason.
func (n *Network) answerDial(dl *dialRequest, reply []byte, err error) {
	if dl.gone {
		return
	}
	dl.answered, dl.reply, dl.err = true, reply, err
	n.progressDials()
}

// claimAnswer claims the request for its only answer and copies private.
func (r *connRequest) claimAnswer(private []byte) ([]byte, error) {
	if len(private) > verbs.MaxPrivate {
		return nil, fmt.Errorf("%d bytes of private data, at most %d: %w", len(private), verbs.MaxPrivate, syscall.EINVAL)
	}
	r.dial.net.mu.Lock()
	defer r.dial.net.mu.Unlock()
	if r.used {
		return nil, fmt.Errorf("answered before: %w", verbs.ErrClosed)
	}
	r.used = true
	return slices.Clone(private), nil
}
