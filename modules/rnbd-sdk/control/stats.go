package control

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
)

// DeviceStats returns the statistics of the devices that have the name, or of
// all devices if name is empty. names returns the names of a device, the first
// of them for the reply; stats returns its statistics. ENOENT: no device has
// the name.
func DeviceStats[D any](name string, devices []D, names func(D) [2]string, stats func(D) *controlpb.DeviceStats) (*controlpb.DeviceStatsList, error) {
	list := &controlpb.DeviceStatsList{}
	for _, d := range devices {
		if n := names(d); name == "" || name == n[0] || name == n[1] {
			s := stats(d)
			s.Device = n[0]
			list.Devices = append(list.Devices, s)
		}
	}
	if name != "" && len(list.Devices) == 0 {
		return nil, fmt.Errorf("there is no open device %q: %w", name, syscall.ENOENT)
	}
	return list, nil
}

// StageStats describes one stage, operation by operation; those without
// requests are left out.
func StageStats(stage string, sum *latency.Snapshots) (out []*controlpb.StageStats) {
	for i := range sum {
		if len(sum[i].Buckets) > 0 {
			out = append(out, &controlpb.StageStats{Stage: stage, Op: latency.OpAt(i).String(), Latency: histogram(&sum[i])})
		}
	}
	return out
}

func histogram(s *latency.Snapshot) *controlpb.Histogram {
	h := &controlpb.Histogram{Count: s.Count(), SumNs: s.Sum}
	for _, b := range s.Buckets {
		h.Buckets = append(h.Buckets, &controlpb.HistogramBucket{UpperNs: b.Upper, Count: b.Count})
	}
	return h
}

// FailedRequests describes the counts that are not 0.
func FailedRequests(c watchdog.Counts) (out []*controlpb.FailedRequests) {
	for _, n := range c.List() {
		out = append(out, &controlpb.FailedRequests{Stage: n.Stage, Errno: n.Errno, Count: n.N})
	}
	return out
}

// HungRequests describes groups of requests that hang.
func HungRequests(all []watchdog.Hung) (out []*controlpb.HungRequests) {
	for _, h := range all {
		out = append(out, &controlpb.HungRequests{Stage: h.Stage.String(), Path: h.Path, Session: h.Session,
			Count: uint64(h.Requests), OldestNs: uint64(h.Oldest), Op: h.Op, Offset: h.Offset})
	}
	return out
}

// Latency is the histogram of a StageStats.
func Latency(h *controlpb.Histogram) latency.Snapshot {
	s := latency.Snapshot{Sum: h.GetSumNs()}
	for _, b := range h.GetBuckets() {
		s.Add(latency.Snapshot{Buckets: []latency.Bucket{{Upper: b.GetUpperNs(), Count: b.GetCount()}}})
	}
	return s
}

// PumpStats describes the counters of a pump.
func PumpStats(p *pump.Pump) *controlpb.PumpStats {
	s := p.Stats()
	return &controlpb.PumpStats{
		Name: p.Name(), Loops: s.Loops, Sleeps: s.Sleeps, Wakes: s.Wakes,
		SpinHits: s.SpinHits, SpinMisses: s.SpinMisses, Drives: s.Drives,
	}
}
