package cm

import (
	"cmp"
	"log/slog"
	"net/netip"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// MaxMTU is the largest MTU of an interface in connected mode, in bytes, that of
// Linux: 64 KiB less 16.
const MaxMTU = 65520

// Config describes the connections of an interface. Zero fields mean the defaults
// named here.
type Config struct {
	Fabric verbs.ServiceDevice
	Local  netip.Addr // address of the port
	PKey   uint16     // partition; default 0xffff
	QPN    uint32     // of the interface's UD queue pair

	ReceiveMTU int // longest message taken, in bytes, with the encapsulation header; default MaxMTU+4
	Receives   int // receives posted for each connection of a peer; default 16
	SendBuffer int // bytes of a connection that wait to be sent; default 4 MiB
	MaxPassive int // connections of peers; default MaxPassive

	Retry time.Duration // how long a peer that refused gets datagrams; default 10 s
	Idle  time.Duration // an unused connection ends after it; default 512 s

	// Headroom is the number of spare bytes in front of a message given to
	// Receive.
	Headroom int
	// Receive takes a message of the interface with the UD queue pair qpn at
	// peer. b is Headroom bytes and the message. It belongs to Receive until
	// Receive returns.
	Receive func(peer netip.Addr, qpn uint32, b []byte)

	// Logger gets a line for each connection that comes or goes, at level Debug.
	// Default slog.Default().
	Logger *slog.Logger
}

// MaxPassive is the default limit of connections from peers, that of Linux.
const MaxPassive = 128

// sendQueue is the largest number of messages that a connection has
// outstanding.
const sendQueue = 256

// connecting is the largest number of frames that wait for a connection, that
// of Linux.
const connecting = 3

func (c Config) withDefaults() Config {
	c.PKey = cmp.Or(c.PKey, verbs.DefaultPKey)
	c.ReceiveMTU = cmp.Or(c.ReceiveMTU, MaxMTU+wire.EncapLen)
	c.Receives = cmp.Or(c.Receives, 16)
	c.SendBuffer = cmp.Or(c.SendBuffer, 4<<20)
	c.MaxPassive = cmp.Or(c.MaxPassive, MaxPassive)
	c.Retry = cmp.Or(c.Retry, 10*time.Second)
	c.Idle = cmp.Or(c.Idle, 512*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

// Stats are the counters of a Manager.
type Stats struct {
	Active, Passive    int    // connections that are up
	Connects, Accepts  uint64 // connections that came up
	Refused            uint64 // attempts that failed
	BadRequests        uint64 // requests with wrong private data
	Crowded            uint64 // requests beyond Config.MaxPassive
	Broken             uint64 // connections that failed
	TxMessages, TxDrop uint64 // TxDrop: no room in a connection, or lost with a connection
	RxMessages         uint64
}
