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
	"net/netip"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/internal/ifctl"
	"github.com/rnbd-go/rnbd/modules/bond/netns"
)

// Interface is a TUN. It implements dev.Upper.
type Interface struct {
	name     string
	index    int
	file     *os.File
	ctl      *ifctl.Control
	asker    *ifctl.Prefixes
	watch    *ifctl.Watch
	calls    dev.UpperCallbacks
	prefixes atomic.Pointer[[]netip.Prefix]
	done     chan struct{}
}

var _ dev.Upper = (*Interface)(nil)

// Open makes the TUN in the network namespace at path; an empty path is the
// namespace of the thread. It needs CAP_NET_ADMIN there. The interface ends with Close, or with the
// process.
func Open(name, path string, c dev.UpperCallbacks) (i *Interface, err error) {
	err = netns.Do(path, func() error {
		i, err = open(name, c)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make TUN %s: %w", name, err)
	}
	return i, nil
}

func open(name string, c dev.UpperCallbacks) (_ *Interface, err error) {
	i := &Interface{name: name, calls: c, done: make(chan struct{})}
	defer func() {
		if err != nil {
			i.closeFiles()
		}
	}()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := ifctl.TUN(fd, name); err != nil { // before the poller may see the file
		unix.Close(fd)
		return nil, err
	}
	i.file = os.NewFile(uintptr(fd), "tun:"+name)
	if i.ctl, err = ifctl.Open(); err != nil {
		return nil, err
	}
	if i.index, err = i.ctl.Index(name); err != nil {
		return nil, err
	}
	if i.asker, err = ifctl.NewPrefixes(); err != nil {
		return nil, err
	}
	if i.watch, err = ifctl.NewWatch(ifctl.Links|ifctl.Addresses, i.changed); err != nil {
		return nil, err
	}
	go i.transmit()
	return i, nil
}

func (i *Interface) closeFiles() {
	if i.watch != nil {
		i.watch.Close()
	}
	if i.asker != nil {
		i.asker.Close()
	}
	if i.ctl != nil {
		i.ctl.Close()
	}
	if i.file != nil {
		i.file.Close()
	}
}

// changed looks at the interface after each change in its namespace.
func (i *Interface) changed() {
	if all, err := i.asker.Of(i.index); err == nil {
		i.prefixes.Store(&all)
	}
	if flags, err := i.ctl.Flags(i.name); err == nil {
		i.calls.UpChanged(flags&unix.IFF_UP != 0)
	}
}

// transmit hands the frames of the users to the bond, until the TUN is closed.
func (i *Interface) transmit() {
	defer close(i.done)
	buf := make([]byte, header+64<<10)
	for {
		n, err := i.file.Read(buf[header:])
		if errors.Is(err, os.ErrClosed) || errors.Is(err, unix.EBADFD) {
			return
		}
		if err != nil || n == 0 {
			continue
		}
		etherType := uint16(frame.TypeIPv4)
		if buf[header]>>4 == 6 {
			etherType = frame.TypeIPv6
		}
		binary.BigEndian.PutUint16(buf, etherType)
		i.calls.Transmit(buf[:header+n])
	}
}

// header is the length of the encapsulation header.
const header = 4

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
	flags, err := i.ctl.Flags(i.name)
	if err != nil {
		return err
	}
	up := flags&unix.IFF_UP != 0
	if up {
		if err := i.SetUp(false); err != nil {
			return err
		}
	}
	err = errors.Join(i.control(func(fd int) error { return unix.IoctlSetInt(fd, unix.TUNSETLINK, int(linkType)) }), i.SetMTU(a.MTU))
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

// SetMTU implements dev.Upper.
func (i *Interface) SetMTU(mtu int) error { return i.ctl.SetMTU(i.name, mtu) }

// SetUp implements dev.Upper.
func (i *Interface) SetUp(up bool) error { return i.ctl.SetUp(i.name, up) }

// SetCarrier implements dev.Upper.
func (i *Interface) SetCarrier(on bool) error {
	return i.control(func(fd int) error { return ifctl.SetCarrier(fd, on) })
}

func (i *Interface) control(fn func(fd int) error) error {
	raw, err := i.file.SyscallConn()
	if err != nil {
		return err
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = fn(int(fd)) }); ctlErr != nil {
		return ctlErr
	}
	return err
}

// Prefixes implements dev.Upper.
func (i *Interface) Prefixes() []netip.Prefix {
	if all := i.prefixes.Load(); all != nil {
		return *all
	}
	return nil
}

// Deliver implements dev.Upper. The users get IP; ARP is the slaves' own.
func (i *Interface) Deliver(f []byte) error {
	etherType, packet, ok := frame.Split(frame.InfiniBand, f)
	if !ok || etherType != frame.TypeIPv4 && etherType != frame.TypeIPv6 {
		return nil
	}
	_, err := i.file.Write(packet)
	return err
}

// Close implements dev.Upper. The interface is gone when it returns.
func (i *Interface) Close() error {
	i.watch.Close()
	err := i.file.Close()
	<-i.done
	return errors.Join(err, i.asker.Close(), i.ctl.Close())
}
