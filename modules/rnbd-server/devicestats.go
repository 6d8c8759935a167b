package server

import (
	"context"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// DeviceStats returns the latency of each stage of a device's requests, and
// those that failed or hang, for one device or for all.
func (c *controlAPI) DeviceStats(ctx context.Context, r *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	asked := map[*ioPlugin]map[uint32]*latency.Snapshots{}
	return control.DeviceStats(r.Device, c.s.openDevices(),
		func(d *device) [2]string { return [2]string{d.path, d.name} },
		func(d *device) *controlpb.DeviceStats {
			return &controlpb.DeviceStats{Stages: d.stageStats(ctx, asked),
				Failed: control.FailedRequests(d.failedRequests()), Hung: control.HungRequests(c.s.hungRequests(d.path))}
		})
}

// stageStats adds up the pumps. asked caches the replies of plugins, so that
// each is asked once.
func (d *device) stageStats(ctx context.Context, asked map[*ioPlugin]map[uint32]*latency.Snapshots) []*controlpb.StageStats {
	var queue, inPlugin latency.Snapshots
	for i := range d.latency {
		queue.Add(&d.latency[i].queue)
		inPlugin.Add(&d.latency[i].plugin)
	}
	if _, ok := asked[d.plugin]; !ok {
		asked[d.plugin] = d.plugin.sup.Stats(ctx)
	}
	out := append(control.StageStats("queue", &queue), control.StageStats("plugin", &inPlugin)...)
	if disk := asked[d.plugin][d.index]; disk != nil {
		out = append(out, control.StageStats("disk", disk)...)
	}
	return out
}
