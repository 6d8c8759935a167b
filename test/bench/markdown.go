package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// markdown writes the tables: per class and workload the medians of everybody,
// then per target of ours the ratios.
func (p *report) markdown() string {
	var b strings.Builder
	b.WriteString("# Benchmarks\n\nHow this is measured and what of it is fair: [benchmarking.md](../benchmarking.md).\n\n")
	p.writeMachine(&b)
	for _, class := range []string{classRAM, classCached, classDirect} {
		p.writeClass(&b, class)
	}
	p.writeTroubles(&b)
	return b.String()
}

func (p *report) writeMachine(b *strings.Builder) {
	m := p.Machine
	fmt.Fprintf(b, "- %s: %s, %d cores, %d MB, Linux %s, %s\n", p.Time.Format("2006-01-02"), m.CPU, m.Cores, m.MemoryMB, m.Kernel, m.Go)
	for _, name := range slices.Sorted(maps.Keys(m.Versions)) {
		fmt.Fprintf(b, "- %s: %s\n", name, m.Versions[name])
	}
	c := p.Settings
	fmt.Fprintf(b, "- %d rounds, %v per run, devices of %d MiB; %s\n", c.Rounds, c.Cell, c.Size>>20, p.Defaults)
	fmt.Fprintf(b, "- %d of %d rounds had a foreign load above %.1f cores. They are in the medians.\n\n", p.Flagged, len(p.Rounds), c.Foreign)
	b.WriteString("| round | load before | after | foreign cores | stolen cores | |\n|---|---|---|---|---|---|\n")
	for i, r := range p.Rounds {
		note := ""
		if r.Flagged {
			note = "foreign load"
		}
		fmt.Fprintf(b, "| %d | %.2f | %.2f | %.2f | %.2f | %s |\n", i+1, r.LoadBefore, r.LoadAfter, r.Foreign, r.Stolen, note)
	}
}

// figure is a line of a table.
type figure struct {
	workload, metric, unit string
}

// table is what one target of ours did against every peer of its class.
type table struct {
	ours  string
	peers []string
	lines []figure
	cells map[figure]map[string]row // by peer
}

// writeClass writes one table for each target of ours. Without CRC it is a
// column in the table of the same target with it.
func (p *report) writeClass(b *strings.Builder, class string) {
	var tables []*table
	off := map[string]map[figure]float64{}
	for _, r := range p.Rows {
		k := figure{r.Workload, r.Metric, r.Unit}
		if r.Class != class || !printed(r.Metric) {
			continue
		}
		if base, found := strings.CutSuffix(r.OursName, crcOff); found {
			if off[base] == nil {
				off[base] = map[figure]float64{}
			}
			off[base][k] = r.Ours
			continue
		}
		i := slices.IndexFunc(tables, func(t *table) bool { return t.ours == r.OursName })
		if i < 0 {
			i = len(tables)
			tables = append(tables, &table{ours: r.OursName, cells: map[figure]map[string]row{}})
		}
		tables[i].add(k, r)
	}
	if len(tables) > 0 {
		fmt.Fprintf(b, "\n## %s\n", class)
	}
	for _, t := range tables {
		t.write(b, off[t.ours])
	}
}

// printed tells whether a metric is in the tables; the others are in the
// results only.
func printed(metric string) bool { return metric != serverCPUPerIO.name }

func (t *table) add(k figure, r row) {
	if !slices.Contains(t.peers, r.PeerName) {
		t.peers = append(t.peers, r.PeerName)
	}
	if t.cells[k] == nil {
		t.cells[k] = map[string]row{}
		t.lines = append(t.lines, k)
	}
	t.cells[k][r.PeerName] = r
}

func (t *table) write(b *strings.Builder, off map[figure]float64) {
	fmt.Fprintf(b, "\n### %s\n\nMedian of the peer, **ratio** (above 1: ours is better), spread of the ratio over the rounds.\n\n", t.ours)
	columns := append([]string{"workload", "figure", "rnbd"}, t.peers...)
	if off != nil {
		columns = slices.Insert(columns, 3, "rnbd, CRC off")
	}
	fmt.Fprintf(b, "| %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
	for _, k := range t.lines {
		fmt.Fprintf(b, "| %s | %s, %s | %s |", k.workload, k.metric, k.unit, number(t.own(k)))
		if off != nil {
			fmt.Fprintf(b, " %s |", number(off[k]))
		}
		for _, peer := range t.peers {
			if r, ok := t.cells[k][peer]; ok {
				fmt.Fprintf(b, " %s, **%.2f** (%.2f to %.2f) |", number(r.Peer), r.Ratio, r.Spread[0], r.Spread[1])
			} else {
				b.WriteString(" - |")
			}
		}
		b.WriteString("\n")
	}
}

// own is our median in a line; it is the same in all its cells unless a peer
// has missed a round.
func (t *table) own(k figure) float64 {
	for _, peer := range t.peers {
		if r, ok := t.cells[k][peer]; ok {
			return r.Ours
		}
	}
	return 0
}

// number prints three digits, or all before the point.
func number(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func (p *report) writeTroubles(b *strings.Builder) {
	if len(p.LeftOut)+len(p.Errors) == 0 {
		return
	}
	b.WriteString("\n## Left out and failed\n\n")
	for _, s := range append(slices.Clone(p.LeftOut), p.Errors...) {
		fmt.Fprintf(b, "- %s\n", strings.ReplaceAll(s, "\n", " "))
	}
}
