package dev

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/cm"
	"github.com/rnbd-go/rnbd/modules/ipoib/ether"
	"github.com/rnbd-go/rnbd/modules/ipoib/internal/rtnl"
	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
	"github.com/rnbd-go/rnbd/modules/ipoib/path"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Interface is an open IPoIB interface. All methods may be called by any
// goroutine.
type Interface struct {
	cfg   Config
	link  wire.Link
	local wire.Address
	paths *path.Table
	tun   *tun.Device
	qp    verbs.DatagramQP
	rtnl  *rtnl.Conn
	spare int          // bytes in front of a received frame, see above
	ether *ether.Table // nil: no Ethernet. Guarded by mu

	counters          frameCounters
	routes            routeCache
	cm                atomic.Pointer[cm.Manager] // nil in datagram mode
	linkMTU           atomic.Int32               // see udMTU
	routed            atomic.Int32               // number of the interface that routes lead to: a bond, or its own
	modeMu            sync.Mutex                 // of SetMode
	coalescing        atomic.Pointer[Coalescing]
	noLRO, noChecksum atomic.Bool
	above             atomic.Pointer[Above] // replaces the kernel; nil: the kernel itself

	mu         sync.Mutex
	neigh      *neigh.Table
	groups     *mcast.Table
	mtu        int // of the interface
	hasCarrier bool
	belowFound bool // the network below was seen
	belowUp    bool // it has a carrier
	ips        []netip.Prefix
	isUp       bool
	asked      time.Time // see askFor
	again      time.Time // of the next announcement, see announceAgain; zero: none
	tap        io.Writer // capture of frames; nil: none

	nudge    chan struct{}      // wakes timers
	requests chan mcast.Request // for memberships
	done     chan struct{}
	once     sync.Once
	wg       sync.WaitGroup
}

// Open makes an interface, in the network namespace of the calling thread. It is
// down; when it is set up, for instance with ip-link(8), it gets its IPv6
// link-local address.
func Open(cfg Config) (*Interface, error) {
	i, err := open(cfg)
	if err != nil {
		return nil, fmt.Errorf("open IPoIB interface %s: %w", cfg.Name, err)
	}
	return i, nil
}

func open(cfg Config) (_ *Interface, err error) {
	if cfg, err = cfg.withDefaults(); err != nil {
		return nil, err
	}
	i := &Interface{cfg: cfg, link: wire.Link{PKey: cfg.PKey, Scope: cfg.Scope}, nudge: make(chan struct{}, 1), done: make(chan struct{})}
	i.routes.lookup = i.nextHop
	if i.qp, err = cfg.Fabric.OpenDatagrams(verbs.DatagramConfig{Local: cfg.Local, PKey: cfg.PKey, QKey: cfg.QKey, RecvQueue: RecvQueue}); err != nil {
		return nil, err
	}
	i.paths = &path.Table{}
	gid := wire.AddrGID(cfg.Local)
	if cfg.Registry != nil {
		i.paths, gid = cfg.Registry.Paths(), cfg.Registry.GID()
	}
	i.local = wire.NewAddress(0, i.qp.QPN(), gid)
	i.spare = tun.HeaderLen - wire.EncapLen
	if cfg.Ethernet {
		i.ether = ether.NewTable(i.local)
		i.spare += ether.HeaderLen
	}
	if err := i.openAbove(); err != nil {
		return nil, errors.Join(err, i.closeAll())
	}
	now := time.Now()
	i.neigh = neigh.New(neigh.Config{}, i.link, i.local)
	i.groups = mcast.New(now, i.link.Broadcast())
	for _, ip := range alwaysJoined {
		if g, err := i.link.Multicast(ip); err == nil {
			i.groups.Add(now, g)
		}
	}
	i.requests = make(chan mcast.Request, registryQueue)
	if err := i.followCarrier(); err != nil {
		return nil, errors.Join(err, i.closeAll())
	}
	if cfg.Registry != nil {
		cfg.Registry.Watch(i, i.retryJoins)
	}
	for _, run := range []func(){i.transmitLoop, i.receiveLoop, i.runTimers, i.watchKernel, i.runMemberships} {
		i.wg.Add(1)
		go func() { defer i.wg.Done(); run() }()
	}
	if cfg.Mode == Connected {
		if err := i.SetMode(Connected); err != nil {
			return nil, errors.Join(err, i.Close())
		}
	}
	cfg.Logger.Info("IPoIB interface made", "name", i.Name(), "address", i.Address(), "pkey", fmt.Sprintf("0x%04x", cfg.PKey), "mode", cfg.Mode, "mtu", i.MTU())
	return i, nil
}

// Lengths of the queues of the UD queue pair, those of Linux. Sends are not
// queued in this implementation.
const (
	SendQueue = 128
	RecvQueue = 256
)

