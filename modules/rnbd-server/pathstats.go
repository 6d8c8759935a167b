package server

import (
	"context"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// PathStats and ResetPathStats serve the statistics that the kernel's server
// has in the stats folder of a path.
func (c *controlAPI) PathStats(_ context.Context, r *controlpb.PathRequest) (*controlpb.PathStatsReply, error) {
	sess, err := c.s.sessionByName(r.Session)
	if err != nil {
		return nil, err
	}
	d, err := sess.transport.PathDetails(int(r.Id))
	if err != nil {
		return nil, err
	}
	return &controlpb.PathStatsReply{
		ReadCount: d.ReadCount, ReadBytes: d.ReadBytes, WriteCount: d.WriteCount, WriteBytes: d.WriteBytes,
		Inflight: uint64(max(d.Inflight, 0)), LatencyNs: uint64(d.Latency),
		WcMax: uint64(d.Completions.Max()), WcTotal: d.Completions.Total(), WcCalls: d.Completions.Calls(),
	}, nil
}

func (c *controlAPI) ResetPathStats(_ context.Context, r *controlpb.ResetPathStatsRequest) (*controlpb.Empty, error) {
	sess, err := c.s.sessionByName(r.Session)
	if err != nil {
		return nil, err
	}
	kinds, err := rtrs.ParseStatKind(r.Kind)
	if err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, sess.transport.ResetStats(int(r.Id), kinds)
}
