package client

import (
	"context"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// PathStats and ResetPathStats serve the statistics of the stats folder that
// a path of the kernel's client has.
func (a *controlAPI) PathStats(_ context.Context, r *controlpb.PathRequest) (*controlpb.PathStatsReply, error) {
	s, err := a.findSession(r.Session)
	if err != nil {
		return nil, err
	}
	d, err := s.transport.PathDetails(int(r.Id))
	if err != nil {
		return nil, err
	}
	return describeStats(&d), nil
}

func (a *controlAPI) ResetPathStats(_ context.Context, r *controlpb.ResetPathStatsRequest) (*controlpb.Empty, error) {
	s, err := a.findSession(r.Session)
	if err != nil {
		return nil, err
	}
	kinds, err := rtrs.ParseStatKind(r.Kind)
	if err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, s.transport.ResetStats(int(r.Id), kinds)
}

func describeStats(d *rtrs.PathDetails) *controlpb.PathStatsReply {
	out := &controlpb.PathStatsReply{
		ReadCount: d.ReadCount, ReadBytes: d.ReadBytes, WriteCount: d.WriteCount, WriteBytes: d.WriteBytes,
		Inflight: uint64(max(d.Inflight, 0)), Failovers: d.Failovers,
		Reconnects: d.Reconnects, ReconnectsFailed: d.ReconnectsFailed, LatencyNs: uint64(d.Latency),
		CpuMigrationFrom: d.CPUMigrationFrom, CpuMigrationTo: d.CPUMigrationTo,
		RdmaLatMaxReadNs: uint64(d.ReadLatency.Max), RdmaLatMaxWriteNs: uint64(d.WriteLatency.Max),
		WcMax: uint64(d.Completions.Max()), WcTotal: d.Completions.Total(), WcCalls: d.Completions.Calls(),
	}
	for i, n := range d.SGEntries {
		out.SgEntries = append(out.SgEntries, &controlpb.SGEntries{Pump: uint32(i), Counts: n[:]})
	}
	last := len(d.ReadLatency.Counts) - 1
	for i, reads := range d.ReadLatency.Counts {
		l := &controlpb.RDMALatency{Reads: reads, Writes: d.WriteLatency.Counts[i]}
		if i < last {
			l.LimitMs = 1 << i
		}
		out.RdmaLat = append(out.RdmaLat, l)
	}
	return out
}
