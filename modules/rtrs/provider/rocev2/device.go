package rocev2

import (
	"cmp"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config sets up a device. DefaultConfig returns the defaults. In other literals,
// a number of zero means the default.
type Config struct {
	Name string // for people; default "rocev2"
	// Addrs are the local addresses bound at once. Others are bound when
	// Listen or Connect names them first.
	Addrs []netip.Addr
	// PathMTU is the largest payload of a packet, in bytes: 256, 512, 1024,
	// 2048 or 4096, the default. Interfaces lower it.
	PathMTU int
	// IRD and ORD are the RDMA READs that a connection serves and issues at a
	// time: 0 means 16, negative none.
	IRD, ORD int
	// RetryTimeout is how long the peer may be silent while an answer is due. Then
	// the connection fails. Default 4 s.
	RetryTimeout time.Duration
	// RNRTimeout is how long a message may wait for a receive of the peer. Then
	// the connection fails. Default 5 s, negative: for ever.
	RNRTimeout time.Duration
	// ConnectTimeout bounds a connect, as its context does, and the time until an
	// accepted connection receives something of its peer. Default 10 s.
	ConnectTimeout time.Duration
	// MaxHandshakes bounds the connection requests of peers that have not shown
	// yet that they receive the answer, default 512. MaxHandshakesPerAddress
	// bounds those of one address, or of one /64 of IPv6, default 128. Beyond
	// either an old one gives way to the new one.
	MaxHandshakes, MaxHandshakesPerAddress int
	// NoOffload sends and receives one packet at a time, as with an old kernel.
	NoOffload bool
	// Logger gets one line for each change of state; default slog.Default().
	Logger *slog.Logger
}

// DefaultConfig returns the configuration for a device without fixed addresses.
func DefaultConfig() Config { return Config{}.withDefaults() }

const (
	maxQPWR      = 16384
	maxSGE       = 16
	maxReads     = 128
	maxMessage   = 1 << 31 // bytes, as InfiniBand has it
	queuesPerCQ  = 4096    // queue pairs
	defaultReads = 16
)

func (c Config) withDefaults() Config {
	c.Name = cmp.Or(c.Name, "rocev2")
	c.PathMTU = cmp.Or(c.PathMTU, 4096)
	c.IRD = min(max(cmp.Or(c.IRD, defaultReads), 0), maxReads)
	c.ORD = min(max(cmp.Or(c.ORD, defaultReads), 0), maxReads)
	c.RetryTimeout = cmp.Or(c.RetryTimeout, 4*time.Second)
	c.RNRTimeout = cmp.Or(c.RNRTimeout, 5*time.Second)
	c.ConnectTimeout = cmp.Or(c.ConnectTimeout, 10*time.Second)
	c.MaxHandshakes = cmp.Or(c.MaxHandshakes, defaultHandshakes)
	c.MaxHandshakesPerAddress = cmp.Or(c.MaxHandshakesPerAddress, min(defaultPerAddress, c.MaxHandshakes))
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Device is an opened RoCEv2 device.
type Device struct {
	cfg   Config
	keys  softverbs.KeyTable
	stats softverbs.Totals[*queueCounters, Stats] // of the connection manager and the completion queues
	cm    connManager

	mu     sync.Mutex // taken before cq.mu; never together with cm.mu
	ports  map[netip.Addr]*udpPort
	slots  []*cqSlot             // from index 1; 0 is the connection manager's
	ud     *cqSlot               // of the UD queue pairs, nil before the first one
	agents map[*udpPort]*udAgent // of the ports with UD queue pairs
	users  int                   // the open device and its completion queues
	closed bool

	faults atomic.Pointer[testFaults] // tests only
}

// testFaults change the network for tests.
type testFaults struct {
	inject  func(receivedPacket) []receivedPacket // arrives in place of a data packet
	control func(mad) bool                        // whether a message of the connection manager arrives
}

// cqSlot is the position of a completion queue in the socket group of every port.
type cqSlot struct {
	index uint32
	cq    *compQueue // nil: free; guarded by Device.mu. That of Device.ud has none
}

var _ verbs.Device = (*Device)(nil)

// Open opens a device and binds cfg.Addrs. The result is a *Device; it has
// Stats as well.
func Open(cfg Config) (verbs.Device, error) {
	cfg = cfg.withDefaults()
	if cfg.PathMTU < 256 || cfg.PathMTU > 4096 || cfg.PathMTU&(cfg.PathMTU-1) != 0 {
		return nil, fmt.Errorf("open rocev2 device %s: path MTU %d is none of 256, 512, 1024, 2048, 4096", cfg.Name, cfg.PathMTU)
	}
	if cfg.MaxHandshakes < 1 || cfg.MaxHandshakesPerAddress < 1 {
		return nil, fmt.Errorf("open rocev2 device %s: %d handshakes, %d of an address: at least 1", cfg.Name, cfg.MaxHandshakes, cfg.MaxHandshakesPerAddress)
	}
	d := &Device{cfg: cfg, ports: map[netip.Addr]*udpPort{}, agents: map[*udpPort]*udAgent{}, slots: []*cqSlot{nil}, users: 1}
	d.stats.Open(&d.cm.stats)
	d.keys.Init()
	d.cm.init(d, rand.Uint64())
	for _, a := range cfg.Addrs {
		if _, err := d.portAt(a); err != nil {
			d.Close()
			return nil, fmt.Errorf("open rocev2 device %s: %w", cfg.Name, err)
		}
	}
	return d, nil
}

// Info implements verbs.Device.
func (d *Device) Info() verbs.Info {
	return verbs.Info{Fabric: "rocev2", Name: d.cfg.Name, Port: 1,
		Caps:    verbs.CapWriteImm | verbs.CapSendImm | verbs.CapSendInv | verbs.CapRecvInv | verbs.CapKeyRotation,
		MaxQPWR: maxQPWR, MaxSGE: maxSGE}
}

// portAt returns the port of a local address, opened if it is not yet.
func (d *Device) portAt(addr netip.Addr) (*udpPort, error) {
	addr = addr.Unmap()
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.ports[addr]; p != nil {
		return p, nil
	}
	if d.closed {
		return nil, fmt.Errorf("open UDP port %d at %s: %w", roceUDPPort, addr, verbs.ErrClosed)
	}
	if len(d.slots) == 1 { // a filter needs a group
		d.slots = append(d.slots, &cqSlot{index: 1})
	}
	p, err := d.openPort(addr, len(d.slots)-1)
	if err != nil {
		return nil, err
	}
	d.ports[addr] = p
	for _, s := range d.slots[1:] {
		if s.cq != nil {
			s.cq.addPort(p)
		}
	}
	go p.run()
	return p, nil
}

// takeSlot gives c a slot and its sockets.
func (d *Device) takeSlot(c *compQueue) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return verbs.ErrClosed
	}
	s := d.freeSlot()
	if s == nil {
		if len(d.slots) > maxSlots {
			return fmt.Errorf("all %d completion queues of the device are in use", maxSlots)
		}
		if err := d.growPorts(); err != nil {
			return err
		}
		s = &cqSlot{index: uint32(len(d.slots))}
		d.slots = append(d.slots, s)
	}
	s.cq, c.slot = c, s
	for _, p := range d.ports {
		c.addPort(p)
	}
	d.users++
	d.stats.Open(c.stats)
	return nil
}

