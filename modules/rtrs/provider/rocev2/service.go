package rocev2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Connections by service ID: those of the connection manager without the header
// of rdma_cm.

var _ verbs.ServiceDevice = (*Device)(nil)

var errOfRDMACM = errors.New("the service ID is one of rdma_cm: use Listen and Connect")

// portOf returns the port of rdma_cm that a service is, 0 if it is none.
func portOf(service uint64) uint16 {
	if !ofRDMACM(service) {
		return 0
	}
	return uint16(service)
}

// checkService returns s with defaults for its missing fields. It refuses a
// service that cannot exist.
func checkService(s verbs.Service) (verbs.Service, error) {
	s.Local, s.PKey = s.Local.Unmap(), cmp.Or(s.PKey, verbs.DefaultPKey)
	switch {
	case ofRDMACM(s.ID):
		return s, errOfRDMACM
	case s.PKey&pkeyBase == 0:
		return s, fmt.Errorf("P_Key 0x%04x names no partition", s.PKey)
	}
	return s, nil
}

// ListenService implements verbs.ServiceDevice.
func (d *Device) ListenService(s verbs.Service) (verbs.Listener, error) {
	l, err := d.listenService(s)
	if err != nil {
		return nil, fmt.Errorf("listen for service %#x at %s: %w", s.ID, s.Local, err)
	}
	return l, nil
}

func (d *Device) listenService(s verbs.Service) (verbs.Listener, error) {
	s, err := checkService(s)
	if err != nil {
		return nil, err
	}
	if d.isClosed() {
		return nil, verbs.ErrClosed
	}
	if _, err := d.portAt(s.Local); err != nil {
		return nil, err
	}
	m := &d.cm
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.idTaken(s.ID, s.Local, s.PKey) {
		return nil, errors.New("another listener of this device has the service")
	}
	return m.newListener(netip.AddrPortFrom(s.Local, 0), s.ID, s.PKey), nil
}

// ConnectService implements verbs.ServiceDevice.
func (d *Device) ConnectService(ctx context.Context, v verbs.QP, s verbs.Service, dst netip.Addr, private []byte) ([]byte, error) {
	q, ok := v.(*qp)
	if !ok || q.dev != d {
		return nil, fmt.Errorf("connect to service %#x at %s: %w", s.ID, dst, softverbs.ErrForeign)
	}
	s, err := checkService(s)
	if err == nil {
		err = q.Begin(private, reqPrivateLen)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to service %#x at %s: %w", s.ID, dst, err)
	}
	answer, err := d.connectTo(ctx, q, connTarget{src: s.Local, dst: dst.Unmap(), service: s.ID, pkey: s.PKey, private: private})
	if err != nil {
		if q.Move(softverbs.Connecting, softverbs.Down) {
			q.cq.giveNumber(q)
		}
		return nil, fmt.Errorf("connect to service %#x at %s: %w", s.ID, dst, err)
	}
	return answer, nil
}
