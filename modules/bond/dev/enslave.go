package dev

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/core"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
)

// enslaveDevice checks a free device against the rules and takes it. On an error the
// bond and the device are as before.
func (b *Bond) enslaveDevice(d *netDevice) error {
	err := b.withMachine(func(now time.Time) error {
		attrs := d.Attrs().copyAttrs()
		if err := b.mayEnslave(d, attrs); err != nil {
			return err
		}
		before, fom := b.attrs.copyAttrs(), b.m.Options().FailOverMAC
		mb := &slaveDevice{netDevice: d, bond: b, perm: attrs.Address, mtu: attrs.MTU, linkType: attrs.Type, joined: map[netip.Addr]bool{}}
		if err := b.configureSlave(mb, attrs); err != nil {
			mb.restoreDevice()
			b.restoreAttrs(before, fom)
			return err
		}
		b.members = append(b.members, mb)
		mbps, full := d.Speed()
		b.m.Add(core.Slave{Name: d.Name(), Carrier: d.Carrier(), Speed: mbps, FullDuplex: full}, now)
		return nil
	})
	b.wakeMonitor()
	return err
}

// mayEnslave are the rules that need nothing done.
func (b *Bond) mayEnslave(d *netDevice, a Attrs) error {
	switch {
	case d.IsUp():
		return core.Errorf(syscall.EPERM, "Device can not be enslaved while up")
	case len(b.members) > 0 && a.Type != b.attrs.Type:
		return core.Errorf(syscall.EINVAL, "Device type is different from other slaves")
	case len(b.members) > 0 && !canSetAddress(d, a) && b.m.Options().FailOverMAC != core.FailOverMACActive:
		return core.Errorf(syscall.EOPNOTSUPP, "Slave device does not support setting the MAC address, but fail_over_mac is not set to active")
	}
	return nil
}

// canSetAddress reports whether the device can be asked to change its address. The
// address of InfiniBand names a queue pair and a port, so none of that type is.
func canSetAddress(d *netDevice, a Attrs) bool { return d.SetsAddress() && a.Type != frame.InfiniBand }

// configureSlave makes bond and device fit each other and brings the device up.
func (b *Bond) configureSlave(mb *slaveDevice, a Attrs) error {
	if !canSetAddress(mb.netDevice, a) {
		b.log.Warn("The slave device specified does not support setting the MAC address", "slave", mb.Name())
		if len(b.members) == 0 && b.m.Options().FailOverMAC != core.FailOverMACActive {
			b.m.SetFailOverMAC(core.FailOverMACActive)
			b.log.Warn("Setting fail_over_mac to active for active-backup mode", "slave", mb.Name())
		}
	}
	if len(b.members) == 0 {
		if err := b.becomeLike(a); err != nil {
			return err
		}
	}
	if err := mb.SetMTU(b.attrs.MTU); err != nil {
		return wrapErrno(err, "Error %d calling dev_set_mtu")
	}
	if b.m.Options().FailOverMAC == core.FailOverMACNone && len(b.members) > 0 {
		if err := mb.SetAddress(b.attrs.Address); err != nil {
			return wrapErrno(err, "Error %d calling set_mac_address")
		}
	}
	mb.Attach(Callbacks{Received: mb.onFrame, Changed: b.wakeMonitor})
	if err := mb.SetFilter(b.backupFilter()); err != nil {
		return wrapErrno(err, "Error %d setting the receive filter")
	}
	if err := mb.SetUp(true); err != nil {
		return wrapErrno(err, "Opening slave failed (%d)")
	}
	return nil
}

// wrapErrno keeps the errno of err. format takes it as a number.
func wrapErrno(err error, format string) error {
	errno := core.ErrnoOf(err)
	return core.Errorf(errno, format+": %v", -int(errno), err)
}

