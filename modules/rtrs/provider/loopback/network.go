package loopback

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// AllCaps are the abilities of a device without options.
const AllCaps = verbs.CapWriteImm | verbs.CapSendImm | verbs.CapSendInv | verbs.CapRecvInv | verbs.CapKeyRotation

// Option changes a Network when it is made.
type Option func(*Network)

// WithCaps sets the abilities of all devices, to test how a user adapts.
func WithCaps(caps verbs.Cap) Option { return func(n *Network) { n.info.Caps = caps } }

// WithLimits sets the largest queue and the largest number of elements.
func WithLimits(maxQPWR, maxSGE int) Option {
	return func(n *Network) { n.info.MaxQPWR, n.info.MaxSGE = maxQPWR, maxSGE }
}

// WithAckTimeout ends a connection at an end if that end's requests make no
// progress for d, as the retries of a transport do. Without it an end waits for
// ever.
func WithAckTimeout(d time.Duration) Option { return func(n *Network) { n.ackTimeout = d } }

// Network joins devices of one process. The zero value is not usable, see New.
type Network struct {
	info verbs.Info // of every device, but for the name
	// ackTimeout is how long an end waits for progress of its requests; 0: for ever.
	ackTimeout time.Duration
	tapMu      sync.Mutex // serialises tap; taken before mu, never while holding it
	tap        atomic.Pointer[func(Event)]

	mu        sync.Mutex // guards everything below, and all objects of the network
	listeners map[netip.AddrPort]*listener
	refused   map[netip.AddrPort]error
	links     map[linkKey]*faultyLink
	conns     []*connPair    // alive at one end at least, in order of making
	dials     []*dialRequest // requests and answers under way
	nextPort  uint16         // of the next dialling end
	nextIndex uint32         // of the next memory region
	nextAddr  uint64         // of the next memory region
	nextSeq   uint64         // of the next message
	free      [bufClasses][][]byte
}

// New makes a network without faults.
func New(opts ...Option) *Network {
	n := &Network{
		info:      verbs.Info{Fabric: "loopback", Port: 1, Caps: AllCaps, MaxQPWR: 16384, MaxSGE: 16},
		listeners: map[netip.AddrPort]*listener{},
		refused:   map[netip.AddrPort]error{},
		links:     map[linkKey]*faultyLink{},
		nextPort:  firstPort,
		nextIndex: 1,
		nextAddr:  0x7000_0000_0000,
	}
	for _, o := range opts {
		o(n)
	}
	return n
}

// firstPort is the first port given out, above those that tests like to name.
const firstPort = 20000

// Device opens a device. All devices of a network reach each other.
func (n *Network) Device(name string) verbs.Device {
	d := &loopDevice{net: n, info: n.info, regions: map[uint32]*memRegion{}}
	d.info.Name = name
	return d
}

// allocPort gives out the next free port number.
func (n *Network) allocPort() uint16 {
	p := n.nextPort
	if n.nextPort++; n.nextPort == 0 {
		n.nextPort = firstPort
	}
	return p
}

// findListener finds the listener that takes a request to dst.
func (n *Network) findListener(dst netip.AddrPort) (*listener, error) {
	if err := n.refused[dst]; err != nil {
		return nil, err
	}
	// As with sockets, the IPv6 wildcard takes IPv4 too.
	wildcards := []netip.Addr{netip.IPv6Unspecified()}
	if dst.Addr().Is4() {
		wildcards = append(wildcards, netip.IPv4Unspecified())
	}
	for _, a := range append(wildcards, dst.Addr()) {
		if l := n.listeners[netip.AddrPortFrom(a, dst.Port())]; l != nil {
			return l, nil
		}
	}
	return nil, fmt.Errorf("nobody listens: %w", syscall.ECONNREFUSED)
}

// Payload copies are kept for reuse by size: class c holds 256<<c bytes.
const (
	bufClasses  = 24
	minBufBytes = 256
)

func bufClass(size int) int {
	c := 0
	for minBufBytes<<c < size {
		c++
	}
	return c
}

func (n *Network) getBuf(size int) []byte {
	if size == 0 {
		return nil
	}
	c := bufClass(size)
	if l := n.free[c]; len(l) > 0 {
		b := l[len(l)-1]
		n.free[c] = l[:len(l)-1]
		return b[:size]
	}
	return make([]byte, size, minBufBytes<<c)
}

func (n *Network) putBuf(b []byte) {
	if cap(b) == 0 {
		return
	}
	c := bufClass(cap(b))
	n.free[c] = append(n.free[c], b[:0])
}
