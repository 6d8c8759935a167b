package ether

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

var be = binary.BigEndian

// MAC is an Ethernet address.
type MAC [6]byte

// Broadcast is the Ethernet address of all.
var Broadcast = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// String returns the octets in hexadecimal, joined by colons.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// IsGroup reports whether m is a multicast address, or Broadcast.
func (m MAC) IsGroup() bool { return m[0]&1 != 0 }

// Hash returns the Ethernet address made for a link-layer address: 02, which
// marks it as local, and 40 bits of a hash. The flags of a are no part of it.
// try is 0 for the first choice; others are taken when that is in use.
func Hash(a wire.Address, try byte) MAC {
	a[0] = try
	h := sha256.Sum256(a[:])
	return MAC{2, h[0], h[1], h[2], h[3], h[4]}
}

// maxPeers is the largest number of neighbours in a table.
const maxPeers = 4096

// portAddress is an address without flags.
type portAddress [wire.AddressLen - 1]byte

func portOf(a wire.Address) portAddress { return portAddress(a[1:]) }

// Peer is a neighbour with its two addresses.
type Peer struct {
	MAC     MAC
	Address wire.Address
	used    uint64
}

// Table maps neighbours to Ethernet addresses and back. It keeps maxPeers; the
// least recently used one makes room for another.
type Table struct {
	local  wire.Address
	own    MAC // made for local
	kernel MAC // of the device: own, unless it was changed
	byMAC  map[MAC]*Peer
	byPort map[portAddress]*Peer
	clock  uint64 // counts uses
	stats  Stats
}

// Stats are the counters of a table.
type Stats struct {
	Collisions uint64 // neighbours that did not get the first choice
	Evicted    uint64 // neighbours that made room for others
}

// NewTable makes a table for the interface with the address local.
func NewTable(local wire.Address) *Table {
	own := Hash(local, 0)
	return &Table{local: local, own: own, kernel: own, byMAC: map[MAC]*Peer{}, byPort: map[portAddress]*Peer{}}
}

// Own returns the Ethernet address made for the interface itself.
func (t *Table) Own() MAC { return t.own }

// Kernel returns the Ethernet address of the device.
func (t *Table) Kernel() MAC { return t.kernel }

// SetKernel sets the Ethernet address that the device has now. A bond may
// change it.
func (t *Table) SetKernel(m MAC) { t.kernel = m }

// SetFlags sets the flags in the interface's own link-layer address.
func (t *Table) SetFlags(flags byte) { t.local[0] = flags }

// Stats returns the counters.
func (t *Table) Stats() Stats { return t.stats }

// Peers lists the neighbours, in the order of their Ethernet addresses.
func (t *Table) Peers() []Peer {
	out := make([]Peer, 0, len(t.byMAC))
	for _, p := range t.byMAC {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b Peer) int { return slices.Compare(a.MAC[:], b.MAC[:]) })
	return out
}

// Flush forgets all neighbours.
func (t *Table) Flush() {
	clear(t.byMAC)
	clear(t.byPort)
}

// MAC returns the Ethernet address of the neighbour a, made if it has none.
// For the interface itself it is that of the device.
func (t *Table) MAC(a wire.Address) MAC {
	if a.SamePort(t.local) {
		return t.kernel
	}
	return t.findPeer(a).MAC
}

// Learn is MAC for an address whose flags are those that the neighbour has
// stated.
func (t *Table) Learn(a wire.Address) MAC {
	if a.SamePort(t.local) {
		return t.kernel
	}
	p := t.findPeer(a)
	p.Address = a
	return p.MAC
}

func (t *Table) findPeer(a wire.Address) *Peer {
	p := t.byPort[portOf(a)]
	if p == nil {
		p = t.addPeer(a)
	}
	t.clock++
	p.used = t.clock
	return p
}

func (t *Table) addPeer(a wire.Address) *Peer {
	if len(t.byMAC) >= maxPeers {
		t.evictOldest()
	}
	p := &Peer{MAC: Hash(a, 0), Address: a}
	for try := byte(1); t.byMAC[p.MAC] != nil || p.MAC == t.own || p.MAC == t.kernel; try++ {
		t.stats.Collisions++
		p.MAC = Hash(a, try)
	}
	t.byMAC[p.MAC], t.byPort[portOf(a)] = p, p
	return p
}

func (t *Table) evictOldest() {
	var oldest *Peer
	for _, p := range t.byMAC {
		if oldest == nil || p.used < oldest.used {
			oldest = p
		}
	}
	t.stats.Evicted++
	delete(t.byMAC, oldest.MAC)
	delete(t.byPort, portOf(oldest.Address))
}

// Address returns the link-layer address of the neighbour with an Ethernet
// address. It reports whether there is one.
func (t *Table) Address(m MAC) (wire.Address, bool) {
	p := t.byMAC[m]
	if p == nil {
		return wire.Address{}, false
	}
	t.clock++
	p.used = t.clock
	return p.Address, true
}
