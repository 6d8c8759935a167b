package dev

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
)

// wakeTimers makes timers check the tables.
func (i *Interface) wakeTimers() {
	select {
	case i.nudge <- struct{}{}:
	default:
	}
}

// runTimers joins groups, repeats requests and removes old entries when they are
// due.
func (i *Interface) runTimers() {
	out := sendBatch{i: i}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-i.done:
			return
		case <-timer.C:
		case <-i.nudge:
		}
		now := time.Now()
		i.mu.Lock()
		i.requestJoins(now, &out)
		frames := i.neigh.Tick(now, nil)
		if !i.again.IsZero() && !now.Before(i.again) {
			i.again, frames = time.Time{}, i.neigh.Announce(frames)
		}
		i.sendFrames(now, frames, &out)
		if ready := i.linkReady(); ready != i.hasCarrier {
			i.hasCarrier = ready
			i.setCarrier(ready)
		}
		next := earliest(earliest(i.groups.Next(), i.neigh.Next()), i.again)
		i.mu.Unlock()
		out.flush()
		if next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(max(time.Until(next), 0))
		}
	}
}

func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// requestJoins executes the requests of the table of groups. Joining a group is
// attaching the queue pair to it. With a registry another goroutine asks there
// first. i.mu is held.
func (i *Interface) requestJoins(now time.Time, out *sendBatch) {
	for requests := i.groups.Requests(now); len(requests) > 0; requests = i.groups.Requests(now) {
		for _, r := range requests {
			i.traceGroup(r)
			if r.Kind == mcast.Leave {
				i.qp.Detach(r.MGID) // a send-only group is not attached
			}
			switch {
			case i.cfg.Registry != nil:
				i.askRegistry(now, r)
			case r.Kind != mcast.Leave:
				i.finishJoin(now, r, nil, out)
			}
		}
	}
}

// finishJoin completes a join that the registry has allowed, or refused with err.
// i.mu is held.
func (i *Interface) finishJoin(now time.Time, r mcast.Request, err error, out *sendBatch) {
	if err == nil && r.Kind == mcast.Join {
		err = i.qp.Attach(r.MGID)
	}
	if err != nil {
		i.groups.Failed(now, r.MGID)
		i.cfg.Logger.Warn("IPoIB multicast group was not joined", "name", i.Name(), "mgid", r.MGID, "err", err)
		return
	}
	for _, frame := range i.groups.Joined(r.MGID) {
		i.sendMulticast(now, r.MGID, frame, out)
	}
}

// setCarrier gives the interface its carrier, or takes it away.
func (i *Interface) setCarrier(on bool) {
	if err := i.tun.SetCarrier(on); err != nil {
		i.cfg.Logger.Error("IPoIB interface does not set its carrier", "name", i.Name(), "err", err)
		return
	}
	if on {
		i.cfg.Logger.Info("IPoIB link is up", "name", i.Name())
	} else {
		i.cfg.Logger.Warn("IPoIB link is down", "name", i.Name())
	}
}

// watchKernel follows the addresses and the state of the interface in the kernel.
func (i *Interface) watchKernel() {
	for {
		if err := i.refreshAddrs(); err != nil {
			i.cfg.Logger.Error("IPoIB interface does not see its addresses", "name", i.Name(), "err", err)
		}
		if err := i.rtnl.Wait(); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				i.cfg.Logger.Error("IPoIB interface does not see changes of its addresses", "name", i.Name(), "err", err)
			}
			return
		}
	}
}

// refreshAddrs reads the addresses from the kernel. It announces new ones. When the
// interface has come up it gets its link-local address: the kernel makes none
// for a device without a link-layer address.
func (i *Interface) refreshAddrs() error {
	i.routes.flush()
	if err := i.followCarrier(); err != nil {
		return err
	}
	if i.above.Load() != nil {
		return nil // the Above has set the addresses
	}
	up, err := i.rtnl.IsUp()
	if err != nil {
		return i.unlessClosed(err)
	}
	var mac [6]byte
	u := addrHolder{index: i.rtnl.Index(), active: true}
	if i.ether != nil {
		if mac, err = i.rtnl.MAC(); err != nil {
			return i.unlessClosed(err)
		}
	} else if u, err = i.holderOf(); err != nil {
		return i.unlessClosed(err)
	} else if up && !u.bond {
		if err := i.rtnl.AddAddr(netip.PrefixFrom(i.local.GID().LinkLocal(), 64)); err != nil {
			// A host without IPv6 refuses.
			i.cfg.Logger.Debug("IPoIB interface has no link-local address", "name", i.Name(), "err", err)
		}
	}
	ips, err := i.readAddrs(u)
	if err != nil {
		return i.unlessClosed(err)
	}
	now, out := time.Now(), sendBatch{i: i}
	i.mu.Lock()
	if i.above.Load() != nil { // attached meanwhile
		i.mu.Unlock()
		return nil
	}
	if i.ether != nil {
		i.ether.SetKernel(mac)
	}
	fresh := slices.DeleteFunc(slices.Clone(ips), func(p netip.Prefix) bool { return i.isUp && up && slices.Contains(i.ips, p) })
	i.joinSolicited(now, i.ips, ips)
	i.ips, i.isUp = ips, up
	i.neigh.SetIPs(fresh)
	var frames []neigh.Frame
	if up {
		frames = i.neigh.Announce(nil)
	}
	if u.bond && len(frames) > 0 {
		i.again = now.Add(announceAgain)
	}
	i.neigh.SetIPs(ips)
	i.sendFrames(now, frames, &out)
	i.mu.Unlock()
	out.flush()
	i.wakeTimers()
	return nil
}

// unlessClosed returns err if the interface is open.
func (i *Interface) unlessClosed(err error) error {
	select {
	case <-i.done:
		return nil
	default:
		return err
	}
}
