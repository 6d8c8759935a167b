package dev

import (
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/ipoib/cm"
	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

type frameCounters struct {
	rxPackets, rxBytes, rxDropped, rxUnknownType, rxOwn, multicast atomic.Uint64
	txPackets, txBytes, txDropped, txErrors, txChecksums           atomic.Uint64
	rxJoined, rxWakeups                                            atomic.Uint64
	txSegmented, pmtuSent                                          atomic.Uint64
}

// Stats counts the packets of an interface. Sent packets include ARP and
// neighbour discovery; received packets are those that the kernel took.
type Stats struct {
	RxPackets, RxBytes uint64
	RxDropped          uint64 // malformed, or refused by the kernel
	RxUnknownType      uint64 // of an EtherType that is not carried
	RxOwn              uint64 // sent by this interface itself
	Multicast          uint64 // received, of RxPackets
	TxPackets, TxBytes uint64
	TxDropped          uint64 // for want of a route or a path
	TxErrors           uint64 // refused by the fabric
	TxChecksums        uint64 // checksums left to the interface by the kernel
	RxJoined           uint64 // received in a joined packet; counted in RxPackets, too
	RxWakeups          uint64 // times that the receiver was woken
	TxSegmented        uint64 // packets of the kernel that left as segments

	PMTUSent uint64 // answers to packets that were too big, with the right MTU

	Conns  cm.Stats // zero in datagram mode
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
		RxJoined: c.rxJoined.Load(), RxWakeups: c.rxWakeups.Load(), PMTUSent: c.pmtuSent.Load(), Fabric: i.qp.Dropped(),
	}
	if m := i.cm.Load(); m != nil {
		s.Conns = m.Stats()
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	s.Neigh, s.Mcast = i.neigh.Stats(), i.groups.Stats()
	return s
}
