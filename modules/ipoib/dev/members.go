package dev

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// udMTU returns the longest packet of the UD queue pair, in bytes.
func (i *Interface) udMTU() int { return int(i.linkMTU.Load()) }

// groupReceivers returns the ports that get the datagrams of a group: what the
// registry says, or all configured peers.
func (i *Interface) groupReceivers(mgid wire.GID) []netip.Addr {
	if r := i.cfg.Registry; r != nil {
		return r.Members(mgid)
	}
	return i.cfg.Peers
}

// joinSolicited joins the groups in which solicitations for the addresses now are
// sent, and leaves those of the addresses before. The kernel joins none on a TUN
// device, since it does no neighbour discovery there. i.mu is held.
func (i *Interface) joinSolicited(now time.Time, before, after []netip.Prefix) {
	groups := func(ips []netip.Prefix) (out []wire.GID) {
		for _, p := range ips {
			if a := p.Addr(); a.Is6() {
				if g, err := i.link.Multicast(wire.SolicitedNode(a)); err == nil {
					out = append(out, g)
				}
			}
		}
		return out
	}
	joined := groups(after)
	for _, g := range groups(before) {
		if !slices.Contains(joined, g) {
			i.groups.Remove(g)
		}
	}
	for _, g := range joined {
		i.groups.Add(now, g)
	}
}

// registryQueue is the largest number of requests that wait for the registry.
const registryQueue = 2048

// askRegistry gives r to the goroutine of memberships. i.mu is held.
func (i *Interface) askRegistry(now time.Time, r mcast.Request) {
	select {
	case i.requests <- r:
	default:
		i.groups.Failed(now, r.MGID)
	}
}

// runMemberships executes requests of the table of groups at the registry, one after
// the other.
func (i *Interface) runMemberships() {
	for {
		select {
		case <-i.done:
			return
		case r := <-i.requests:
			i.atRegistry(r)
		}
	}
}

func (i *Interface) atRegistry(r mcast.Request) {
	if r.Kind == mcast.Leave {
		i.cfg.Registry.Leave(i, r.MGID)
		return
	}
	g, err := i.cfg.Registry.Join(i, r.MGID, r.Kind == mcast.JoinSendOnly, func() { i.onMembershipLost(r.MGID) })
	now, out := time.Now(), sendBatch{i: i}
	i.mu.Lock()
	if err == nil && r.MGID == i.link.Broadcast() {
		err = i.adoptGroup(g)
	}
	i.finishJoin(now, r, err, &out)
	i.mu.Unlock()
	out.flush()
	i.wakeTimers()
}

// adoptGroup takes over the parameters of the broadcast group, which are those of the
// link. i.mu is held.
func (i *Interface) adoptGroup(g registry.Group) error {
	if g.PKey != i.cfg.PKey {
		return fmt.Errorf("the registry says P_Key 0x%04x for the partition 0x%04x: %w", g.PKey, i.cfg.PKey, unix.EPROTO)
	}
	mtu, err := linkMTU(g.MTU, i.qp.MaxPayload())
	if err != nil {
		return err
	}
	i.qp.SetQKey(g.QKey)
	i.cfg.QKey = g.QKey
	i.linkMTU.Store(int32(wire.MTU(mtu)))
	if i.Mode() == Datagram && i.mtu != wire.MTU(mtu) {
		i.mtu = wire.MTU(mtu)
		return i.tun.SetMTU(i.mtu)
	}
	return nil
}

// onMembershipLost handles the end of a membership that the registry did not give again.
func (i *Interface) onMembershipLost(mgid wire.GID) {
	i.mu.Lock()
	i.groups.Lost(time.Now(), mgid)
	i.mu.Unlock()
	i.wakeTimers()
}

// retryJoins joins the groups that were refused: the registry may allow them now.
func (i *Interface) retryJoins() {
	i.mu.Lock()
	i.groups.Retry(time.Now())
	i.mu.Unlock()
	i.wakeTimers()
}

// leaveAll ends all memberships at the registry.
func (i *Interface) leaveAll() {
	if i.cfg.Registry == nil {
		return
	}
	i.cfg.Registry.Watch(i, nil)
	for _, g := range i.Groups() {
		i.cfg.Registry.Leave(i, g.MGID)
	}
}