// becomeLike gives the bond the type and the address of its first slave. The
// bond has no slaves yet. A bond that changes its type takes the MTU too.
func (b *Bond) becomeLike(a Attrs) error {
	n := a.copyAttrs()
	if a.Type == b.attrs.Type {
		n.MTU = b.attrs.MTU
		b.attrs = n
		return b.upperAddress()
	}
	b.log.Info("change device type", "from", b.attrs.Type, "to", a.Type)
	if b.upper != nil {
		if err := b.upper.Configure(n.copyAttrs()); err != nil {
			return wrapErrno(err, "change of the device type failed (%d)")
		}
	}
	b.attrs = n
	return nil
}

// restoreAttrs takes back becomeLike, and fail_over_mac with it.
func (b *Bond) restoreAttrs(a Attrs, fom int) {
	changed := a.Type != b.attrs.Type
	b.attrs = a
	b.m.SetFailOverMAC(fom)
	if b.upper != nil && changed {
		if err := b.upper.Configure(a.copyAttrs()); err != nil {
			b.log.Warn("bond does not get its former type back", "err", err)
		}
		return
	}
	b.logError("bond does not get its former address back", b.upperAddress())
}

func (b *Bond) upperAddress() error {
	if b.upper == nil {
		return nil
	}
	return b.upper.SetAddress(bytes.Clone(b.attrs.Address))
}

// restoreDevice gives the device back as it was.
func (mb *slaveDevice) restoreDevice() {
	mb.Detach()
	log := mb.bond.log
	step := func(what string, err error) {
		if err != nil {
			log.Warn("released device: "+what, "slave", mb.Name(), "err", err)
		}
	}
	for g := range mb.joined {
		step("a group is not left", mb.LeaveGroup(g))
	}
	step("the receive filter stays", mb.SetFilter(RxNone))
	step("it is not brought down", mb.SetUp(false))
	if now := mb.Attrs(); canSetAddress(mb.netDevice, now) && !bytes.Equal(now.Address, mb.perm) {
		step("it does not get its address back", mb.SetAddress(mb.perm))
	}
	step("it does not get its MTU back", mb.SetMTU(mb.mtu))
}

// releaseDevice gives a slave back. The bond without slaves is Ethernet again.
func (b *Bond) releaseDevice(d *netDevice) error {
	err := b.withMachine(func(now time.Time) error {
		mb := b.findMember(d.Name())
		if mb == nil {
			return core.Errorf(syscall.EINVAL, "interface not enslaved")
		}
		if b.m.Options().FailOverMAC == core.FailOverMACNone && len(b.members) > 1 && bytes.Equal(mb.perm, b.attrs.Address) {
			b.log.Warn(fmt.Sprintf("the permanent HWaddr of slave - %s - is still in use by bond - set the HWaddr of slave to a different address to avoid conflicts", HW(mb.perm)), "slave", mb.Name())
		}
		b.m.Remove(d.Name(), now)
		b.applyEvents(b.m.Events()) // while it is a member
		b.members = slices.DeleteFunc(b.members, func(x *slaveDevice) bool { return x == mb })
		mb.restoreDevice()
		if len(b.members) == 0 {
			b.onEmpty()
		}
		return nil
	})
	b.wakeMonitor()
	return err
}

// onEmpty restores the state that the bond had before its first slave.
func (b *Bond) onEmpty() {
	was := b.attrs.Type
	b.attrs = defaultAttrs()
	if b.upper == nil {
		return
	}
	if was != b.attrs.Type {
		b.logError("bond without slaves does not become Ethernet", b.upper.Configure(b.attrs.copyAttrs()))
		return
	}
	b.logError("bond without slaves does not get a new address", b.upperAddress())
}

func (b *Bond) logError(what string, err error) {
	if err != nil {
		b.log.Warn(what, "err", err)
	}
}

// HW returns a link-layer address as the kernel's files show it.
func HW(addr []byte) string {
	s := fmt.Sprintf("% x", addr)
	out := []byte(s)
	for i := range out {
		if out[i] == ' ' {
			out[i] = ':'
		}
	}
	return string(out)
}