func (d *Device) freeSlot() *cqSlot {
	for _, s := range d.slots[1:] {
		if s.cq == nil && s != d.ud {
			return s
		}
	}
	return nil
}

// growPorts opens a socket for one more slot at every port, or at none.
func (d *Device) growPorts() error {
	var grown []*udpPort
	for _, p := range d.ports {
		if err := p.addSocket(); err != nil {
			for _, g := range grown {
				g.closeLast()
			}
			return err
		}
		grown = append(grown, p)
	}
	return nil
}

// giveSlot frees the slot of c.
func (d *Device) giveSlot(c *compQueue) {
	d.mu.Lock()
	c.slot.cq = nil
	d.mu.Unlock()
	d.stats.Close(c.stats)
	d.removeUser()
}

// removeUser removes a user. The last one closes the ports.
func (d *Device) removeUser() {
	d.mu.Lock()
	d.users--
	last := d.users == 0
	var ports []*udpPort
	if last {
		for a, p := range d.ports {
			p.close()
			delete(d.ports, a)
			ports = append(ports, p)
		}
	}
	d.mu.Unlock()
	if !last {
		return
	}
	d.cm.endAll()
	for _, p := range ports {
		<-p.done // the address is free now
	}
}

// AllocPD implements verbs.Device.
func (d *Device) AllocPD() (verbs.PD, error) {
	if d.isClosed() {
		return nil, fmt.Errorf("allocate protection domain on %s: %w", d.cfg.Name, verbs.ErrClosed)
	}
	return softverbs.NewDomain(&d.keys), nil
}

