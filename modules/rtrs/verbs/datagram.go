package verbs

import "net/netip"

// DatagramDevice is a Device that also has unreliable datagrams (UD): messages
// of one packet that are neither acknowledged nor repeated.
type DatagramDevice interface {
	Device
	// OpenDatagrams makes a UD queue pair at the address cfg.Local.
	OpenDatagrams(cfg DatagramConfig) (DatagramQP, error)
}

// MulticastQPN is the destination queue pair number of a datagram for every
// queue pair of the port that is attached to a multicast group.
const MulticastQPN = 0xffffff

// DefaultPKey is the partition that every port is a full member of.
const DefaultPKey = 0xffff

// SamePartition reports whether ports with the P_Keys a and b may speak to each
// other: the low 15 bits name the partition, and at least one of the two is a
// full member. The top bit marks a full member (InfiniBand architecture,
// 10.9.3).
func SamePartition(a, b uint16) bool { return a&0x7fff == b&0x7fff && (a|b)&0x8000 != 0 }

// DatagramConfig describes a UD queue pair.
type DatagramConfig struct {
	Local     netip.Addr // address of the port
	PKey      uint16     // 0: DefaultPKey
	QKey      uint32     // taken from senders until SetQKey
	RecvQueue int        // datagrams that may wait for Receive; 0: 256. Those that came merged count as one
}

// Datagram is one message of a UD queue pair.
type Datagram struct {
	// Payload is the message of Send. Receive fills it: it must have room, and
	// its length is that of the message afterwards.
	Payload []byte
	// Peer and QPN are where Send sends to, and where a received datagram came
	// from. The QPN MulticastQPN reaches the attached queue pairs of Peer.
	Peer netip.Addr
	QPN  uint32
	// QKey is the queue key of the receivers. Send only.
	QKey uint32
	// Multicast reports that a received datagram was sent to MulticastQPN.
	Multicast bool
}

// DatagramQP is a UD queue pair. All methods may be called by any goroutine.
type DatagramQP interface {
	QPN() uint32
	// LocalAddr is the address of the port.
	LocalAddr() netip.Addr
	// MaxPayload is the length of the longest datagram, in bytes.
	MaxPayload() int
	// SetQKey changes the queue key that received datagrams must carry.
	SetQKey(key uint32)
	// Attach makes the queue pair a receiver of the multicast group mgid. The
	// fabric may deliver datagrams of other groups too. Attach of an attached
	// group does nothing.
	Attach(mgid [16]byte) error
	// Detach ends that. It fails if the group is not attached.
	Detach(mgid [16]byte) error
	// Send transmits msgs in order and returns how many were taken. An error
	// concerns msgs[n]. A datagram that was taken may still be lost.
	Send(msgs []Datagram) (n int, err error)
	// Receive waits for a datagram and returns as many as there are, at most
	// len(msgs). A message longer than its Payload is dropped and counted. It
	// returns ErrClosed after Close.
	Receive(msgs []Datagram) (n int, err error)
	// Dropped counts the datagrams that came and were not received.
	Dropped() DatagramDrops
	Close() error
}

// DatagramDrops counts the dropped datagrams of a UD queue pair by reason.
type DatagramDrops struct {
	PKey   uint64 // of another partition
	QKey   uint64 // with another queue key
	Full   uint64 // no receive was posted in time
	Length uint64 // longer than the buffer of the receive
}
