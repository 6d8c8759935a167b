package client

import (
	"context"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// DeviceStats returns the latency of each stage of a device's requests, and
// those that failed or hang, for one device or for all.
func (a *controlAPI) DeviceStats(ctx context.Context, r *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	asked := map[*frontend]map[uint32]*latency.Snapshots{}
	return control.DeviceStats(r.Device, a.c.Devices(),
		func(d *Device) [2]string { return [2]string{d.name, d.path} },
		func(d *Device) *controlpb.DeviceStats {
			return &controlpb.DeviceStats{Stages: d.stageStats(ctx, asked),
				Failed: control.FailedRequests(d.failedRequests()), Hung: control.HungRequests(a.c.hungRequests(d))}
		})
}

// stageStats adds up the pumps. asked caches the replies of front ends, so that
// each is asked once.
func (d *Device) stageStats(ctx context.Context, asked map[*frontend]map[uint32]*latency.Snapshots) []*controlpb.StageStats {
	var queue, wire latency.Snapshots
	for i := range d.latency {
		queue.Add(&d.latency[i].queue)
		wire.Add(&d.latency[i].wire)
	}
	var out []*controlpb.StageStats
	if fe := d.fe.Load(); fe != nil {
		if _, ok := asked[fe]; !ok {
			asked[fe] = fe.deviceStats(ctx)
		}
		if front := asked[fe][d.index]; front != nil {
			out = control.StageStats("frontend", front)
		}
	}
	return append(append(out, control.StageStats("queue", &queue)...), control.StageStats("wire", &wire)...)
}
