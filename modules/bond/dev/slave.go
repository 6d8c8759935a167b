package dev

import (
	"bytes"
	"net/netip"
)

// Attrs are the attributes of an interface that depend on its type.
type Attrs struct {
	Type      uint16 // hardware type of ARP: 1 Ethernet, 32 InfiniBand
	Address   []byte // link-layer address
	Broadcast []byte // link-layer address of all
	HeaderLen int    // of a frame, in octets
	MTU       int
}

func (a Attrs) copyAttrs() Attrs {
	a.Address, a.Broadcast = bytes.Clone(a.Address), bytes.Clone(a.Broadcast)
	return a
}

// RxFilter selects the received frames that a slave hands to its bond.
type RxFilter uint8

// Filters. RxNone is that of a device that was just enslaved.
const (
	RxNone  RxFilter = iota
	RxWatch          // all frames, but the bond uses them only as signs of life
	RxAll
)

// Slave is a device that can be enslaved. While it is, the bond alone calls its
// methods, one at a time but for Send, Carrier and the getters.
//
// The form of frames is that of package frame: a whole frame for Ethernet, the
// encapsulation header and the payload for InfiniBand. There the device finds
// the next hop in the packet itself and sends ARP to the broadcast group. ARP
// that it receives is handed over too, also when the device itself answers it.
type Slave interface {
	// Name is the interface's name, of at most 15 octets.
	Name() string
	// Attrs returns the attributes of now. The caller does not change them.
	Attrs() Attrs
	// Speed returns Mbit/s, 0 if that is unknown, and whether it is full duplex.
	Speed() (mbps int, full bool)

	// IsUp reports whether the interface is up. A device that is to be enslaved must not be.
	IsUp() bool
	// SetUp brings it up or down.
	SetUp(up bool) error
	// Carrier reports whether the link below works, as far as the device can
	// see. It does not block.
	Carrier() bool

	// SetsAddress reports whether SetAddress can work at all.
	SetsAddress() bool
	// SetAddress changes the link-layer address, also while the device is up.
	SetAddress(addr []byte) error
	// SetMTU changes the MTU.
	SetMTU(mtu int) error

	// JoinGroup makes the device receive an IP multicast group; the device
	// knows how its link maps it. LeaveGroup takes that back.
	JoinGroup(group netip.Addr) error
	LeaveGroup(group netip.Addr) error

	// SetFilter selects the frames that are handed over.
	SetFilter(RxFilter) error
	// Attach gives the device its bond's callbacks; Detach takes them back. A call
	// that has begun may go on after Detach.
	Attach(Callbacks)
	Detach()
	// Send sends a frame. It is called from many goroutines, does not block for
	// long and does not keep frame.
	Send(frame []byte) error
}

// PrefixUser is a Slave that finds neighbours itself and answers for the bond's
// addresses, as a device of InfiniBand does.
type PrefixUser interface {
	// SetPrefixes tells the active slave the bond's addresses, and any other one that it has
	// none.
	SetPrefixes([]netip.Prefix)
}

// Callbacks are a slave's calls of its bond. None of them blocks.
type Callbacks struct {
	// Received takes a frame. The slave may use its memory again afterwards.
	Received func(frame []byte)
	// Changed says that carrier, speed or address may be another one.
	Changed func()
}

// Upper is the interface that a bond's users see. The bond calls its methods
// one at a time, but for Deliver and Prefixes.
type Upper interface {
	// Configure makes the interface one of a.Type, with all that depends on
	// it. If it is up it is closed before and opened again afterwards, so that no
	// group stays joined at an address of the former type. EINVAL says that it
	// cannot have the type.
	Configure(a Attrs) error
	// SetAddress changes the link-layer address, also while it is up.
	SetAddress(addr []byte) error
	SetMTU(mtu int) error
	SetCarrier(on bool) error
	SetUp(up bool) error
	// Prefixes are the IP addresses of the interface with the lengths of their networks.
	Prefixes() []netip.Prefix
	// Deliver hands a received frame to the users. It does not keep frame.
	Deliver(frame []byte) error
	Close() error
}

// UpperCallbacks are an Upper's calls of its bond.
type UpperCallbacks struct {
	// Transmit takes a frame of a user. The upper may use its memory again
	// afterwards.
	Transmit func(frame []byte)
	// UpChanged says whether the interface is up, after each change of that and of
	// its addresses.
	UpChanged func(up bool)
}
