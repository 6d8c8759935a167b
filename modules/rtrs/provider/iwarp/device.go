package iwarp

import (
	"cmp"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tally"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config sets up a device. DefaultConfig returns the defaults. In other
// literals, a number of zero means the default, and a false CRC means that no
// CRC is asked for.
type Config struct {
	Name string // for people; default "iwarp0"
	// CRC asks for a CRC32C on every frame. If the peer asks for it, it is used
	// in any case. True in DefaultConfig.
	CRC bool
	// MULPDU is the largest DDP segment sent, header included, in bytes:
	// 128..65535. Default 65490: 65472 bytes of payload.
	MULPDU int
	// TLS has the keys and certificates of this end. Without it there is no TLS.
	TLS *tlsauth.Auth
	// AcceptTLS selects the connections that listeners take. Connect follows
	// its parameters.
	AcceptTLS TLSMode
	// TLSCRC asks for a CRC of every frame below TLS, too, although TLS
	// authenticates all bytes anyway. False by default, whatever CRC is.
	TLSCRC bool
	// Foreign omits the extension block, for peers that are other iWARP stacks.
	// There are no immediates then, and empty Writes wake a siw responder that
	// is silent.
	Foreign bool
	// IRD and ORD are the RDMA READs that a connection serves and issues at a
	// time: 0 means 16, negative none.
	IRD, ORD int
	// RNRTimeout is how long a message waits for a receive before the
	// connection is terminated. Default 5 s, negative: for ever.
	RNRTimeout time.Duration
	// RequestTimeout bounds the wait for the MPA request of an accepted
	// connection (default 5 s), ReplyTimeout that for the reply (default 10 s).
	RequestTimeout, ReplyTimeout time.Duration
	// MaxHandshakes bounds the connections of a listener without a request, or
	// with one that is not accepted yet; default 512. MaxHandshakesPerAddress
	// bounds those of one address, or of one /64 of IPv6, without a request;
	// default 128. Beyond either the oldest of them is closed.
	MaxHandshakes, MaxHandshakesPerAddress int
	// PeerTimeout ends a connection if the peer acknowledges or takes nothing
	// for that long. The time runs while bytes wait for the peer; a connection
	// without such bytes is probed. It also bounds the TCP handshake. The
	// default is 7 s. It is more than the 6 s within which heartbeats of 1 s
	// detect a lost peer, and less than 10 s, so that a path that loses one of
	// its connections fails while its requests may still wait. Negative: the
	// limits of the system, about 15 minutes.
	PeerTimeout time.Duration
	// Logger gets one line for each change of state; default slog.Default().
	Logger *slog.Logger
}

// DefaultConfig returns the configuration for two ends of this package.
func DefaultConfig() Config { return Config{CRC: true}.withDefaults() }

const (
	defaultMULPDU  = 65472 + untaggedHeaderLen
	minMULPDU      = 128 // RFC 5044, section 5.1
	maxMULPDU      = 65535
	terminateLimit = time.Second // to get a Terminate out

	defaultHandshakes = 512
	defaultPerAddress = 128

	maxQPWR = 16384
	maxSGE  = 32
)

func (c Config) withDefaults() Config {
	c.Name = cmp.Or(c.Name, "iwarp0")
	c.MULPDU = cmp.Or(c.MULPDU, defaultMULPDU)
	c.IRD = max(cmp.Or(c.IRD, 16), 0)
	c.ORD = max(cmp.Or(c.ORD, 16), 0)
	c.RNRTimeout = cmp.Or(c.RNRTimeout, 5*time.Second)
	c.RequestTimeout = cmp.Or(c.RequestTimeout, 5*time.Second)
	c.ReplyTimeout = cmp.Or(c.ReplyTimeout, 10*time.Second)
	c.MaxHandshakes = cmp.Or(c.MaxHandshakes, defaultHandshakes)
	c.MaxHandshakesPerAddress = cmp.Or(c.MaxHandshakesPerAddress, min(defaultPerAddress, c.MaxHandshakes))
	c.PeerTimeout = cmp.Or(c.PeerTimeout, 7*time.Second)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Stats are the counters of a device since it was opened.
type Stats struct {
	PlacedCopyBytes uint64 // payload copied from the staging buffers to its place
	DirectBytes     uint64 // payload that the socket call placed
	SentBytes       uint64 // everything accepted by sockets
	ReceivedBytes   uint64 // everything taken from sockets
	CRCErrors       uint64
	Silent          uint64 // connections that ended by Config.PeerTimeout
	Handshakes      HandshakeStats
}

// HandshakeStats counts the connections to listeners that ended before their
// request reached Accept.
type HandshakeStats struct {
	GaveWay uint64 // too many were unfinished
	Late    uint64 // the request did not come in time
	Refused uint64 // not a request that is served, or the peer has gone
}

// Device is an opened software iWARP device.
type Device struct {
	cfg   Config
	keys  softverbs.KeyTable
	stats softverbs.Totals[*queueCounters, Stats]

	tlsHandshakes handshakeScheduler // gives CPU time to the handshakes of TLS

	mu        sync.Mutex
	listeners map[*listener]struct{}
	inherited map[netip.AddrPort]*net.TCPListener // for Listen
	closed    bool
}

// queueCounters are those of one completion queue. Its owner alone writes them. They
// fill cache lines of their own, so that owners do not slow each other down.
type queueCounters struct {
	_                                                 [64]byte
	placed, direct, sent, received, crcErrors, silent tally.Count
	_                                                 [64]byte
}

var _ verbs.Device = (*Device)(nil)

// Open opens a device. The result is a *Device; it has Stats as well.
func Open(cfg Config) (verbs.Device, error) {
	cfg = cfg.withDefaults()
	if cfg.MULPDU < minMULPDU || cfg.MULPDU > maxMULPDU {
		return nil, fmt.Errorf("open iwarp device %s: MULPDU %d is outside %d..%d", cfg.Name, cfg.MULPDU, minMULPDU, maxMULPDU)
	}
	if cfg.IRD > maxReadDepth || cfg.ORD > maxReadDepth {
		return nil, fmt.Errorf("open iwarp device %s: IRD %d, ORD %d: at most %d", cfg.Name, cfg.IRD, cfg.ORD, maxReadDepth)
	}
	if cfg.MaxHandshakes < 1 || cfg.MaxHandshakesPerAddress < 1 {
		return nil, fmt.Errorf("open iwarp device %s: %d handshakes, %d of an address: at least 1", cfg.Name, cfg.MaxHandshakes, cfg.MaxHandshakesPerAddress)
	}
	if cfg.AcceptTLS != TLSOff && cfg.TLS == nil {
		return nil, fmt.Errorf("open iwarp device %s: %w", cfg.Name, errNoTLS)
	}
	d := &Device{cfg: cfg, listeners: map[*listener]struct{}{}, inherited: map[netip.AddrPort]*net.TCPListener{}}
	d.keys.Init()
	d.tlsHandshakes.moved = func() uint64 { s := d.Stats(); return s.SentBytes + s.ReceivedBytes }
	return d, nil
}

// Info implements verbs.Device.
func (d *Device) Info() verbs.Info {
	caps := verbs.CapSendInv | verbs.CapRecvInv | verbs.CapKeyRotation
	if !d.cfg.Foreign {
		caps |= verbs.CapWriteImm | verbs.CapSendImm
	}
	if d.cfg.TLS != nil {
		caps |= verbs.CapProtect
	}
	return verbs.Info{Fabric: "iwarp", Name: d.cfg.Name, Port: 1, Caps: caps, MaxQPWR: maxQPWR, MaxSGE: maxSGE}
}

// Stats returns the sums of all queues of the device. Any goroutine.
func (d *Device) Stats() Stats { return d.stats.Sum() }

// AddTo adds c to s.
func (c *queueCounters) AddTo(s *Stats) {
	s.PlacedCopyBytes += c.placed.Load()
	s.DirectBytes += c.direct.Load()
	s.SentBytes += c.sent.Load()
	s.ReceivedBytes += c.received.Load()
	s.CRCErrors += c.crcErrors.Load()
	s.Silent += c.silent.Load()
}

// AllocPD implements verbs.Device.
func (d *Device) AllocPD() (verbs.PD, error) {
	if d.isClosed() {
		return nil, fmt.Errorf("allocate protection domain on %s: %w", d.cfg.Name, verbs.ErrClosed)
	}
	return softverbs.NewDomain(&d.keys), nil
}

// Close implements verbs.Device. It closes the listeners. Queues and regions
// stay usable until they are closed.
func (d *Device) Close() error {
	d.mu.Lock()
	d.closed = true
	open := make([]*listener, 0, len(d.listeners))
	for l := range d.listeners {
		open = append(open, l)
	}
	for _, l := range d.inherited {
		l.Close()
	}
	clear(d.inherited)
	d.mu.Unlock()
	for _, l := range open {
		l.Close()
	}
	return nil
}

func (d *Device) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}
