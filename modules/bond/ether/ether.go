// Package ether makes an Ethernet interface of Linux a slave of a bond, by a
// packet socket.
//
// The interface must be in a network namespace without any addresses. Else the
// kernel answers the frames that come in on it, as well as the bond's users.
//
// Frames that Linux merged on receipt (GRO) are handed over merged, with their
// checksums filled in.
package ether

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/internal/ifctl"
	"github.com/rnbd-go/rnbd/modules/bond/netns"
)

// Device is an interface as a slave. It implements dev.Slave.
type Device struct {
	name   string
	index  int
	ctl    *ifctl.Control
	socket *os.File
	fd     int
	watch  *ifctl.Watch
	done   chan struct{}

	filter atomic.Uint32
	calls  atomic.Pointer[dev.Callbacks]

	mu    sync.Mutex
	attrs dev.Attrs
}

var _ dev.Slave = (*Device)(nil)

// Open opens the interface name of the network namespace at path; an empty path is
// the namespace of the thread. It needs CAP_NET_ADMIN and CAP_NET_RAW there.
func Open(name, path string) (d *Device, err error) {
	err = netns.Do(path, func() error {
		d, err = open(name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open interface %s: %w", name, err)
	}
	return d, nil
}

func open(name string) (*Device, error) {
	ctl, err := ifctl.Open()
	if err != nil {
		return nil, err
	}
	d := &Device{name: name, ctl: ctl, fd: -1, done: make(chan struct{})}
	if err := d.startReceive(); err != nil {
		if d.fd >= 0 && d.socket == nil {
			unix.Close(d.fd)
		}
		if d.socket != nil {
			d.socket.Close()
		}
		ctl.Close()
		return nil, err
	}
	go d.receiveLoop()
	return d, nil
}

func (d *Device) startReceive() (err error) {
	if d.index, err = d.ctl.Index(d.name); err != nil {
		return err
	}
	if err := d.readAttrs(); err != nil {
		return err
	}
	if d.attrs.Type != frame.Ethernet {
		return fmt.Errorf("its type is %d, want %d: %w", d.attrs.Type, frame.Ethernet, unix.EINVAL)
	}
	if d.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return err
	}
	for _, option := range []int{unix.PACKET_VNET_HDR, unix.PACKET_IGNORE_OUTGOING} {
		if err := unix.SetsockoptInt(d.fd, unix.SOL_PACKET, option, 1); err != nil {
			return err
		}
	}
	unix.SetsockoptInt(d.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<20) // as much as is allowed
	all := uint16(unix.ETH_P_ALL)
	if err := unix.Bind(d.fd, &unix.SockaddrLinklayer{Protocol: all>>8 | all<<8, Ifindex: d.index}); err != nil {
		return err
	}
	d.socket = os.NewFile(uintptr(d.fd), "packet:"+d.name)
	d.watch, err = ifctl.NewWatch(ifctl.Links, d.onChange)
	return err
}

// Close closes the sockets. The interface itself stays.
func (d *Device) Close() error {
	d.watch.Close()
	d.socket.Close()
	<-d.done
	return d.ctl.Close()
}

func (d *Device) onChange() {
	if c := d.calls.Load(); c != nil && c.Changed != nil {
		c.Changed()
	}
}

// readAttrs reads the attributes of the interface.
func (d *Device) readAttrs() error {
	linkType, addr, err := d.ctl.Address(d.name)
	if err != nil {
		return err
	}
	mtu, err := d.ctl.MTU(d.name)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.attrs = dev.Attrs{Type: linkType, Address: addr, Broadcast: bytes.Repeat([]byte{0xff}, 6), HeaderLen: 14, MTU: mtu}
	return nil
}

// Name implements dev.Slave.
func (d *Device) Name() string { return d.name }

// Attrs implements dev.Slave.
func (d *Device) Attrs() dev.Attrs {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.attrs
}

// Speed implements dev.Slave.
func (d *Device) Speed() (int, bool) { return d.ctl.Speed(d.name) }

// IsUp implements dev.Slave.
func (d *Device) IsUp() bool {
	flags, err := d.ctl.Flags(d.name)
	return err == nil && flags&unix.IFF_UP != 0
}

// SetUp implements dev.Slave.
func (d *Device) SetUp(up bool) error { return d.ctl.SetUp(d.name, up) }

// Carrier implements dev.Slave.
func (d *Device) Carrier() bool { return d.ctl.Carrier(d.name) }

// SetsAddress implements dev.Slave.
func (d *Device) SetsAddress() bool { return true }

// SetAddress implements dev.Slave. A driver that wants its interface down for it
// gets it down.
func (d *Device) SetAddress(addr []byte) error {
	err := d.ctl.SetAddress(d.name, addr)
	if errors.Is(err, unix.EBUSY) && d.IsUp() {
		if err := d.SetUp(false); err != nil {
			return err
		}
		err = errors.Join(d.ctl.SetAddress(d.name, addr), d.SetUp(true))
	}
	if err != nil {
		return err
	}
	return d.readAttrs()
}

// SetMTU implements dev.Slave.
func (d *Device) SetMTU(mtu int) error {
	if err := d.ctl.SetMTU(d.name, mtu); err != nil {
		return err
	}
	return d.readAttrs()
}

// JoinGroup implements dev.Slave.
func (d *Device) JoinGroup(g netip.Addr) error {
	return d.changeMembership(unix.PACKET_ADD_MEMBERSHIP, g)
}

// LeaveGroup implements dev.Slave.
func (d *Device) LeaveGroup(g netip.Addr) error {
	return d.changeMembership(unix.PACKET_DROP_MEMBERSHIP, g)
}

func (d *Device) changeMembership(option int, g netip.Addr) error {
	r := unix.PacketMreq{Ifindex: int32(d.index), Type: unix.PACKET_MR_MULTICAST, Alen: 6}
	mac := frame.GroupMAC(g)
	copy(r.Address[:], mac[:])
	return unix.SetsockoptPacketMreq(d.fd, unix.SOL_PACKET, option, &r)
}

// SetFilter implements dev.Slave.
func (d *Device) SetFilter(f dev.RxFilter) error {
	d.filter.Store(uint32(f))
	return nil
}

// Attach implements dev.Slave.
func (d *Device) Attach(c dev.Callbacks) { d.calls.Store(&c) }

// Detach implements dev.Slave.
func (d *Device) Detach() { d.calls.Store(nil) }
