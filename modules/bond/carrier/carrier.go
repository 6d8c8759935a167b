// Package carrier reports the link of the interface below: that of Linux with a
// given address. A device that sends by this address has its carrier.
package carrier

import (
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/bond/internal/ifctl"
)

// Link is the link of an interface. All methods may be called by any goroutine.
type Link struct {
	name    string
	control *ifctl.Control
	watch   *ifctl.Watch
	changed atomic.Pointer[func()]
}

// Open finds the interface with the address addr in the network namespace of
// the calling thread. ENODEV says that there is none.
func Open(addr netip.Addr) (*Link, error) {
	name, err := ownerOf(addr)
	if err != nil {
		return nil, err
	}
	l := &Link{name: name}
	if l.control, err = ifctl.Open(); err != nil {
		return nil, err
	}
	l.watch, err = ifctl.NewWatch(ifctl.Links, func() {
		if f := l.changed.Load(); f != nil {
			(*f)()
		}
	})
	if err != nil {
		l.control.Close()
		return nil, err
	}
	return l, nil
}

func ownerOf(addr netip.Addr) (string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return "", fmt.Errorf("carrier of %s: %w", addr, err)
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			return "", fmt.Errorf("carrier of %s: %w", addr, err)
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr() == addr.Unmap().WithZone("") {
				return i.Name, nil
			}
		}
	}
	return "", fmt.Errorf("carrier of %s: no interface has the address: %w", addr, syscall.ENODEV)
}

// Name returns the name of the interface.
func (l *Link) Name() string { return l.name }

// On reports whether the interface is up and has a carrier.
func (l *Link) On() bool {
	flags, err := l.control.Flags(l.name)
	const up = syscall.IFF_UP | syscall.IFF_RUNNING
	return err == nil && flags&up == up
}

// Notify calls changed after each change of any interface. It replaces the
// function of an earlier call; nil ends the calls.
func (l *Link) Notify(changed func()) {
	if changed == nil {
		l.changed.Store(nil)
		return
	}
	l.changed.Store(&changed)
}

// Close ends the calls.
func (l *Link) Close() error {
	l.watch.Close()
	return l.control.Close()
}
