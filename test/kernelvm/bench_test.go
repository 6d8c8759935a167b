package kernelvm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// benchWork is a load.
type benchWork struct {
	name, rw, bs string
	depth        int
}

func benchWorks() (all []benchWork) {
	for _, rw := range []string{"randread", "randwrite"} {
		for _, depth := range []int{1, 32} {
			all = append(all, benchWork{fmt.Sprintf("4 KiB %s, depth %d", rw, depth), rw, "4k", depth})
		}
	}
	for _, rw := range []string{"read", "write"} {
		all = append(all, benchWork{"1 MiB sequential " + rw + ", depth 4", rw, "1m", 4})
	}
	return all
}

// benchResult is written as JSON: ratios to the kernel's own pair, because
// figures of an emulated machine mean nothing by themselves.
type benchResult struct {
	Kernel  string
	CPUs    int
	Rounds  int
	Seconds int // of each run
	Load    string
	Pairs   map[string]string           // descriptions
	Ratios  map[string]map[string]ratio // workload, pair
	Costs   map[string]map[string]perIO // the same, in a run of its own
}

// ratio is of the throughput of a pair to that of the kernel's pair in the same
// round.
type ratio struct{ Median, Min, Max float64 }

// TestBench_Peers compares our ends with the kernel's: make bench-kernel.
func TestBench_Peers(t *testing.T) {
	if os.Getenv("RNBD_BENCH") == "" {
		t.Skip("takes minutes: make bench-kernel")
	}
	b := newPeerBench(t)
	r := benchResult{Kernel: b.g.Kernel.Release, CPUs: 2, Rounds: 5, Seconds: 2, Pairs: b.what(),
		Load: "fio: libaio with O_DIRECT on devices, its nbd engine on the unix socket of the NBD front end"}
	if os.Getenv("RNBD_BENCH") == "quick" { // a try-out
		r.Rounds, r.Seconds = 1, 1
	}
	seen := map[string]map[string][]float64{}
	for range r.Rounds {
		for _, w := range benchWorks() {
			if seen[w.name] == nil {
				seen[w.name] = map[string][]float64{}
			}
			b.round(w, r.Seconds, seen[w.name])
		}
	}
	r.Ratios, r.Costs = medians(seen), b.costs(r.Seconds)
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(repositoryRoot(), "bench-results-kernel.json"), append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, w := range benchWorks() {
		for _, p := range b.pairs[1:] {
			x := r.Ratios[w.name][p.name]
			t.Logf("%-34s %-18s %.2f of %s (%.2f to %.2f)", w.name, p.name, x.Median, b.pairs[0].name, x.Min, x.Max)
		}
		for _, p := range b.pairs {
			t.Logf("%-34s %-18s %s", w.name, p.name, r.Costs[w.name][p.name])
		}
	}
}

func (b *peerBench) what() map[string]string {
	all := map[string]string{}
	for _, p := range b.pairs {
		all[p.name] = p.what
	}
	return all
}

// round lets every pair have a turn at w, and notes their ratios to the first.
func (b *peerBench) round(w benchWork, secs int, seen map[string][]float64) {
	b.t.Helper()
	base, _ := b.run(b.pairs[0], w, secs)
	for _, p := range b.pairs[1:] {
		iops, _ := b.run(p, w, secs)
		seen[p.name] = append(seen[p.name], iops/base)
	}
}

// run returns requests per second, and how many there were.
func (b *peerBench) run(p benchPair, w benchWork, secs int) (iops, ios float64) {
	b.t.Helper()
	if p.library != nil {
		return b.runLibrary(p, w, secs)
	}
	args := append([]string{"fio", "--name=b", "--size=32m", "--time_based", fmt.Sprintf("--runtime=%d", secs), "--output-format=json"}, p.target...)
	out := b.g.Run(b.t, append(args, "--rw="+w.rw, "--bs="+w.bs, fmt.Sprintf("--iodepth=%d", w.depth))...)
	var r struct {
		Jobs []struct {
			Read, Write struct {
				IOPS  float64 `json:"iops"`
				Total float64 `json:"total_ios"`
			}
		}
	}
	if i := strings.IndexByte(out, '{'); i < 0 || json.Unmarshal([]byte(out[i:]), &r) != nil || len(r.Jobs) != 1 {
		b.t.Fatalf("fio says %s", out)
	}
	read, write := r.Jobs[0].Read, r.Jobs[0].Write
	if iops = read.IOPS + write.IOPS; iops == 0 {
		b.t.Fatalf("fio did nothing: %s", out)
	}
	return iops, read.Total + write.Total
}

func (b *peerBench) runLibrary(p benchPair, w benchWork, secs int) (iops, ios float64) {
	b.t.Helper()
	out := b.g.Run(b.t, append(slices.Clone(p.library), "--size", "32M", "--time", fmt.Sprintf("%ds", secs),
		"--rw", w.rw, "--bs", strings.ToUpper(w.bs), "--depth", fmt.Sprint(w.depth))...)
	var r struct {
		Results []struct {
			IOPS     float64 `json:"iops"`
			Requests float64 `json:"requests"`
		}
	}
	if i := strings.IndexByte(out, '{'); i < 0 || json.Unmarshal([]byte(out[i:]), &r) != nil || len(r.Results) != 1 || r.Results[0].IOPS == 0 {
		b.t.Fatalf("rnbd bench says %s", out)
	}
	return r.Results[0].IOPS, r.Results[0].Requests
}

func medians(seen map[string]map[string][]float64) map[string]map[string]ratio {
	result := map[string]map[string]ratio{}
	for work, pairs := range seen {
		result[work] = map[string]ratio{}
		for pair, all := range pairs {
			slices.Sort(all)
			result[work][pair] = ratio{all[len(all)/2], all[0], all[len(all)-1]}
		}
	}
	return result
}
