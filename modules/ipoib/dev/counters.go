package dev

import (
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

type counters struct {
	rxPackets, rxBytes, rxDropped, rxUnknownType, rxOwn, multicast atomic.Uint64
	txPackets, txBytes, txDropped, txErrors, txChecksums           atomic.Uint64
	txSegmented                                                    atomic.Uint64
}

// Stats counts the packets of an interface. What is sent includes ARP and neighbour
// discovery; what is received is what the kernel took.
type Stats struct {
	RxPackets, RxBytes uint64
	RxDropped          uint64 // malformed, or refused by the kernel
	RxUnknownType      uint64 // of an EtherType that is not carried
	RxOwn              uint64 // our own, come back
	Multicast          uint64 // received, of RxPackets
	TxPackets, TxBytes uint64
	TxDropped          uint64 // for want of a route or a path
	TxErrors           uint64 // refused by the fabric
	TxChecksums        uint64 // whose checksum the kernel left to the interface
	TxSegmented        uint64 // packets of the kernel that left as segments

	Fabric verbs.DatagramDrops
	Neigh  neigh.Stats
	Mcast  mcast.Stats
}

// Stats returns the counters.
func (i *Interface) Stats() Stats {
	c := &i.counters
	s := Stats{
		RxPackets: c.rxPackets.Load(), RxBytes: c.rxBytes.Load(), RxDropped: c.rxDropped.Load(),
		RxUnknownType: c.rxUnknownType.Load(), RxOwn: c.rxOwn.Load(), Multicast: c.multicast.Load(),
		TxPackets: c.txPackets.Load(), TxBytes: c.txBytes.Load(), TxDropped: c.txDropped.Load(), TxErrors: c.txErrors.Load(), TxChecksums: c.txChecksums.Load(), TxSegmented: c.txSegmented.Load(),
		Fabric: i.qp.Dropped(),
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	s.Neigh, s.Mcast = i.neigh.Stats(), i.groups.Stats()
	return s
}
