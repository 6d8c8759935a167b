package client

import (
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// DeviceStats tells where the time of requests goes, of one device or of all.
func (a *controlAPI) DeviceStats(ctx context.Context, r *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	list := &controlpb.DeviceStatsList{}
	told := map[*frontend]map[uint32]*latency.Snapshots{}
	for _, d := range a.c.Devices() {
		if r.Device != "" && d.name != r.Device && d.path != r.Device {
			continue
		}
		list.Devices = append(list.Devices, &controlpb.DeviceStats{Device: d.name, Stages: d.stageStats(ctx, told)})
	}
	if r.Device != "" && len(list.Devices) == 0 {
		return nil, fmt.Errorf("there is no device %q: %w", r.Device, syscall.ENOENT)
	}
	return list, nil
}

// stageStats adds up the pumps. told is what front ends have said already.
func (d *Device) stageStats(ctx context.Context, told map[*frontend]map[uint32]*latency.Snapshots) []*controlpb.StageStats {
	var queue, wire latency.Snapshots
	for i := range d.latency {
		queue.Add(&d.latency[i].queue)
		wire.Add(&d.latency[i].wire)
	}
	var out []*controlpb.StageStats
	if fe := d.fe.Load(); fe != nil {
		if _, asked := told[fe]; !asked {
			told[fe] = fe.stats(ctx)
		}
		if front := told[fe][d.index]; front != nil {
			out = control.StageStats("frontend", front)
		}
	}
	return append(append(out, control.StageStats("queue", &queue)...), control.StageStats("wire", &wire)...)
}
