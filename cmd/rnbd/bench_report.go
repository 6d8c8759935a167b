package main

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/machine"
)

// benchRun is one measurement.
type benchRun struct {
	start                 time.Time
	targets               []*benchTarget
	each                  time.Duration
	write, complete       bool
	verify                bool
	verified              uint64 // bytes that were read back
	loadBefore, loadAfter float64
	rows                  []benchRow
}

// benchRow is the result of one operation of a workload.
type benchRow struct {
	load.Workload
	run     *benchRun
	op      string
	elapsed time.Duration
	cpu     time.Duration
	bytes   uint64
	latency latency.Snapshot
	rates   []float64 // requests per second, in intervals of the run
}

func newBenchRun(o *benchOptions, targets *benchTargets) *benchRun {
	return &benchRun{start: time.Now(), targets: targets.list, each: o.time, write: o.write, verify: o.verify, loadBefore: machine.LoadAverage()}
}

func (r *benchRun) loads() (out []*load.Target) {
	for _, t := range r.targets {
		out = append(out, &t.Target)
	}
	return out
}

func (r *benchRun) add(result load.Result) {
	for i, l := range result.Latency {
		if l.Count() > 0 {
			r.rows = append(r.rows, benchRow{
				Workload: result.Workload, run: r, op: load.OpOf(i).String(), elapsed: result.Elapsed, cpu: result.CPU,
				bytes: result.Bytes[i], latency: l, rates: result.Rates[i]})
		}
	}
}

func (r benchRow) perSecond(n uint64) uint64 { return uint64(float64(n)/r.elapsed.Seconds() + 0.5) }

// sizes are those of the requests: one, or the smallest and the largest.
func (r benchRow) sizes() string {
	first, last := r.Blocks[0].Bytes, r.Blocks[len(r.Blocks)-1].Bytes
	if first == last {
		return report.Human(uint64(first))
	}
	return report.Human(uint64(first)) + "-" + report.Human(uint64(last))
}

// benchFields: quantiles are the upper ends of their buckets, at most a 32nd too
// long.
var benchFields = []report.Field[benchRow]{
	report.F("workload", "Workload", "name of the load", func(r benchRow) any { return r.Name }),
	report.F("op", "Op", "read or write", func(r benchRow) any { return r.op }),
	report.F("block", "Block", "size of the requests", func(r benchRow) any { return r.sizes() }),
	report.F("depth", "Depth", "requests in flight per job", func(r benchRow) any { return uint64(r.Depth) }),
	report.F("jobs", "Jobs", "queues per device", func(r benchRow) any { return uint64(r.Jobs) }),
	report.F("device_count", "Devices", "number of devices", func(r benchRow) any { return uint64(len(r.run.targets)) }),
	report.F("elapsed", "Time", "how long it ran", func(r benchRow) any { return short(r.elapsed) }),
	report.F("cpu", "CPU", "CPU time of this process meanwhile, for all operations", func(r benchRow) any { return short(r.cpu) }),
	report.F("requests", "Requests", "answered", func(r benchRow) any { return r.latency.Count() }),
	report.F("iops", "IOPS", "requests per second", func(r benchRow) any { return r.perSecond(r.latency.Count()) }),
	report.F("bytes", "Bytes", "read or written", func(r benchRow) any { return report.Limit(r.bytes) }),
	report.F("bandwidth", "Bytes/s", "bytes per second", func(r benchRow) any { return report.Limit(r.perSecond(r.bytes)) }),
	report.F("mean", "Mean", "average latency", func(r benchRow) any { return short(r.latency.Mean()) }),
	benchQuantile("p50", "50 %", "half of the requests took no longer", 0.5),
	benchQuantile("p99", "99 %", "as many took no longer", 0.99),
	benchQuantile("p999", "99.9 %", "as many took no longer", 0.999),
	benchQuantile("max", "Longest", "none took longer", 1),
}

var benchUsual = []string{"workload", "op", "iops", "bandwidth", "mean", "p50", "p99", "p999"}

func benchQuantile(name, header, doc string, q float64) report.Field[benchRow] {
	return report.F(name, header, doc, func(r benchRow) any { return short(r.latency.Quantile(q)) })
}

