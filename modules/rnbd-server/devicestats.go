package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// DeviceStats tells where the time of requests goes, of one device or of all.
func (c *controlAPI) DeviceStats(ctx context.Context, r *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	list := &controlpb.DeviceStatsList{}
	told := map[*ioPlugin]map[uint32]*latency.Snapshots{}
	for _, d := range c.s.openDevices() {
		if r.Device != "" && d.path != r.Device && d.name != r.Device {
			continue
		}
		list.Devices = append(list.Devices, &controlpb.DeviceStats{Device: d.path, Stages: d.stageStats(ctx, told)})
	}
	if r.Device != "" && len(list.Devices) == 0 {
		return nil, fmt.Errorf("no session has a device %q open: %w", r.Device, syscall.ENOENT)
	}
	return list, nil
}

// openDevices are the devices that sessions use, by path.
func (s *Server) openDevices() (out []*device) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.devices {
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b *device) int { return strings.Compare(a.path, b.path) })
	return out
}

// stageStats adds up the pumps. told is what plugins have said already.
func (d *device) stageStats(ctx context.Context, told map[*ioPlugin]map[uint32]*latency.Snapshots) []*controlpb.StageStats {
	var queue, inPlugin latency.Snapshots
	for i := range d.latency {
		queue.Add(&d.latency[i].queue)
		inPlugin.Add(&d.latency[i].plugin)
	}
	if _, asked := told[d.plugin]; !asked {
		told[d.plugin] = d.plugin.sup.Stats(ctx)
	}
	out := append(control.StageStats("queue", &queue), control.StageStats("plugin", &inPlugin)...)
	if disk := told[d.plugin][d.index]; disk != nil {
		out = append(out, control.StageStats("disk", disk)...)
	}
	return out
}
