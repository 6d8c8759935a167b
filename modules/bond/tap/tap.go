// Package tap makes a TAP of Linux the upper side of a bond over Ethernet: the
// host's stack, or that of a network namespace, uses the bond through it.
//
// The interface follows the bond: its carrier is the bond's, its address that of
// the active slave. The bond follows the interface: `ip link set bond0 up` brings it up.
package tap

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/internal/ifctl"
	"github.com/rnbd-go/rnbd/modules/bond/internal/tuntap"
)

// Interface is a TAP. It implements dev.Upper.
type Interface struct{ *tuntap.Interface }

var _ dev.Upper = (*Interface)(nil)

// Open makes the TAP in the network namespace at path; an empty path is the
// namespace of the thread. It needs CAP_NET_ADMIN there. The interface ends with Close, or with the
// process.
func Open(name, path string, c dev.UpperCallbacks) (*Interface, error) {
	i, err := tuntap.Open(tuntap.Kind{Name: "TAP", Make: ifctl.TAP}, name, path, c)
	if err != nil {
		return nil, err
	}
	return &Interface{i}, nil
}

// Configure implements dev.Upper. A TAP can be Ethernet alone.
func (i *Interface) Configure(a dev.Attrs) error {
	if a.Type != frame.Ethernet {
		return fmt.Errorf("a TAP cannot have type %d: %w", a.Type, unix.EINVAL)
	}
	if err := i.SetAddress(a.Address); err != nil {
		return err
	}
	return i.SetMTU(a.MTU)
}

// SetAddress implements dev.Upper.
func (i *Interface) SetAddress(addr []byte) error { return i.Ctl.SetAddress(i.Name, addr) }

// Deliver implements dev.Upper.
func (i *Interface) Deliver(f []byte) error { return i.Write(f) }
