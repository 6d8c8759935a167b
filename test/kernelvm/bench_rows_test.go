package kernelvm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// benchClaim is a row before it is measured: two pairs, what of them is compared, and
// the ratio that it has to reach.
type benchClaim struct {
	id, work, ours, peer string
	cpu                  bool    // CPU time per request instead of requests per second
	target               float64 // least ratio
}

// floor is the skeleton with the processes of a claim's first pair, if there is one.
func (c benchClaim) floor() string {
	if c.ours == ublkTCP || c.ours == ublkVerbs {
		return ublkFloor
	}
	return ""
}

// Names of pairs that rows are about.
const (
	kernelPair = "kernel-kernel"
	kernelOurs = "kernel-ours"
	ublkVerbs  = "ublk, ibverbs"
	ublkTCP    = "ublk, iwarp"
	nbdModule  = "nbd.ko, nbdkit"
	ublkFloor  = "skeleton, ublk"
)

// benchClaims are the rows that only a guest can have.
func benchClaims() (all []benchClaim) {
	for _, w := range benchWorks() {
		var targets [3]float64 // of U4, U5 and U6
		switch {
		case w.bs != "4k":
			targets = [3]float64{0.9, 0.9, 0.95}
		case w.depth == 1:
			targets = [3]float64{0.9, 0.4, 0.6}
		default:
			targets = [3]float64{1.2, 0.8, 0.85}
			all = append(all, benchClaim{"U8", w.name, ublkTCP, nbdModule, true, 1})
		}
		all = append(all,
			benchClaim{"U4", w.name, ublkTCP, nbdModule, false, targets[0]},
			benchClaim{"U5", w.name, ublkVerbs, kernelPair, false, targets[1]},
			benchClaim{"U6", w.name, kernelOurs, kernelPair, false, targets[2]})
	}
	slices.SortStableFunc(all, func(a, b benchClaim) int { return strings.Compare(a.id, b.id) })
	return all
}

// benchRow is a row, measured. A ratio above 1 means that ours is better.
type benchRow struct {
	ID, Workload, Figure, Ours, Peer string
	OursMedian, PeerMedian           float64
	Median, LowerQuartile            float64 // of the ratios within each round
	Target                           float64
	Met                              bool    // by the lower quartile
	Floor                            float64 // median of the skeleton's ratios to the peer; 0: there is no skeleton
	OfFloor                          float64 // median of the ratios of ours to the skeleton
}

// benchRun is one run of a pair. CPU seconds are those of all of the guest, fio and its
// start among them.
type benchRun struct{ IOPS, CPUPerMillion float64 }

// benchSeries are the runs of all rounds: workload, pair.
type benchSeries map[string]map[string][]benchRun

func (s benchSeries) add(work, pair string, r benchRun) {
	if s[work] == nil {
		s[work] = map[string][]benchRun{}
	}
	s[work][pair] = append(s[work][pair], r)
}

// row measures a claim.
func (s benchSeries) row(c benchClaim) benchRow {
	r := benchRow{ID: c.id, Workload: c.work, Figure: "requests per second", Ours: c.ours, Peer: c.peer, Target: c.target}
	figure := func(run benchRun) float64 { return run.IOPS }
	if c.cpu {
		r.Figure = "CPU, all of the guest, s per million requests"
		figure = func(run benchRun) float64 { return run.CPUPerMillion }
	}
	ours, peer := figures(s[c.work][c.ours], figure), figures(s[c.work][c.peer], figure)
	ratios := ratiosOf(ours, peer, c.cpu)
	r.OursMedian, r.PeerMedian = quantile(ours, 0.5), quantile(peer, 0.5)
	r.Median, r.LowerQuartile = quantile(ratios, 0.5), quantile(ratios, 0.25)
	r.Met = r.LowerQuartile >= c.target
	if f := c.floor(); f != "" {
		floor := figures(s[c.work][f], figure)
		r.Floor, r.OfFloor = quantile(ratiosOf(floor, peer, c.cpu), 0.5), quantile(ratiosOf(ours, floor, c.cpu), 0.5)
	}
	return r
}

func figures(runs []benchRun, figure func(benchRun) float64) (all []float64) {
	for _, run := range runs {
		all = append(all, figure(run))
	}
	return all
}

