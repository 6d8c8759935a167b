package dev

import (
	"net/netip"
	"time"
)

// An interface has carrier when two things are there: the broadcast group, and
// the carrier of the network below. That is the interface of the host which has
// the address of the port, as the port of a RoCE adapter has its state of the
// network interface.

// followCarrier reads the carrier of the network below. An address that no interface
// of the namespace has, as 127.0.0.2, has carrier; one that an interface had
// and has no more has none.
func (i *Interface) followCarrier() error {
	running, found, err := i.rtnl.Running(i.cfg.Local)
	if err != nil {
		return i.unlessClosed(err)
	}
	i.mu.Lock()
	i.belowFound = i.belowFound || found
	up := running || !i.belowFound
	changed := up != i.belowUp
	i.belowUp = up
	i.mu.Unlock()
	if changed {
		i.wakeTimers()
	}
	return nil
}

// linkReady reports whether the interface has carrier. i.mu is held.
func (i *Interface) linkReady() bool { return i.belowUp && i.groups.Ready() }

// addrHolder is what has the IP addresses of an interface in the kernel: itself, or
// a bond of Linux's driver. The kernel resolves nothing on a bond of the type
// InfiniBand, so the active slave asks and answers for the addresses of the bond,
// and announces them when it becomes active. The other slaves have none.
type addrHolder struct {
	index  int // of the interface with the addresses
	bond   bool
	active bool // the only interface, or the active slave
}

// announceAgain is the time after which the new active slave of a bond repeats
// its announcement. A switch may lose the first one, since its port forwards
// some time after the carrier is there; then peers keep the address of the
// other slave for up to half a minute.
const announceAgain = time.Second

func (i *Interface) holderOf() (addrHolder, error) {
	bond, active, err := i.rtnl.Bond()
	if err != nil || bond == 0 {
		return addrHolder{i.rtnl.Index(), false, true}, err
	}
	return addrHolder{bond, true, active}, nil
}

// readAddrs returns the addresses that u has for the interface.
func (i *Interface) readAddrs(u addrHolder) ([]netip.Prefix, error) {
	i.routed.Store(int32(u.index))
	if !u.active {
		return nil, nil
	}
	return i.rtnl.Addrs(u.index)
}