// benchRunFields are the facts that figures need beside them.
var benchRunFields = []report.Field[*benchRun]{
	report.F("version", "rnbd", "version of this program", func(*benchRun) any { return versionString() }),
	report.F("date", "Date", "when it began", func(r *benchRun) any { return r.start.UTC().Format(time.RFC3339) }),
	report.F("cpu", "CPU", "model", func(*benchRun) any { return machine.CPU() }),
	report.F("cores", "Cores", "number", func(*benchRun) any { return uint64(runtime.NumCPU()) }),
	report.F("kernel", "Kernel", "version", func(*benchRun) any { return machine.Kernel() }),
	report.F("load_before", "Load before", "average of a minute", func(r *benchRun) any { return r.loadBefore }),
	report.F("load_after", "Load after", "average of a minute", func(r *benchRun) any { return r.loadAfter }),
	report.F("time", "Time of each", "load, as asked for", func(r *benchRun) any { return r.each }),
	report.F("complete", "Complete", "no: it was interrupted, or failed", func(r *benchRun) any { return r.complete }),
	report.F("verified", "Verified", "bytes that were read back and compared in the end", func(r *benchRun) any {
		if !r.verify {
			return nil
		}
		return report.Limit(r.verified)
	}),
}

var benchTargetFields = []report.Field[*benchTarget]{
	report.F("name", "Device", "as asked for", func(t *benchTarget) any { return t.Name }),
	report.F("size", "Used", "bytes", func(t *benchTarget) any { return report.Limit(t.Used()) }),
	report.F("endpoint", "Endpoint", "what was opened", func(t *benchTarget) any { return t.node }),
	report.F("access", "Access", "how requests were made", func(t *benchTarget) any { return t.access }),
	report.F("plugin", "Plugin", "front end", func(t *benchTarget) any { return textOrNone(t.plugin) }),
	report.F("fabric", "Fabric", "of the paths", func(t *benchTarget) any { return textOrNone(strings.Join(t.fabric, " ")) }),
	report.F("tls", "TLS", "protocol and cipher of the connections", func(t *benchTarget) any { return textOrNone(strings.Join(t.tls, ", ")) }),
	report.F("io_mode", "IO Mode", "plugin of the server", func(t *benchTarget) any { return textOrNone(t.ioMode) }),
	report.F("paths", "Paths", "to the server", func(t *benchTarget) any { return t.paths }),
}

func textOrNone(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// benchColumns are the chosen fields of results: without a choice the usual
// ones for people, all for programs.
func benchColumns(c *call) ([]report.Field[benchRow], error) {
	usual := benchUsual
	if c.Machine() {
		usual = everyField(benchFields)
	}
	return report.Select(benchFields, usual, c.chosen)
}

// print shows the machine, the devices and the results; CSV has all of it in
// each line.
func (r *benchRun) print(c *call, fields []report.Field[benchRow]) error {
	w := c.cmd.OutOrStdout()
	if c.Format == "csv" {
		return report.List(w, c.Options, report.Build("results", "result", append(fields, r.flat()...), r.rows))
	}
	t := r.table(fields)
	if c.NoTree { // results only
		return report.List(w, c.Options, t.Rows[0].Sub[1])
	}
	return report.Show(w, c.Options, t)
}

// table returns all that is known, with sub-tables of the devices and the results.
func (r *benchRun) table(fields []report.Field[benchRow]) report.Table {
	t := report.Build("benchmarks", "benchmark", benchRunFields, []*benchRun{r})
	t.Rows[0].Sub = []report.Table{
		report.Build("devices", "device", benchTargetFields, r.targets),
		report.Build("results", "result", fields, r.rows),
	}
	return t
}

// flat adds the fields that all results have in common to each of them.
func (r *benchRun) flat() (out []report.Field[benchRow]) {
	for _, f := range benchRunFields {
		out = append(out, report.F(f.Name, f.Header, f.Doc, func(b benchRow) any { return f.Get(b.run) }))
	}
	for _, f := range benchTargetFields {
		out = append(out, report.F("device_"+f.Name, f.Header, f.Doc, func(b benchRow) any { return b.run.distinct(f.Get) }))
	}
	return out
}

// distinct are the values of a field of all devices, each once.
func (r *benchRun) distinct(get func(*benchTarget) any) (values []string) {
	for _, t := range r.targets {
		v := get(t)
		if v == nil {
			continue
		}
		if list, ok := v.([]string); ok {
			v = strings.Join(list, " ")
		}
		if l, ok := v.(report.Limit); ok {
			v = uint64(l)
		}
		if s := fmt.Sprint(v); !slices.Contains(values, s) {
			values = append(values, s)
		}
	}
	return values
}
