// Package tuntap is what a TAP and a TUN have in common as the upper side of a bond:
// the device, its address list, its carrier, and the users' wish that it is up.
package tuntap

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
	"github.com/rnbd-go/rnbd/modules/bond/internal/ifctl"
	"github.com/rnbd-go/rnbd/modules/bond/netns"
)

// Interface is a TAP or a TUN. It implements the part of dev.Upper that is the same
// for both; the methods of the users' frames are added by the packages tap and tun.
type Interface struct {
	Name string
	Ctl  *ifctl.Control

	index    int
	file     *os.File
	asker    *ifctl.Prefixes
	watch    *ifctl.Watch
	calls    dev.UpperCallbacks
	prefixes atomic.Pointer[[]netip.Prefix]
	done     chan struct{}
}

// Kind is one of the two.
type Kind struct {
	Name   string                          // "TAP" or "TUN"
	Make   func(fd int, name string) error // makes fd the interface
	Header int                             // bytes before each packet that Fill writes
	Fill   func(frame []byte)              // writes the header; nil: there is none
}

// Open makes the interface in the network namespace at path; an empty path is the
// namespace of the thread. It needs CAP_NET_ADMIN there. The interface ends with
// Close, or with the process.
func Open(k Kind, name, path string, c dev.UpperCallbacks) (i *Interface, err error) {
	err = netns.Do(path, func() error {
		i, err = open(k, name, c)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make %s %s: %w", k.Name, name, err)
	}
	return i, nil
}

func open(k Kind, name string, c dev.UpperCallbacks) (_ *Interface, err error) {
	i := &Interface{Name: name, calls: c, done: make(chan struct{})}
	defer func() {
		if err != nil {
			i.closeFiles()
		}
	}()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := k.Make(fd, name); err != nil { // before the poller may see the file
		unix.Close(fd)
		return nil, err
	}
	i.file = os.NewFile(uintptr(fd), k.Name+":"+name)
	if i.Ctl, err = ifctl.Open(); err != nil {
		return nil, err
	}
	if i.index, err = i.Ctl.Index(name); err != nil {
		return nil, err
	}
	if i.asker, err = ifctl.NewPrefixes(); err != nil {
		return nil, err
	}
	if i.watch, err = ifctl.NewWatch(ifctl.Links|ifctl.Addresses, i.onChange); err != nil {
		return nil, err
	}
	go i.transmitLoop(k)
	return i, nil
}

func (i *Interface) closeFiles() {
	if i.watch != nil {
		i.watch.Close()
	}
	if i.asker != nil {
		i.asker.Close()
	}
	if i.Ctl != nil {
		i.Ctl.Close()
	}
	if i.file != nil {
		i.file.Close()
	}
}

// onChange looks at the interface after each change in its namespace.
func (i *Interface) onChange() {
	if all, err := i.asker.Of(i.index); err == nil {
		i.prefixes.Store(&all)
	}
	if flags, err := i.Ctl.Flags(i.Name); err == nil {
		i.calls.UpChanged(flags&unix.IFF_UP != 0)
	}
}

// largest is the longest packet or frame, without Header.
const largest = 14 + 64<<10

// transmitLoop hands the frames of the users to the bond, until the interface is closed.
func (i *Interface) transmitLoop(k Kind) {
	defer close(i.done)
	buf := make([]byte, k.Header+largest)
	for {
		n, err := i.file.Read(buf[k.Header:])
		if errors.Is(err, os.ErrClosed) || errors.Is(err, unix.EBADFD) {
			return
		}
		if err != nil || n == 0 {
			continue
		}
		if k.Fill != nil {
			k.Fill(buf[:k.Header+n])
		}
		i.calls.Transmit(buf[:k.Header+n])
	}
}

// SetMTU implements dev.Upper.
func (i *Interface) SetMTU(mtu int) error { return i.Ctl.SetMTU(i.Name, mtu) }

// SetUp implements dev.Upper.
func (i *Interface) SetUp(up bool) error { return i.Ctl.SetUp(i.Name, up) }

// SetCarrier implements dev.Upper.
func (i *Interface) SetCarrier(on bool) error {
	return i.Control(func(fd int) error { return ifctl.SetCarrier(fd, on) })
}

// Control calls f with the descriptor of the device.
func (i *Interface) Control(f func(fd int) error) error {
	raw, err := i.file.SyscallConn()
	if err != nil {
		return err
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); ctlErr != nil {
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

// Write gives a frame or packet to the users.
func (i *Interface) Write(b []byte) error {
	_, err := i.file.Write(b)
	return err
}

// Close implements dev.Upper. The interface is gone when it returns.
func (i *Interface) Close() error {
	i.watch.Close()
	err := i.file.Close()
	<-i.done
	return errors.Join(err, i.asker.Close(), i.Ctl.Close())
}
