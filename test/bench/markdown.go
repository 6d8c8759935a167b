package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// titles of the rows, by id.
var titles = map[string]string{
	"P1":  "Latency of 4 KiB, one in flight: the library against nbdkit over TCP",
	"P2":  "4 KiB at depth, one connection: the library against servers over TCP",
	"P3":  "4 KiB, 4 jobs of depth 16: the library against servers over TCP, 4 connections",
	"P4":  "1 MiB sequential: the library against servers over TCP, and against TCP itself",
	"P5":  "The NBD front end against proxies of NBD: two hosts, a unix socket, one network hop",
	"P6":  "The NBD front end, with its hop, against servers reached without one",
	"P7":  "CPU time of all processes of both ends: the library against nbdkit with libnbd",
	"P8":  "One device, 64 jobs: against our own best with fewer",
	"P9":  "Keys that change after every request (always-invalidate) against keys that stay",
	"P10": "Paths that are the limit: two and four against one",
	"P11": "Storage plugins, over loopback and alone, against fio on the same file and device",
	"P12": "Daemons with 100 sessions and 1,000 devices that nobody uses",
	"P13": "MPA checksums on against off",
	"P14": "rocev2 against iwarp, path MTU 4096",
	"T1":  "TLS, latency of 4 KiB, one in flight: the library against nbdkit",
	"T2":  "TLS, 4 KiB at depth, one connection: the library against nbdkit",
	"T3":  "TLS, 1 MiB sequential: the library against nbdkit",
	"T4":  "TLS against MPA checksums without TLS",
	"T5":  "1,000 access rules against none",
	"U1":  "NBD socket, latency of 4 KiB, one in flight: against nbdkit reached directly over TCP",
	"U2":  "NBD socket, 4 KiB at depth: against the best server reached directly over TCP",
	"U3":  "NBD socket, 1 MiB sequential: against the best server reached directly, and the best proxy",
	"U7":  "Files and devices that are served, at depth 32: against fio on the same, without a network",
	"U8":  "NBD socket, CPU time of all processes of both ends with fio, at depth 32: against nbdkit reached directly",
	"U9":  "One device, 64 jobs, by the NBD socket and by the library: against our own best with fewer",
	"U10": "NBD socket while stress-ng computes on one core: against the same without it",
	"U11": "A file of the front end fuse, 4 KiB direct: against the NBD socket",
	"U12": "A disk of fuse-loop, 4 KiB direct at depth 32: against the file",
	"I1":  "15 files beside one that hangs, the library, against the same without the hang",
	"I2":  "15 block devices beside one that hangs, the library, against the same without the hang",
	"I3":  "15 files beside one that hangs, the NBD front end, against the same without the hang",
	"I4":  "15 block devices beside one that hangs, the NBD front end, against the same without the hang",
}

// markdown writes the tables.
func (p *report) markdown() string {
	var b strings.Builder
	if p.Settings.Net {
		return p.netMarkdown()
	}
	b.WriteString("# Benchmarks\n\nHow this is measured and what of it is fair: [benchmarking.md](benchmarking.md). What bounds the rows that miss their\ntarget: [limits.md](limits.md).\n\n")
	p.writeMachine(&b)
	p.writePlots(&b)
	for _, id := range p.ids() {
		p.writeRows(&b, id)
	}
	p.writeBudgets(&b)
	p.writeTroubles(&b)
	return b.String()
}

func (p *report) writeMachine(b *strings.Builder) {
	m := p.Machine
	fmt.Fprintf(b, "- %s: %s, %d cores, %d MB, %s, %s\n", p.Time.Format("2006-01-02"), m.CPU, m.Cores, m.MemoryMB, m.Kernel, m.Go)
	for _, name := range slices.Sorted(maps.Keys(m.Versions)) {
		fmt.Fprintf(b, "- %s: %s\n", name, m.Versions[name])
	}
	c := p.Settings
	fmt.Fprintf(b, "- %d rounds, %v per run%s; %s\n", c.Rounds, c.Cell, p.loads(), p.Defaults)
	if c.FloorSums {
		fmt.Fprint(b, "- the skeletons of the floor compute and check a CRC32C of every byte between the daemons, as ours do\n")
	}
	fmt.Fprintf(b, "- %d of %d runs had a foreign load above %.1f cores and were dropped; load average %s\n", p.Dropped, p.Runs, c.Foreign, p.loadAverages())
	for _, name := range slices.Sorted(maps.Keys(p.Ciphers)) {
		fmt.Fprintf(b, "- cipher of %q: %s\n", name, p.Ciphers[name])
	}
	met, asked := p.score()
	fmt.Fprintf(b, "- **%d of %d targets are met**\n", met, asked)
}

// loads says what a run is.
func (p *report) loads() string {
	if p.Settings.Net {
		return fmt.Sprintf(" of streams, %v of round trips", p.Settings.Cell/4)
	}
	return fmt.Sprintf(", devices of %d MiB", p.Settings.Size>>20)
}

// loadAverages are the least and the greatest around the rounds.
func (p *report) loadAverages() string {
	var all []float64
	for _, r := range p.Rounds {
		all = append(all, r.LoadBefore, r.LoadAfter)
	}
	return fmt.Sprintf("%.2f to %.2f", quantile(all, 0), quantile(all, 1))
}

