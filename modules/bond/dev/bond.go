package dev

import (
	"bytes"
	"context"
	"crypto/rand"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/announce"
	"github.com/rnbd-go/rnbd/modules/bond/core"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/monitor"
)

// Bond is an active-backup bond of a Net.
type Bond struct {
	net    *Net
	name   string
	log    *slog.Logger
	upper  Upper // nil: none
	cancel context.CancelFunc
	ended  chan struct{} // closed when the monitor has ended

	wake    chan struct{}    // the monitor is to look
	reports chan groupReport // reports of the data path

	// Read by the data path without a lock.
	active     atomic.Pointer[slaveDevice]
	up         atomic.Bool
	listening  atomic.Bool // the ARP monitor is on
	infiniBand atomic.Bool // the type of the bond, for the form of its frames
	counters   frameCounters

	mu      sync.Mutex
	m       *core.Machine
	members []*slaveDevice
	attrs   Attrs
	groups  map[netip.Addr]bool // joined by users; true: told by an old protocol
	told    []netip.Prefix      // the bond's addresses, as the active slave has been told
	moved   []addrMoved         // to be told when the lock is released
}

// slaveDevice is an enslaved device.
type slaveDevice struct {
	*netDevice
	bond     *Bond
	perm     []byte // address before it was enslaved
	mtu      int    // before it was enslaved
	joined   map[netip.Addr]bool
	linkType uint16
	lastSeen atomic.Int64 // ms, of the last frame that the ARP monitor was told of
}

// groupReport is a message of the data path to the monitor.
type groupReport struct {
	slave  string
	seen   core.Seen
	groups []frame.Membership
}

type addrMoved struct{ old, new string }

// frameCounters of a bond.
type frameCounters struct {
	rx, rxDropped, tx, txDropped, announced atomic.Uint64
}

// Counters count the frames of a bond.
type Counters struct {
	Rx, RxDropped uint64 // dropped: received by a backup, or not delivered
	Tx, TxDropped uint64 // dropped: no active slave, or not sent
	Announced     uint64 // sent by the bond itself
}

// defaultAttrs are those of a bond without slaves: Ethernet with a random,
// locally administered address.
func defaultAttrs() Attrs {
	addr := make([]byte, 6)
	rand.Read(addr)
	addr[0] = addr[0]&^1 | 2
	return Attrs{Type: frame.Ethernet, Address: addr, Broadcast: bytes.Repeat([]byte{0xff}, 6), HeaderLen: 14, MTU: 1500}
}

func newBond(n *Net, name string) (*Bond, error) {
	b := &Bond{net: n, name: name, log: n.logger().With("bond", name), m: core.New(), attrs: defaultAttrs(),
		groups: map[netip.Addr]bool{}, ended: make(chan struct{}),
		wake: make(chan struct{}, 1), reports: make(chan groupReport, 256)}
	if n.NewUpper != nil {
		upper, err := n.NewUpper(name, UpperCallbacks{Transmit: b.onUserFrame, UpChanged: b.upChanged})
		if err != nil {
			return nil, err
		}
		if err := upper.Configure(b.attrs.copyAttrs()); err != nil {
			upper.Close()
			return nil, err
		}
		if err := upper.SetCarrier(false); err != nil {
			upper.Close()
			return nil, err
		}
		b.upper = upper
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	go func() {
		defer close(b.ended)
		monitor.Loop(ctx, b, b.wake)
	}()
	return b, nil
}

// close ends a bond without slaves.
func (b *Bond) close() error {
	b.cancel()
	<-b.ended
	if b.upper != nil {
		return b.upper.Close()
	}
	return nil
}

// Name returns the bond's name.
func (b *Bond) Name() string { return b.name }

// upChanged is called by the upper side after it came up or went down.
func (b *Bond) upChanged(up bool) {
	b.up.Store(up)
	b.wakeMonitor()
}

// SetUp brings the bond up or down, with its upper side.
func (b *Bond) SetUp(up bool) error {
	if b.upper != nil {
		if err := b.upper.SetUp(up); err != nil {
			return err
		}
	}
	b.up.Store(up)
	b.pollMachine()
	b.wakeMonitor()
	return nil
}

// IsUp reports whether the bond is up.
func (b *Bond) IsUp() bool { return b.up.Load() }

// wakeMonitor makes the monitor look at once.
func (b *Bond) wakeMonitor() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Poll implements monitor.Target.
func (b *Bond) Poll() (next time.Time, ok bool) {
	b.pollMachine()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.m.Next()
}

func (b *Bond) pollMachine() {
	b.withMachine(func(now time.Time) error {
		if up := b.up.Load(); up != b.m.IsUp() {
			b.m.SetUp(up, now)
			b.log.Info("bond is brought " + map[bool]string{true: "up", false: "down"}[up])
		}
		b.takeReports()
		b.tellPrefixes()
		for _, mb := range b.members {
			b.m.SetCarrier(mb.Name(), mb.IsUp() && mb.Carrier())
			mbps, full := mb.Speed()
			b.m.SetSpeed(mb.Name(), mbps, full)
		}
		b.m.Poll(now)
		return nil
	})
}

// withMachine runs fn with the lock held, carries out the machine's events, and then
// informs the users of addresses.
func (b *Bond) withMachine(fn func(now time.Time) error) error {
	b.mu.Lock()
	err := fn(time.Now())
	b.applyEvents(b.m.Events())
	b.infiniBand.Store(b.attrs.Type == frame.InfiniBand)
	if on := b.m.Options().ArpInterval > 0; b.listening.Swap(on) != on {
		b.updateFilters()
	}
	moved := b.moved
	b.moved = nil
	b.mu.Unlock()
	for _, c := range moved {
		b.net.Resolver.Changed(b, c.old, c.new)
	}
	return err
}

// takeReports hands the reports of the data path to the machine.
func (b *Bond) takeReports() {
	if len(b.reports) == 0 {
		return
	}
	own := b.ownsAddr(b.Prefixes())
	for {
		select {
		case r := <-b.reports:
			if r.groups != nil {
				b.changeGroups(r.groups)
			} else {
				b.m.Received(r.slave, r.seen, own)
			}
		default:
			return
		}
	}
}

func (b *Bond) ownsAddr(prefixes []netip.Prefix) func(netip.Addr) bool {
	return func(a netip.Addr) bool {
		return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr() == a })
	}
}

