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
	queue chan *connRequest

	once   sync.Once
	closed chan struct{}
}

// Listen implements verbs.Device. A wildcard address is that of all devices,
// those to come included; that of IPv6 stands for GIDs too.
func (f *Fabric) Listen(addr netip.AddrPort) (verbs.Listener, error) {
	l, err := f.listenOn(addr)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", verbs.AddrPortString(addr), err)
	}
	return l, nil
}

func (f *Fabric) listenOn(addr netip.AddrPort) (*listener, error) {
	if err := f.openChannel(); err != nil {
		return nil, err
	}
	if err := f.refreshDevices(); err != nil {
		return nil, err
	}
	l := &listener{f: f, queue: make(chan *connRequest, backlog), closed: make(chan struct{})}
	if err := l.bindID(addr); err != nil {
		if errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.EADDRNOTAVAIL) {
			return nil, fmt.Errorf("%w has this address: %w", ErrNoDevice, err)
		}
		return nil, err
	}
	l.addr = netip.AddrPortFrom(addr.Addr(), l.ids[0].localAddr().Port())
	if addr.Addr() == netip.IPv6Unspecified() {
		gids := netip.AddrPortFrom(verbs.GID(netip.IPv6Unspecified()), l.addr.Port())
		if err := l.bindID(gids); err != nil {
			f.cfg.Logger.Warn("ibverbs: clients reach this listener by IP address, not by GID", "listener", l.addr, "err", err)
		}
	}
	f.mu.Lock()
	f.lists[l] = struct{}{}
	f.mu.Unlock()
	return l, nil
}

// bindID makes an identifier that listens at addr.
func (l *listener) bindID(addr netip.AddrPort) error {
	id, err := l.f.newID(l, addr.Addr())
	if err != nil {
		return err
	}
	at := toC(addr)
	if err := errnoOf(C.rv_listen(id.id, &at, backlog)); err != nil {
		id.destroyID()
		return err
	}
	l.ids = append(l.ids, id)
	return nil
}

// cmEvent takes a request.
func (l *listener) cmEvent(e cmEventCopy) {
	if e.kind != C.RDMA_CM_EVENT_CONNECT_REQUEST {
		return
	}
	r := &connRequest{f: l.f, private: e.private}
	r.id = l.f.adoptID(e.id, r)
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
			id.destroyID()
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

// connRequest implements verbs.DeviceRequest.
type connRequest struct {
	f       *Fabric
	id      *cmID
	private []byte
	gone    atomic.Bool // the peer has given up
}

// cmEvent takes the events before the answer.
func (r *connRequest) cmEvent(cmEventCopy) { r.gone.Store(true) }

func (r *connRequest) Private() []byte            { return r.private }
func (r *connRequest) LocalAddr() netip.AddrPort  { return r.id.localAddr() }
func (r *connRequest) RemoteAddr() netip.AddrPort { return r.id.remoteAddr() }

// Device implements verbs.DeviceRequest. It is nil when the device was removed.
func (r *connRequest) Device() verbs.Device {
	d, err := r.f.deviceOf(C.rv_id_context(r.id.id))
	if err != nil {
		return nil
	}
	return d
}

// Accept implements verbs.ConnRequest.
func (r *connRequest) Accept(v verbs.QP, private []byte) error {
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

func (r *connRequest) accept(q *qp, private []byte) error {
	if !q.setPhase(phaseIdle, phaseConnecting) {
		return errUsed
	}
	q.setAddrs(r.id)
	err := q.dev.checkContext(C.rv_id_context(r.id.id))
	if err == nil {
		err = q.createQP(r.id)
	}
	if err != nil {
		q.setPhase(phaseConnecting, phaseFailed)
		q.takeID()
		return err
	}
	if q.dev.software && q.dev.info.Caps&verbs.CapKeyRotation != 0 {
		C.rv_ack_timeout(r.id.id, softAckTimeout)
	}
	q.setID(r.id)
	r.id.setSink(q)
	q.goUp() // before the peer can know, so that its end finds the queue pair up
	cfg := &r.f.cfg
	err = errnoOf(C.rv_accept(r.id.id, bytePointer(private), C.int(len(private)), C.int(cfg.IRD), C.int(cfg.ORD)))
	if err == nil && r.gone.Load() {
		q.Disconnect() // the peer gave up before we took over its events
	}
	if err != nil && q.setPhase(phaseUp, phaseFailed) {
		q.takeID()
		return err
	}
	q.setRetries() // one that is ending already tells its owner
	return nil
}

// Reject implements verbs.ConnRequest.
func (r *connRequest) Reject(private []byte) error {
	err := errnoOf(C.rv_reject(r.id.id, bytePointer(private), C.int(len(private))))
	r.id.destroyID()
	if err != nil {
		return fmt.Errorf("reject connection: %w", err)
	}
	return nil
}