func (p *report) score() (met, asked int) {
	for _, r := range p.Rows {
		if r.Target > 0 {
			asked++
			if r.Met {
				met++
			}
		}
	}
	return met, asked
}

// writePlots shows the pictures, if there are any.
func (p *report) writePlots(b *strings.Builder) {
	for i, pic := range p.pictures() {
		if i == 0 {
			b.WriteString("\n## Over depth\n\n")
		}
		fmt.Fprintf(b, "![%s](%s)\n", pic.Title, pic.file)
	}
}

// ids of the rows, in order.
func (p *report) ids() (ids []string) {
	for _, r := range p.Rows {
		if !slices.Contains(ids, r.ID) {
			ids = append(ids, r.ID)
		}
	}
	return ids
}

func (p *report) writeRows(b *strings.Builder, id string) {
	fmt.Fprintf(b, "\n## %s: %s\n\n", id, titles[id])
	floor := slices.ContainsFunc(p.Rows, func(r row) bool { return r.ID == id && r.Floor > 0 })
	head, line := "| workload | figure |", "|---|---|"
	if floor {
		head, line = head+" floor |", line+"---|"
	}
	b.WriteString(head + " ours | CRC off | against | theirs | ratio | lower quartile | target | runs | |\n" + line + "---|---|---|---|---|---|---|---|---|\n")
	for _, r := range p.Rows {
		if r.ID == id {
			r.write(b, floor)
		}
	}
}

// write writes the line of a row, with a column for the floor if others have one.
func (r row) write(b *strings.Builder, floor bool) {
	target, verdict := r.verdict()
	crc := ""
	if r.CRCOff > 0 {
		crc = digits(r.CRCOff)
	}
	fmt.Fprintf(b, "| %s | %s, %s |", r.Workload, r.Metric, r.Unit)
	switch {
	case floor && r.Floor > 0:
		fmt.Fprintf(b, " %s (%.2f) |", digits(r.Floor), r.AtFloor)
	case floor:
		b.WriteString(" |")
	}
	fmt.Fprintf(b, " %s | %s | %s | %s | **%.2f** | %.2f | %s | %d | %s |\n",
		digits(r.Ours), crc, r.PeerName, digits(r.Peer), r.Ratio, r.Quartiles[1], target, r.Runs, verdict)
}

// nearFloor is the ratio to the floor from which a row is at the floor.
const nearFloor = 0.85

// verdict returns the target of a row and whether it is met; nothing without a
// target.
func (r row) verdict() (target, met string) {
	if r.Target == 0 {
		return "", ""
	}
	met = map[bool]string{true: "met", false: "**not met**"}[r.Met]
	if !r.Met && r.AtFloor >= nearFloor {
		met += ", at the floor of this design"
	}
	return fmt.Sprint(r.Target), met
}

// digits prints three digits, or all before the point.
func digits(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func (p *report) writeBudgets(b *strings.Builder) {
	if len(p.Budgets) == 0 {
		return
	}
	b.WriteString("\n## Budgets: what one I/O takes\n\nCounted in all processes of both hosts but fio. Calls that only pass time (")
	b.WriteString(strings.Join(waiting, ", ") + ") are shown and not in the sum.\n\n")
	b.WriteString("| path | workload | system calls | objects on the heap | copies of a byte |\n|---|---|---|---|---|\n")
	for _, c := range p.Budgets {
		calls := "not counted here"
		if c.Calls != nil {
			calls = fmt.Sprintf("%.2f", c.CallsIO)
		}
		fmt.Fprintf(b, "| %s | %s | %s | %.4f | %s |\n", c.Path, c.Workload, calls, total(c.Objects), shares(c.Copies))
	}
	b.WriteString("\nSystem calls of an I/O, by process:\n\n| path | workload | process | sum | |\n|---|---|---|---|---|\n")
	for _, c := range p.Budgets {
		c.writeCalls(b)
	}
}

func total(of map[string]float64) (sum float64) {
	for _, v := range of {
		sum += v
	}
	return sum
}

func shares(of map[string]float64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(of)) {
		parts = append(parts, fmt.Sprintf("%s %.2f", name, of[name]))
	}
	return strings.Join(parts, ", ")
}

// writeCalls writes a line for each process, its frequent calls first.
func (c cost) writeCalls(b *strings.Builder) {
	for _, role := range slices.Sorted(maps.Keys(c.Calls)) {
		calls := c.Calls[role]
		perIO := func(n uint64) float64 { return float64(n) / float64(c.IOs) }
		names := slices.SortedFunc(maps.Keys(calls), func(a, b string) int { return int(calls[b]) - int(calls[a]) })
		var parts []string
		for _, name := range names {
			if n := perIO(calls[name]); n >= 0.01 {
				parts = append(parts, fmt.Sprintf("%s %.2f", name, n))
			}
		}
		fmt.Fprintf(b, "| %s | %s | %s | %.2f | %s |\n", c.Path, c.Workload, role, perIO(calls.Sum(waiting...)), strings.Join(parts, ", "))
	}
}

func (p *report) writeTroubles(b *strings.Builder) {
	if len(p.LeftOut)+len(p.Errors) == 0 {
		return
	}
	b.WriteString("\n## Left out and failed\n\n")
	for _, s := range slices.Concat(p.LeftOut, p.Errors) {
		fmt.Fprintf(b, "- %s\n", strings.ReplaceAll(s, "\n", " "))
	}
}
