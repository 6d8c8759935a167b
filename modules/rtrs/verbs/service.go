package verbs

import (
	"context"
	"errors"
	"net/netip"
)

// ServiceDevice is a Device that also makes connections by service ID, in a
// partition: those of InfiniBand's connection manager without the addresses of
// rdma_cm in their private data.
type ServiceDevice interface {
	Device
	// ListenService accepts connections to s.ID at s.Local. The port of the
	// listener's address is 0.
	ListenService(s Service) (Listener, error)
	// ConnectService joins qp to the listener for s.ID at the address dst, from
	// s.Local. It is Connect otherwise. The error is ErrNoService if nothing
	// listens there in the partition.
	ConnectService(ctx context.Context, qp QP, s Service, dst netip.Addr, private []byte) (answer []byte, err error)
}

// Service names one end of connections by service ID.
type Service struct {
	Local netip.Addr // address of the port
	ID    uint64     // not one of rdma_cm
	PKey  uint16     // of the partition; 0: DefaultPKey
}

// ErrNoService is the refusal of a connection to a service without a listener.
var ErrNoService = errors.New("no such service at the peer")
