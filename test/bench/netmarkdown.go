package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// netIntro says what the tables are good for.
const netIntro = `# Benchmark of IP over InfiniBand

**To move bulk IP, use what the kernel has**: no overlay at all, or one of its own, as VXLAN, Geneve or its WireGuard. IPoIB here is an
emulator of a network: each packet passes through two processes. N5 says what that costs. wireguard-go also
passes each packet through two processes, and encrypts it; ours does not.

How this is measured: [benchmarking.md](benchmarking.md#networks). The command: ` + "`make bench-net`" + `.

`

// netMarkdown writes the tables of networks.
func (p *report) netMarkdown() string {
	var b strings.Builder
	b.WriteString(netIntro)
	p.writeMachine(&b)
	for _, id := range slices.Sorted(maps.Keys(netTitles)) {
		p.writeNetRows(&b, id)
	}
	p.writeTroubles(&b)
	return b.String()
}

func (p *report) writeNetRows(b *strings.Builder, id string) {
	if !slices.Contains(p.ids(), id) {
		return
	}
	fmt.Fprintf(b, "\n## %s: %s\n\n", id, netTitles[id])
	b.WriteString("| network | workload | figure | | against | | ratio | lower quartile | target | runs | |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range p.Rows {
		if r.ID != id {
			continue
		}
		target, verdict := r.verdict()
		fmt.Fprintf(b, "| %s | %s | %s, %s | %s | %s | %s | **%.2f** | %.2f | %s | %d | %s |\n", r.OursName, r.Workload, r.Metric, r.Unit,
			digits(r.Ours), r.PeerName, digits(r.Peer), r.Ratio, r.Quartiles[1], target, r.Runs, verdict)
	}
}
