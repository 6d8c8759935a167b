// Package tap makes a TAP of Linux the upper side of a bond over Ethernet: the
// host's stack, or that of a network namespace, uses the bond through it.
//
// The interface follows the bond: its carrier is the bond's, its address that of
// the active slave. The bond follows the interface: `ip link set bond0 up` brings it up.
package tap

import (
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

// Interface is a TAP. It implements dev.Upper.
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

// Open makes the TAP in the network namespace at path; an empty path is the
// namespace of the thread. It needs CAP_NET_ADMIN there. The interface ends with Close, or with the
// process.
func Open(name, path string, c dev.UpperCallbacks) (i *Interface, err error) {
	err = netns.Do(path, func() error {
		i, err = open(name, c)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make TAP %s: %w", name, err)
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
	if err := ifctl.TAP(fd, name); err != nil { // before the poller may see the file
		unix.Close(fd)
		return nil, err
	}
	i.file = os.NewFile(uintptr(fd), "tap:"+name)
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

// transmit hands the frames of the users to the bond, until the TAP is closed.
func (i *Interface) transmit() {
	defer close(i.done)
	buf := make([]byte, 14+64<<10)
	for {
		n, err := i.file.Read(buf)
		if errors.Is(err, os.ErrClosed) || errors.Is(err, unix.EBADFD) {
			return
		}
		if err == nil {
			i.calls.Transmit(buf[:n])
		}
	}
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
func (i *Interface) SetAddress(addr []byte) error { return i.ctl.SetAddress(i.name, addr) }

// SetMTU implements dev.Upper.
func (i *Interface) SetMTU(mtu int) error { return i.ctl.SetMTU(i.name, mtu) }

// SetUp implements dev.Upper.
func (i *Interface) SetUp(up bool) error { return i.ctl.SetUp(i.name, up) }

// SetCarrier implements dev.Upper.
func (i *Interface) SetCarrier(on bool) error {
	raw, err := i.file.SyscallConn()
	if err != nil {
		return err
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = ifctl.SetCarrier(int(fd), on) }); ctlErr != nil {
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

// Deliver implements dev.Upper.
func (i *Interface) Deliver(f []byte) error {
	_, err := i.file.Write(f)
	return err
}

// Close implements dev.Upper. The interface is gone when it returns.
func (i *Interface) Close() error {
	i.watch.Close()
	err := i.file.Close()
	<-i.done
	return errors.Join(err, i.asker.Close(), i.ctl.Close())
}
