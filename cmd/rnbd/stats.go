package main

import (
	"context"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// stageLatency is the latency of one operation in one stage.
type stageLatency struct {
	stage, op string
	latency   latency.Snapshot
}

// statsFields: times are the upper ends of their buckets, at most a quarter
// too long.
var statsFields = []report.Field[stageLatency]{
	report.F("stage", "Stage", "where the time goes", func(s stageLatency) any { return s.stage }),
	report.F("op", "Operation", "of the request", func(s stageLatency) any { return s.op }),
	report.F("count", "Requests", "measured", func(s stageLatency) any { return s.latency.Count() }),
	report.F("mean", "Mean", "average", func(s stageLatency) any { return short(s.latency.Mean()) }),
	quantile("p50", "50 %", "half of them took no longer", 0.5),
	quantile("p90", "90 %", "as many took no longer", 0.9),
	quantile("p99", "99 %", "as many took no longer", 0.99),
	quantile("p999", "99.9 %", "as many took no longer", 0.999),
	quantile("max", "Longest", "none took longer", 1),
}

func quantile(name, header, doc string, q float64) report.Field[stageLatency] {
	return report.F(name, header, doc, func(s stageLatency) any { return short(s.latency.Quantile(q)) })
}

// short drops digits without significance.
func short(d time.Duration) time.Duration {
	for unit := time.Second; unit > time.Nanosecond; unit /= 1000 {
		if d >= unit {
			return d.Round(unit / 100)
		}
	}
	return d
}

// deviceStats asks the daemon that has d.
func deviceStats(ctx context.Context, daemons *daemons, d device) (report.Table, error) {
	var list *controlpb.DeviceStatsList
	var err error
	if d.mapped != nil {
		list, err = daemons.client.DeviceStats(ctx, &controlpb.DeviceRequest{Device: d.name})
	} else {
		list, err = daemons.server.DeviceStats(ctx, &controlpb.DeviceRequest{Device: d.node})
	}
	if err != nil {
		return report.Table{}, err
	}
	var rows []stageLatency
	for _, device := range list.Devices {
		for _, s := range device.Stages {
			rows = append(rows, stageLatency{s.Stage, s.Op, control.Latency(s.Latency)})
		}
	}
	return report.Build("latency", "stage", statsFields, rows), nil
}

// pathCount is one of the numbers that the kernel keeps for a path.
type pathCount struct {
	kind, name string
	value      uint64
}

var pathStatsFields = []report.Field[pathCount]{
	report.F("kind", "Kind", "what is reset together", func(p pathCount) any { return p.kind }),
	report.F("name", "Number", "of what", func(p pathCount) any { return p.name }),
	report.F("value", "Value", "since the path was made or its kind was reset", func(p pathCount) any { return p.value }),
}

// pathStats asks the daemon that has p.
func pathStats(ctx context.Context, daemons *daemons, p transportPath) (report.Table, error) {
	ask := &controlpb.PathRequest{Session: p.Session, Id: p.Id}
	var r *controlpb.PathStatsReply
	var err error
	if p.incoming {
		r, err = daemons.server.PathStats(ctx, ask)
	} else {
		r, err = daemons.client.PathStats(ctx, ask)
	}
	if err != nil {
		return report.Table{}, err
	}
	rows := []pathCount{
		{"rdma", "reads", r.ReadCount}, {"rdma", "read bytes", r.ReadBytes},
		{"rdma", "writes", r.WriteCount}, {"rdma", "written bytes", r.WriteBytes}, {"rdma", "in flight", r.Inflight},
		{"wc_completion", "most at once", r.WcMax}, {"wc_completion", "completions", r.WcTotal}, {"wc_completion", "looks", r.WcCalls},
	}
	if !p.incoming {
		rows = append(rows, pathCount{"rdma", "failovers", r.Failovers},
			pathCount{"reconnects", "successful", r.Reconnects}, pathCount{"reconnects", "failed", r.ReconnectsFailed},
			pathCount{"cpu_migration", "requests", total(r.CpuMigrationFrom)},
			pathCount{"rdma_lat", "longest read, ns", r.RdmaLatMaxReadNs}, pathCount{"rdma_lat", "longest write, ns", r.RdmaLatMaxWriteNs})
	}
	return report.Build("stats", "count", pathStatsFields, rows), nil
}

func total(counts []uint64) (n uint64) {
	for _, c := range counts {
		n += c
	}
	return n
}