// Set sets an option; slaves are enslaved and released by Net.Enslave.
func (b *Bond) Set(option, value string) error {
	err := b.withMachine(func(now time.Time) error { return b.m.Set(option, value, now) })
	b.wakeMonitor()
	return err
}

// SetMTU changes the MTU of the bond and of all slaves, or of none.
func (b *Bond) SetMTU(mtu int) error {
	return b.withMachine(func(time.Time) error {
		for i, mb := range b.members {
			err := mb.SetMTU(mtu)
			if err == nil {
				continue
			}
			for _, done := range b.members[:i] {
				b.logError("slave does not get its former MTU back", done.SetMTU(b.attrs.MTU))
			}
			return wrapErrno(err, "Error %d calling dev_set_mtu")
		}
		if b.upper != nil {
			if err := b.upper.SetMTU(mtu); err != nil {
				for _, mb := range b.members {
					b.logError("slave does not get its former MTU back", mb.SetMTU(b.attrs.MTU))
				}
				return wrapErrno(err, "Error %d calling dev_set_mtu")
			}
		}
		b.attrs.MTU = mtu
		return nil
	})
}

// Show returns an option as its file shows it, without the newline.
func (b *Bond) Show(option string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.m.Show(option)
}

// Active implements resolve.Bond.
func (b *Bond) Active() (name string, address []byte) {
	if mb := b.active.Load(); mb != nil {
		return mb.Name(), bytes.Clone(mb.Attrs().Address)
	}
	return "", nil
}

// Prefixes implements resolve.Bond.
func (b *Bond) Prefixes() []netip.Prefix {
	if b.upper == nil {
		return nil
	}
	return b.upper.Prefixes()
}

// ownAddrs are those of Prefixes without their lengths.
func (b *Bond) ownAddrs() (all []netip.Addr) {
	for _, p := range b.Prefixes() {
		all = append(all, p.Addr())
	}
	return all
}

// Counters returns the bond's counters.
func (b *Bond) Counters() Counters {
	c := &b.counters
	return Counters{Rx: c.rx.Load(), RxDropped: c.rxDropped.Load(), Tx: c.tx.Load(), TxDropped: c.txDropped.Load(), Announced: c.announced.Load()}
}

// Status is a bond at one moment.
type Status struct {
	Name    string
	Up      bool // brought up
	Carrier bool
	Options core.Options
	Active  string
	Primary string
	Attrs   Attrs
	Slaves  []SlaveStatus
	Groups  []announce.Group // joined by users
}

// SlaveStatus is a slave at that moment.
type SlaveStatus struct {
	core.Slave
	Active      bool
	Attrs       Attrs
	PermAddress []byte // before it was enslaved
}

// Status returns the bond as it is now.
func (b *Bond) Status() Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := Status{Name: b.name, Up: b.up.Load(), Carrier: b.m.Carrier(), Options: b.m.Options(), Active: b.m.Active(),
		Primary: b.m.Primary(), Attrs: b.attrs.copyAttrs(), Groups: b.groupList()}
	for _, mb := range b.members {
		sl, _ := b.m.Slave(mb.Name())
		s.Slaves = append(s.Slaves, SlaveStatus{Slave: sl, Active: sl.Name == s.Active, Attrs: mb.Attrs().copyAttrs(), PermAddress: bytes.Clone(mb.perm)})
	}
	return s
}

func (b *Bond) groupList() (all []announce.Group) {
	for _, g := range slices.SortedFunc(maps.Keys(b.groups), netip.Addr.Compare) {
		all = append(all, announce.Group{Addr: g, Old: b.groups[g]})
	}
	return all
}

func (b *Bond) findMember(name string) *slaveDevice {
	for _, mb := range b.members {
		if mb.Name() == name {
			return mb
		}
	}
	return nil
}
