package plugin

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// maxPumps bounds the memory that a host can make the plugin allocate.
const maxPumps = 256

// deviceStats is how long the requests of a device took, by queue: each has one
// writer.
type deviceStats struct{ queues []latency.Ops }

func (s *server) newStats() deviceStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return deviceStats{make([]latency.Ops, s.pumps)}
}

// timing is an answer that the host cannot see yet.
type timing struct {
	stats *latency.Ops
	op    blk.Op
	since int64
}

// time notes an answer; it is counted with others, at one look at the clock.
func (q *Queue) time(s *slot) {
	stats := s.disk.root.stats.queues
	if q.pump >= len(stats) {
		return
	}
	if q.timed == len(q.timings) {
		q.countTimings()
	}
	q.timings[q.timed] = timing{&stats[q.pump], s.op, s.since}
	q.timed++
}

// countTimings counts the answers noted so far as given now. It reads the clock
// again, since the turn of the pump may have waited for a disk.
func (q *Queue) countTimings() {
	if q.timed == 0 {
		return
	}
	now := q.fresh()
	for i := range q.timings[:q.timed] {
		t := &q.timings[i]
		t.stats.Record(t.op, now-t.since)
		t.stats = nil
	}
	q.timed = 0
}

// Stats answers the host.
func (s *server) Stats(context.Context, *pluginpb.StatsRequest) (*pluginpb.StatsResponse, error) {
	resp := &pluginpb.StatsResponse{}
	s.kind.eachStats(func(device uint32, d deviceStats) {
		var sum latency.Snapshots
		for i := range d.queues {
			sum.Add(&d.queues[i])
		}
		resp.Devices = append(resp.Devices, latencyToPB(device, &sum))
	})
	return resp, nil
}

// Stats asks the plugin how long requests took, by device: of an io plugin from
// taking them out of the ring to the answer, of a front end from a user's
// request to the reply. A plugin that cannot tell gives nothing.
func (p *Process) Stats(ctx context.Context) (map[uint32]*latency.Snapshots, error) {
	resp, err := p.plugin.Stats(ctx, &pluginpb.StatsRequest{})
	if status.Code(err) == codes.Unimplemented {
		return nil, nil
	}
	if err != nil {
		return nil, p.failed("statistics", err)
	}
	out := map[uint32]*latency.Snapshots{}
	for _, d := range resp.GetDevices() {
		out[d.GetDevice()] = latencyFromPB(d)
	}
	return out, nil
}

func latencyToPB(device uint32, sum *latency.Snapshots) *pluginpb.DeviceLatency {
	d := &pluginpb.DeviceLatency{Device: device}
	for i := range sum {
		if len(sum[i].Buckets) == 0 {
			continue
		}
		op := &pluginpb.OpLatency{Op: uint32(latency.OpAt(i)), SumNs: sum[i].Sum}
		for _, b := range sum[i].Buckets {
			op.Buckets = append(op.Buckets, &pluginpb.LatencyBucket{UpperNs: b.Upper, Count: b.Count})
		}
		d.Ops = append(d.Ops, op)
	}
	return d
}

// latencyFromPB converts a plugin's report: its buckets may differ from ours.
func latencyFromPB(d *pluginpb.DeviceLatency) *latency.Snapshots {
	out := &latency.Snapshots{}
	for _, o := range d.GetOps() {
		i := -1
		if o.GetOp() < 1<<8 {
			i = latency.IndexOf(blk.Op(o.GetOp()))
		}
		if i < 0 {
			continue // an operation of a later version
		}
		s := latency.Snapshot{Sum: o.GetSumNs()}
		for _, b := range o.GetBuckets() {
			s.Add(latency.Snapshot{Buckets: []latency.Bucket{{Upper: b.GetUpperNs(), Count: b.GetCount()}}})
		}
		out[i].Add(s)
	}
	return out
}
