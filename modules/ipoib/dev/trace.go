package dev

import (
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Trace holds debug levels that interfaces share, those of Linux's module
// parameters debug_level, mcast_debug_level and data_debug_level. Above 0 there is a log line for
// each event. They may be changed at any time.
type Trace struct {
	Level atomic.Int32 // ARP and neighbour discovery sent
	Mcast atomic.Int32 // multicast groups joined and left
	Data  atomic.Int32 // frames sent and received, in builds with DataTrace
}

// traceNeighbor logs a frame of neigh.
func (i *Interface) traceNeighbor(f *neigh.Frame) {
	if t := i.cfg.Trace; t == nil || t.Level.Load() <= 0 {
		return
	}
	target := ""
	switch {
	case f.Type == wire.TypeARP:
		target = wire.ARP(f.Packet).TargetIP().String()
	case wire.NDType(f.Packet) != 0:
		target = wire.ND(f.Packet).Fields().Target.String()
	default:
		return // a packet that waited for its neighbour
	}
	i.cfg.Logger.Info("IPoIB neighbour message", "name", i.Name(), "target", target, "to", f.Dst)
}

// traceGroup logs a request of the table of groups.
func (i *Interface) traceGroup(r mcast.Request) {
	if t := i.cfg.Trace; t != nil && t.Mcast.Load() > 0 {
		i.cfg.Logger.Info("IPoIB multicast", "name", i.Name(), "request", r.Kind, "mgid", r.MGID)
	}
}