// Close implements verbs.Device. It closes the listeners. Queues and regions stay
// usable until they are closed; the addresses are free again after the last
// completion queue was closed.
func (d *Device) Close() error {
	d.mu.Lock()
	again := d.closed
	d.closed = true
	d.mu.Unlock()
	if again {
		return nil
	}
	d.cm.closeListeners()
	d.removeUser()
	return nil
}

func (d *Device) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// Stats are the counters of a device since it was opened.
type Stats struct {
	SentPackets     uint64 // data packets passed to sockets
	ReceivedPackets uint64 // data packets taken from sockets
	PlacedCopyBytes uint64 // payload copied from the staging buffers to its place, or from a wrong one to them
	Resent          uint64 // packets sent again
	Timeouts        uint64 // answers that did not come in time
	SequenceNAKs    uint64 // gaps reported by peers
	RNRNAKs         uint64 // receives that peers did not have
	Displaced       uint64 // handshakes ended to make room for newer ones
	Dropped         [Reasons]uint64
}

// queueCounters are those of one completion queue. Its owner alone writes them. They
// fill cache lines of their own, so that owners do not slow each other down.
type queueCounters struct {
	_                                                          [64]byte
	sent, received, placed, resent, timeouts, seqNAKs, rnrNAKs atomic.Uint64
	dropped                                                    [Reasons]atomic.Uint64
	_                                                          [64]byte
}

// dropReason is a reason to drop a packet; see Stats.Dropped and DropReason.
type dropReason uint8

const (
	dropNone    dropReason = iota
	dropLength             // shorter or longer than its headers say
	dropHeader             // version or opcode
	dropPKey               // wrong partition
	dropKey                // wrong Q_Key of a datagram
	dropQPN                // no such queue pair
	dropAddress            // not from the connection's peer
	dropICRC               // bytes were changed
	dropGhost              // answers nothing that is outstanding
	dropMAD                // no message of the connection manager, or makes no sense
	dropState              // the connection does not take it now
	// Reasons is the number of reasons.
	Reasons = iota
)

// DropReason returns the name of index i of Stats.Dropped.
func DropReason(i int) string {
	return [Reasons]string{"none", "length", "header", "partition key", "queue key", "queue pair", "address", "icrc", "ghost", "management", "state"}[i]
}

// Stats returns the sums of all queues of the device. Any goroutine.
func (d *Device) Stats() Stats {
	s := d.stats.Sum()
	s.Displaced = d.cm.displaced.Load()
	return s
}

// AddTo adds c to s.
func (c *queueCounters) AddTo(s *Stats) {
	s.SentPackets += c.sent.Load()
	s.ReceivedPackets += c.received.Load()
	s.PlacedCopyBytes += c.placed.Load()
	s.Resent += c.resent.Load()
	s.Timeouts += c.timeouts.Load()
	s.SequenceNAKs += c.seqNAKs.Load()
	s.RNRNAKs += c.rnrNAKs.Load()
	for i := range c.dropped {
		s.Dropped[i] += c.dropped[i].Load()
	}
}
