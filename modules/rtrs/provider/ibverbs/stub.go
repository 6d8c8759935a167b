//go:build !(linux && cgo && ibverbs)

package ibverbs

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Built reports whether this program has the fabric.
const Built = false

// Fabric is all RDMA devices of the host.
type Fabric struct{}

// Open returns a fabric that says that it is not built in.
func Open(cfg Config) *Fabric {
	_ = cfg.withDefaults()
	return &Fabric{}
}

// DeviceFor implements verbs.Chooser.
func (f *Fabric) DeviceFor(_ context.Context, _, dst netip.Addr) (verbs.Device, error) {
	return nil, fmt.Errorf("reach %s: %w", verbs.AddrString(dst), ErrNotBuilt)
}

// AllocPD implements verbs.Device.
func (f *Fabric) AllocPD() (verbs.PD, error) { return nil, ErrNotBuilt }

// CreateCQ implements verbs.Device.
func (f *Fabric) CreateCQ(int) (verbs.CQ, error) { return nil, ErrNotBuilt }

// CreateQP implements verbs.Device.
func (f *Fabric) CreateQP(verbs.PD, verbs.QPConfig) (verbs.QP, error) { return nil, ErrNotBuilt }

// Connect implements verbs.Device.
func (f *Fabric) Connect(context.Context, verbs.QP, verbs.ConnectParams) ([]byte, error) {
	return nil, ErrNotBuilt
}

// Listen implements verbs.Device.
func (f *Fabric) Listen(addr netip.AddrPort) (verbs.Listener, error) {
	return nil, fmt.Errorf("listen at %s: %w", addr, ErrNotBuilt)
}

// Close implements verbs.Device.
func (f *Fabric) Close() error { return nil }
