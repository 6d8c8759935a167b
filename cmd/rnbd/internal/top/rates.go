package top

import (
	"fmt"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// stages are all, in the order that a request passes them.
var stages = []string{"frontend", "queue", "wire", "plugin", "disk"}

// stagesOf are those of a kind of daemon.
var stagesOf = map[string][]string{"client": {"frontend", "queue", "wire"}, "server": {"queue", "plugin", "disk"}}

// answered is the stage that ends with the answer to a request.
var answered = map[string]string{"client": "wire", "server": "plugin"}

// rate is a number per second. The zero value is unknown.
type rate struct {
	value float64
	known bool
}

// quantiles are those of one stage in the interval. Without a request they are
// unknown.
type quantiles struct {
	p50, p99 time.Duration
	known    bool
}

// deviceRates is the work of a device between two samples.
type deviceRates struct {
	iops, read, written rate
	stages              map[string]quantiles
	failing             bool // more failed requests than before
}

// pathRates is the work of a path between two samples.
type pathRates struct{ iops, received, sent rate }

// interval finds objects in the earlier of two samples. A daemon that started in
// between counts from 0, so nothing of it can be compared.
type interval struct {
	seconds float64
	devices map[string]*Device
	paths   map[string]*Path
}

func (d *Device) key() string { return d.Daemon + "\x00" + d.ID }
func (p *Path) key() string   { return fmt.Sprintf("%s\x00%s\x00%d", p.Daemon, p.Session, p.ID) }

func between(before, now *Sample) *interval {
	i := &interval{devices: map[string]*Device{}, paths: map[string]*Path{}}
	if before == nil || now == nil {
		return i
	}
	i.seconds = now.Time.Sub(before.Time).Seconds()
	same := map[string]bool{}
	for _, b := range before.Daemons {
		for _, n := range now.Daemons {
			if b.Kind == n.Kind && b.Journal == n.Journal && b.Err == "" && n.Err == "" {
				same[b.Kind] = i.seconds > 0
			}
		}
	}
	for k := range before.Devices {
		if d := &before.Devices[k]; same[d.Daemon] {
			i.devices[d.key()] = d
		}
	}
	for k := range before.Paths {
		if p := &before.Paths[k]; same[p.Daemon] {
			i.paths[p.key()] = p
		}
	}
	return i
}

// per returns a count of the interval as a rate.
func (i *interval) per(count uint64) rate { return rate{float64(count) / i.seconds, true} }

func (i *interval) device(d *Device) deviceRates {
	old, ok := i.devices[d.key()]
	if !ok {
		return deviceRates{}
	}
	r := deviceRates{stages: map[string]quantiles{}, failing: d.Failed > old.Failed}
	var read, written uint64
	for use, m := range d.Uses {
		read += grown(old.Uses[use].Read, m.Read)
		written += grown(old.Uses[use].Written, m.Written)
	}
	r.read, r.written, r.iops = i.per(read), i.per(written), i.per(0)
	before := byStage(old.Stages)
	for name, h := range byStage(d.Stages) {
		diff := h.Since(before[name])
		n := diff.Count()
		if name == answered[d.Daemon] {
			r.iops = i.per(n)
		}
		if n > 0 {
			r.stages[name] = quantiles{diff.Quantile(0.5), diff.Quantile(0.99), true}
		}
	}
	return r
}

func (i *interval) path(p *Path) pathRates {
	old, ok := i.paths[p.key()]
	if !ok {
		return pathRates{}
	}
	r := pathRates{received: i.per(grown(old.Received, p.Received)), sent: i.per(grown(old.Sent, p.Sent))}
	if p.Requests >= 0 && old.Requests >= 0 {
		r.iops = i.per(grown(uint64(old.Requests), uint64(p.Requests)))
	}
	return r
}

// grown is the growth of a count. One that has fallen began again at 0: a path was
// reset, or a device opened again.
func grown(before, now uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}

// byStage adds up the operations of each stage.
func byStage(all []Stage) map[string]latency.Snapshot {
	sums := make(map[string]latency.Snapshot, len(stages))
	for _, s := range all {
		sum, ok := sums[s.Name]
		if !ok { // Add must not change the buckets of the sample
			sum = latency.Snapshot{Buckets: append([]latency.Bucket(nil), s.Latency.Buckets...)}
		} else {
			sum.Add(s.Latency)
		}
		sums[s.Name] = sum
	}
	return sums
}
