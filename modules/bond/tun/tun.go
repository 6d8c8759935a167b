// Package tun makes a TUN of Linux the upper side of a bond over devices of
// InfiniBand's type: the host's stack, or that of a network namespace, uses the
// bond through it. Frames of the bond have the encapsulation header of RFC
// 4391. It stands for the packet's type here.
//
// Linux lets a TUN have the type 32, but no link-layer address: the bond's own is
// in its control files alone. The kernel gives such an interface no IPv6
// link-local address either.
package tun

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/internal/ifctl"
	"github.com/rnbd-go/rnbd/modules/bond/internal/tuntap"
)

// Interface is a TUN. It implements dev.Upper.
type Interface struct{ *tuntap.Interface }

var _ dev.Upper = (*Interface)(nil)

// header is the length of the encapsulation header.
const header = 4

// Open makes the TUN in the network namespace at path; an empty path is the
// namespace of the thread. It needs CAP_NET_ADMIN there. The interface ends with Close, or with the
// process.
func Open(name, path string, c dev.UpperCallbacks) (*Interface, error) {
	i, err := tuntap.Open(tuntap.Kind{Name: "TUN", Make: ifctl.TUN, Header: header, Fill: writeHeader}, name, path, c)
	if err != nil {
		return nil, err
	}
	return &Interface{i}, nil
}

// writeHeader writes the header of an IP packet.
func writeHeader(f []byte) {
	etherType := uint16(frame.TypeIPv4)
	if f[header]>>4 == 6 {
		etherType = frame.TypeIPv6
	}
	binary.BigEndian.PutUint16(f, etherType)
}

// Configure implements dev.Upper. A bond without slaves is Ethernet. A TUN has
// no such type: it has none then.
func (i *Interface) Configure(a dev.Attrs) error {
	linkType := a.Type
	switch a.Type {
	case frame.Ethernet:
		linkType = unix.ARPHRD_NONE
	case frame.InfiniBand:
	default:
		return fmt.Errorf("a TUN cannot have type %d: %w", a.Type, unix.EINVAL)
	}
	flags, err := i.Ctl.Flags(i.Name)
	if err != nil {
		return err
	}
	up := flags&unix.IFF_UP != 0
	if up {
		if err := i.SetUp(false); err != nil {
			return err
		}
	}
	err = errors.Join(i.Control(func(fd int) error { return unix.IoctlSetInt(fd, unix.TUNSETLINK, int(linkType)) }), i.SetMTU(a.MTU))
	if up {
		err = errors.Join(err, i.SetUp(true))
	}
	return err
}

// SetAddress implements dev.Upper. EINVAL says that the address is one of
// Ethernet: the first slave is of that type, and its frames are not for a TUN.
func (i *Interface) SetAddress(addr []byte) error {
	if len(addr) == 6 {
		return fmt.Errorf("a TUN has no Ethernet address: %w", unix.EINVAL)
	}
	return nil
}

// Deliver implements dev.Upper. The users get IP; ARP is the slaves' own.
func (i *Interface) Deliver(f []byte) error {
	etherType, packet, ok := frame.Split(frame.InfiniBand, f)
	if !ok || etherType != frame.TypeIPv4 && etherType != frame.TypeIPv6 {
		return nil
	}
	return i.Write(packet)
}