// alwaysJoined are the groups of every host. Reports do not name them.
var alwaysJoined = []netip.Addr{netip.AddrFrom4([4]byte{224, 0, 0, 1}), netip.IPv6LinkLocalAllNodes()}

// openAbove makes the TUN device and the connection to rtnetlink.
func (i *Interface) openAbove() (err error) {
	m, err := linkMTU(i.cfg.LinkMTU, i.qp.MaxPayload())
	if err != nil {
		return err
	}
	i.linkMTU.Store(int32(wire.MTU(m)))
	i.mtu = i.udMTU()
	if i.tun, err = tun.Open(i.cfg.Name, i.cfg.Ethernet); err != nil {
		return err
	}
	if err := errors.Join(i.tun.SetMTU(i.mtu), i.tun.SetCarrier(false)); err != nil {
		return err
	}
	index, err := i.tun.Index()
	if err != nil {
		return err
	}
	i.routed.Store(int32(index))
	if i.rtnl, err = rtnl.Open(index); err == nil && i.ether != nil {
		err = i.rtnl.SetMAC(i.ether.Own())
	}
	return err
}

func (i *Interface) closeAll() error {
	err := i.qp.Close()
	if i.tun != nil {
		err = errors.Join(err, i.tun.Close())
	}
	if i.rtnl != nil {
		err = errors.Join(err, i.rtnl.Close())
	}
	return err
}

// Close removes the interface.
func (i *Interface) Close() error {
	err := error(os.ErrClosed)
	i.once.Do(func() {
		close(i.done)
		err = i.closeAll()
		i.leaveAll()
		i.modeMu.Lock() // no SetMode is under way or begins after this
		defer i.modeMu.Unlock()
		if c := i.cm.Swap(nil); c != nil {
			err = errors.Join(err, c.Close())
		}
		i.wg.Wait()
	})
	if err != nil {
		return fmt.Errorf("close IPoIB interface %s: %w", i.Name(), err)
	}
	return nil
}

// Name returns the name of the interface.
func (i *Interface) Name() string { return i.tun.Name() }

// Address returns the link-layer address.
func (i *Interface) Address() wire.Address {
	a := i.local
	if i.Mode() == Connected {
		a[0] = wire.FlagRC
	}
	return a
}

// Broadcast returns the link-layer address of the broadcast group.
func (i *Interface) Broadcast() wire.Address { return wire.MulticastAddress(i.link.Broadcast()) }

// PKey returns the P_Key, with the full-member bit.
func (i *Interface) PKey() uint16 { return i.cfg.PKey }

// MTU returns the MTU, in bytes: in datagram mode that of the link less the
// encapsulation header, at most.
func (i *Interface) MTU() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.mtu
}

// Neighbors lists the neighbours.
func (i *Interface) Neighbors() []neigh.Entry {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.neigh.Entries()
}

// EthernetPeers lists the Ethernet addresses of the neighbours. There are none
// without Config.Ethernet.
func (i *Interface) EthernetPeers() []ether.Peer {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.ether == nil {
		return nil
	}
	return i.ether.Peers()
}

// MAC returns the Ethernet address of the device. ok is false without
// Config.Ethernet.
func (i *Interface) MAC() (m ether.MAC, ok bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.ether == nil {
		return m, false
	}
	return i.ether.Kernel(), true
}

// Paths lists the ports of the neighbours.
func (i *Interface) Paths() []wire.GID {
	var out []wire.GID
	add := func(a wire.Address) {
		if g := a.GID(); a.ValidUnicast() && !slices.Contains(out, g) {
			out = append(out, g)
		}
	}
	for _, n := range i.Neighbors() {
		add(n.Address)
	}
	for _, p := range i.EthernetPeers() {
		add(p.Address)
	}
	return out
}

// Groups lists the multicast groups.
func (i *Interface) Groups() []mcast.Group {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.groups.Groups()
}

// Capture writes the frames that are sent and received from now on to w, in the
// form of a pcap file. A nil w ends it, and so does an error of w. Frames wait for
// w: give it a buffer.
func (i *Interface) Capture(w io.Writer) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.tap = nil
	if w == nil {
		return nil
	}
	if _, err := w.Write(wire.PcapHeader()); err != nil {
		return fmt.Errorf("capture frames of %s: %w", i.Name(), err)
	}
	i.tap = w
	return nil
}

// captureFrame writes a frame to the capture. i.mu is held.
func (i *Interface) captureFrame(src, dst wire.Address, frame []byte) {
	if i.tap == nil {
		return
	}
	if _, err := i.tap.Write(wire.AppendPcapRecord(nil, time.Now(), src, dst, frame)); err != nil {
		i.tap = nil
		i.cfg.Logger.Warn("IPoIB capture has ended", "name", i.Name(), "err", err)
	}
}