// ratiosOf compares round by round. Above 1 the first is better: more requests, or less
// CPU time.
func ratiosOf(first, second []float64, lessIsBetter bool) (all []float64) {
	if lessIsBetter {
		first, second = second, first
	}
	for i := range first {
		all = append(all, first[i]/second[i])
	}
	return all
}

// ratios are those of each pair's requests per second to base's.
func (s benchSeries) ratios(base string) map[string]map[string]ratio {
	all := map[string]map[string]ratio{}
	for work, pairs := range s {
		all[work] = map[string]ratio{}
		for pair, runs := range pairs {
			var v []float64
			for i, run := range runs {
				v = append(v, run.IOPS/pairs[base][i].IOPS)
			}
			if pair != base {
				all[work][pair] = ratio{quantile(v, 0.5), slices.Min(v), slices.Max(v)}
			}
		}
	}
	return all
}

// quantile interpolates between the two figures around q.
func quantile(v []float64, q float64) float64 {
	v = slices.Sorted(slices.Values(v))
	at := q * float64(len(v)-1)
	i := int(at)
	if i+1 == len(v) {
		return v[i]
	}
	return v[i] + (at-float64(i))*(v[i+1]-v[i])
}

// busyTime is the CPU time of all that ran in the guest, in seconds.
func (b *peerBench) busyTime() (sum float64) {
	b.t.Helper()
	line, _, _ := strings.Cut(b.g.ReadFile(b.t, "/proc/stat"), "\n")
	f := strings.Fields(line)
	if len(f) < 8 {
		b.t.Fatalf("/proc/stat says %q", line)
	}
	for _, i := range []int{1, 2, 3, 6, 7} { // cpu user nice system idle iowait irq softirq
		ticks, err := strconv.ParseFloat(f[i], 64)
		if err != nil {
			b.t.Fatalf("/proc/stat says %q: %v", line, err)
		}
		sum += ticks / 100 // USER_HZ
	}
	return sum
}

// benchMarkdown is the report of a run.
func benchMarkdown(r benchResult) string {
	var b strings.Builder
	b.WriteString("# Against the kernel's modules\n\nHow this is measured: [benchmarking.md](benchmarking.md#against-the-kernels-modules). The CPUs are emulated, so ratios\nmean something and rates do not.\n\n")
	fmt.Fprintf(&b, "- %s: Linux %s in the guest, %d CPUs\n- %d rounds, %d s per run; %s\n", r.Day, r.Kernel, r.CPUs, r.Rounds, r.Seconds, r.Load)
	met := 0
	for _, row := range r.Rows {
		if row.Met {
			met++
		}
	}
	fmt.Fprintf(&b, "- **%d of %d targets are met**\n\n", met, len(r.Rows))
	b.WriteString("| name | path |\n|---|---|\n")
	for _, name := range r.Order {
		fmt.Fprintf(&b, "| %s | %s |\n", name, r.Pairs[name])
	}
	b.WriteString("\n## The rows\n\n| row | workload | figure | ours | | against | | ratio | lower quartile | target | | the skeleton's ratio | ours to the skeleton |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, row := range r.Rows {
		floor := "| |"
		if row.Floor > 0 {
			floor = fmt.Sprintf("| %.2f | %.2f |", row.Floor, row.OfFloor)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %.0f | %s | %.0f | **%.2f** | %.2f | %g | %s %s\n", row.ID, row.Workload, row.Figure, row.Ours, row.OursMedian,
			row.Peer, row.PeerMedian, row.Median, row.LowerQuartile, row.Target, map[bool]string{true: "met", false: "**not met**"}[row.Met], floor)
	}
	base := r.Order[0]
	fmt.Fprintf(&b, "\n## All pairs\n\nRequests per second as a ratio to %s in the same round: median, least and greatest. Switches between tasks and\nsystem calls of a request are counted in a run of its own.\n\n", base)
	b.WriteString("| workload | pair | ratio | least to greatest | of a request |\n|---|---|---|---|---|\n")
	for _, w := range benchWorks() {
		for _, name := range r.Order {
			x, spread := "", ""
			if name != base {
				v := r.Ratios[w.name][name]
				x, spread = fmt.Sprintf("%.2f", v.Median), fmt.Sprintf("%.2f to %.2f", v.Min, v.Max)
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", w.name, name, x, spread, r.Costs[w.name][name])
		}
	}
	return b.String()
}
