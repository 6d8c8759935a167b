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
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The passive side of a connection.

// backlog is how many requests may wait for Accept.
const backlog = 128

// softAckTimeout, 4.3 s, is for servers on rxe: Linux 6.12's cannot repeat a
// packet behind a window that was bound, the connection fails instead. A busy
// host must not look like a lost packet.
const softAckTimeout = 20

type listener struct {
	f     *Fabric
	ids   []*cmID
	addr  netip.AddrPort
	queue chan *request

	once   sync.Once
	closed chan struct{}
}

// Listen implements verbs.Device. A wildcard address is that of all devices,
// those to come included; that of IPv6 stands for GIDs too.
func (f *Fabric) Listen(addr netip.AddrPort) (verbs.Listener, error) {
	l, err := f.listen(addr)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", verbs.AddrPortString(addr), err)
	}
	return l, nil
}

func (f *Fabric) listen(addr netip.AddrPort) (*listener, error) {
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.refresh(); err != nil {
		return nil, err
	}
	l := &listener{f: f, queue: make(chan *request, backlog), closed: make(chan struct{})}
	if err := l.bind(addr); err != nil {
		if errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.EADDRNOTAVAIL) {
			return nil, fmt.Errorf("%w has this address: %w", ErrNoDevice, err)
		}
		return nil, err
	}
	l.addr = netip.AddrPortFrom(addr.Addr(), l.ids[0].localAddr().Port())
	if addr.Addr() == netip.IPv6Unspecified() {
		gids := netip.AddrPortFrom(verbs.GID(netip.IPv6Unspecified()), l.addr.Port())
		if err := l.bind(gids); err != nil {
			f.cfg.Logger.Warn("ibverbs: clients reach this listener by IP address, not by GID", "listener", l.addr, "err", err)
		}
	}
	f.mu.Lock()
	f.lists[l] = struct{}{}
	f.mu.Unlock()
	return l, nil
}

// bind makes an identifier that listens at addr.
func (l *listener) bind(addr netip.AddrPort) error {
	id, err := l.f.newID(l, addr.Addr())
	if err != nil {
		return err
	}
	at := toC(addr)
	if err := errnoOf(C.rv_listen(id.id, &at, backlog)); err != nil {
		id.destroy()
		return err
	}
	l.ids = append(l.ids, id)
	return nil
}

// cmEvent takes a request.
func (l *listener) cmEvent(e event) {
	if e.kind != C.RDMA_CM_EVENT_CONNECT_REQUEST {
		return
	}
	r := &request{f: l.f, private: e.private}
	r.id = l.f.adopt(e.id, r)
	select {
	case <-l.closed:
	case l.queue <- r:
		return
	default:
		l.f.cfg.Logger.Warn("ibverbs: too many connection requests wait", "listener", l.addr)
	}
	go r.Reject(nil)
}

// Accept implements verbs.Listener.
func (l *listener) Accept() (verbs.ConnRequest, error) {
	select {
	case <-l.closed:
		return nil, verbs.ErrClosed
	default:
	}
	select {
	case r := <-l.queue:
		return r, nil
	case <-l.closed:
		return nil, verbs.ErrClosed
	}
}

// Addr implements verbs.Listener.
func (l *listener) Addr() netip.AddrPort { return l.addr }

// Close implements verbs.Listener.
func (l *listener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.f.mu.Lock()
		delete(l.f.lists, l)
		l.f.mu.Unlock()
		for _, id := range l.ids {
			id.destroy()
		}
		for {
			select {
			case r := <-l.queue:
				r.Reject(nil)
				continue
			default:
			}
			return
		}
	})
	return nil
}

// request implements verbs.DeviceRequest.
type request struct {
	f       *Fabric
	id      *cmID
	private []byte
	gone    atomic.Bool // the peer has given up
}

// cmEvent takes the events before the answer.
func (r *request) cmEvent(event) { r.gone.Store(true) }

func (r *request) Private() []byte            { return r.private }
func (r *request) LocalAddr() netip.AddrPort  { return r.id.localAddr() }
func (r *request) RemoteAddr() netip.AddrPort { return r.id.remoteAddr() }

// Device implements verbs.DeviceRequest. It is nil when the device was removed.
func (r *request) Device() verbs.Device {
	d, err := r.f.deviceOf(C.rv_id_context(r.id.id))
	if err != nil {
		return nil
	}
	return d
}

// Accept implements verbs.ConnRequest.
func (r *request) Accept(v verbs.QP, private []byte) error {
	q, ok := v.(*qp)
	if !ok || q.dev.f != r.f {
		r.Reject(nil)
		return fmt.Errorf("accept: %w", errNotOurs)
	}
	from := r.RemoteAddr()
	if err := r.accept(q, private); err != nil {
		r.Reject(nil)
		return fmt.Errorf("accept connection from %s: %w", from, err)
	}
	return nil
}

func (r *request) accept(q *qp, private []byte) error {
	if !q.move(phaseIdle, phaseConnecting) {
		return errUsed
	}
	q.setAddrs(r.id)
	err := q.dev.connectable(C.rv_id_context(r.id.id))
	if err == nil {
		err = q.create(r.id)
	}
	if err != nil {
		q.move(phaseConnecting, phaseFailed)
		q.takeID()
		return err
	}
	if q.dev.software && q.dev.info.Caps&verbs.CapKeyRotation != 0 {
		C.rv_ack_timeout(r.id.id, softAckTimeout)
	}
	q.setID(r.id)
	r.id.pass(q)
	q.goUp() // before the peer can know, so that its end finds the queue pair up
	cfg := &r.f.cfg
	err = errnoOf(C.rv_accept(r.id.id, bytePointer(private), C.int(len(private)), C.int(cfg.IRD), C.int(cfg.ORD)))
	if err == nil && r.gone.Load() {
		q.Disconnect() // the peer gave up before we took over its events
	}
	if err != nil && q.move(phaseUp, phaseFailed) {
		q.takeID()
		return err
	}
	q.patience() // one that is ending already tells its owner
	return nil
}

// Reject implements verbs.ConnRequest.
func (r *request) Reject(private []byte) error {
	err := errnoOf(C.rv_reject(r.id.id, bytePointer(private), C.int(len(private))))
	r.id.destroy()
	if err != nil {
		return fmt.Errorf("reject connection: %w", err)
	}
	return nil
}
