package dev

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/cm"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Above takes the place of the kernel above an interface. A bond is one: the
// interface is its slave.
type Above struct {
	// Receive takes each valid frame from the link, with the encapsulation
	// header. ARP and neighbour discovery are included, though the interface
	// answers them. Receive does not block and does not keep frame.
	Receive func(frame []byte)
	// NextHop returns the gateway to an address outside of the prefixes of
	// SetPrefixes. If NextHop is nil there is no gateway.
	NextHop func(dst netip.Addr) (netip.Addr, error)
}

// Attach puts a in the place of the kernel. From then on the interface has the
// prefixes of SetPrefixes, none at first, and drops the packets of the kernel.
func (i *Interface) Attach(a Above) {
	i.above.Store(&a)
	i.SetPrefixes(nil)
}

// Detach gives the interface back to the kernel, with the addresses that it has there.
func (i *Interface) Detach() error {
	i.above.Store(nil)
	return i.refreshAddrs()
}

// SetPrefixes sets the addresses of an attached interface, with the lengths of
// their networks. The interface resolves neighbours in these networks and
// answers for these addresses. It does not announce them.
func (i *Interface) SetPrefixes(ips []netip.Prefix) {
	i.routes.flush()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.joinSolicited(time.Now(), i.ips, ips)
	i.ips = slices.Clone(ips)
	i.neigh.SetIPs(i.ips)
	i.wakeTimers()
}

// SendFrame sends a frame for an Above. A frame is the encapsulation header and
// an IP packet or ARP. ARP goes to the broadcast group. As with packets of the
// kernel, a frame waits until its neighbour is resolved. The error is
// unix.EINVAL for a frame that is not valid, unix.EMSGSIZE for one that is too
// long.
func (i *Interface) SendFrame(frame []byte) error {
	f := wire.Frame(frame)
	if !f.Valid() {
		return fmt.Errorf("send a frame of %d bytes on %s: %w", len(frame), i.Name(), unix.EINVAL)
	}
	now, out := time.Now(), sendBatch{i: i}
	i.mu.Lock()
	if len(f.Payload()) > i.mtu {
		i.counters.txDropped.Add(1)
		i.mu.Unlock()
		return fmt.Errorf("send a packet of %d bytes on %s: %w", len(f.Payload()), i.Name(), unix.EMSGSIZE)
	}
	if dst, ok := wire.Destination(f.Type(), f.Payload()); ok {
		i.sendTo(now, dst, f.Type(), frame, &out)
	} else if f.Type() == wire.TypeARP {
		i.sendMulticast(now, i.link.Broadcast(), frame, &out)
	} else {
		i.counters.txDropped.Add(1)
	}
	i.mu.Unlock()
	out.flush()
	i.wakeTimers()
	return nil
}

// JoinGroup joins the group of the link that an IP multicast group maps to.
func (i *Interface) JoinGroup(ip netip.Addr) error {
	return i.changeMembership(ip, func(mgid wire.GID) bool { return i.groups.Add(time.Now(), mgid) })
}

// LeaveGroup undoes JoinGroup.
func (i *Interface) LeaveGroup(ip netip.Addr) error {
	return i.changeMembership(ip, func(mgid wire.GID) bool {
		i.groups.Remove(mgid)
		return true
	})
}

func (i *Interface) changeMembership(ip netip.Addr, change func(wire.GID) bool) error {
	mgid, err := i.link.Multicast(ip)
	if err != nil || slices.Contains(alwaysJoined, ip) {
		return err
	}
	i.mu.Lock()
	ok := change(mgid)
	i.mu.Unlock()
	i.wakeTimers()
	if !ok {
		return fmt.Errorf("group %s on %s: %w", ip, i.Name(), unix.ENOBUFS)
	}
	return nil
}

// IsUp reports whether the interface is up. Its state is that of the TUN device
// in the kernel, even while an Above is attached.
func (i *Interface) IsUp() bool {
	up, err := i.rtnl.IsUp()
	return err == nil && up
}

// SetUp sets the interface up or down.
func (i *Interface) SetUp(up bool) error { return i.tun.SetUp(up) }

// Carrier reports whether the link is up, that is, whether the broadcast group
// is joined and the network below has a carrier.
func (i *Interface) Carrier() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.linkReady()
}

// SetMTU changes the MTU, in bytes. The largest is the MTU of the link less
// the encapsulation header in datagram mode, and 65520 in connected mode.
func (i *Interface) SetMTU(mtu int) error {
	limit := i.udMTU()
	if i.Mode() == Connected {
		limit = cm.MaxMTU
	}
	if mtu < 68 || mtu > limit {
		return fmt.Errorf("set MTU of %s to %d: want 68 to %d: %w", i.Name(), mtu, limit, unix.EINVAL)
	}
	if err := i.tun.SetMTU(mtu); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.mtu = mtu
	return nil
}

// nextHop returns the next hop to dst by the kernel's routing table, or by
// NextHop of the attached Above.
func (i *Interface) nextHop(dst netip.Addr) (netip.Addr, error) {
	a := i.above.Load()
	switch {
	case a == nil:
		return i.rtnl.NextHop(int(i.routed.Load()), dst)
	case a.NextHop == nil:
		return netip.Addr{}, errNoGateway
	}
	return a.NextHop(dst)
}

var errNoGateway = errors.New("no gateway is known")
