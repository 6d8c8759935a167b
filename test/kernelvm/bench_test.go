package kernelvm

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
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
	Day     string
	CPUs    int
	Rounds  int
	Seconds int // of each run
	Load    string
	Order   []string                    // of the pairs
	Pairs   map[string]string           // descriptions
	Rows    []benchRow                  // with targets
	Ratios  map[string]map[string]ratio // workload, pair
	Costs   map[string]map[string]perIO // the same, in a run of its own
	Runs    benchSeries                 // one per round
}

// ratio is of the throughput of a pair to that of the kernel's pair in the same
// round.
type ratio struct{ Median, Min, Max float64 }

// TestBench_Peers compares our ends with the kernel's: make bench-kernel.
func TestBench_Peers(t *testing.T) {
	if os.Getenv("RNBD_BENCH") == "" {
		t.Skip("takes minutes: make bench-kernel")
	}
	needIbverbs(t)
	b := newPeerBench(t)
	r := benchResult{Kernel: b.g.Kernel.Release, CPUs: 2, Rounds: 5, Seconds: 2, Order: b.names(), Pairs: b.what(),
		Day: time.Now().UTC().Format(time.DateOnly), Load: "fio: libaio with O_DIRECT on devices, its nbd engine on the unix socket of the NBD front end"}
	if os.Getenv("RNBD_BENCH") == "quick" { // a try-out
		r.Rounds, r.Seconds = 1, 1
	}
	r.Runs = benchSeries{}
	for range r.Rounds {
		for _, w := range benchWorks() {
			b.round(w, r.Seconds, r.Runs)
		}
	}
	r.Ratios, r.Costs = r.Runs.ratios(b.pairs[0].name), b.costs(r.Seconds)
	for _, c := range benchClaims() {
		r.Rows = append(r.Rows, r.Runs.row(c))
	}
	publishBench(t, r)
}

// needIbverbs ends the test before the guest is booted if our programs lack the fabric
// that the pairs use.
func needIbverbs(t *testing.T) {
	t.Helper()
	out, err := exec.Command(rnbdPath, "version").CombinedOutput()
	if err != nil {
		t.Fatalf("rnbd version: %v: %s", err, out)
	}
	if strings.Contains(string(out), "ibverbs (not built in") {
		t.Fatalf("rnbd is built without the fabric ibverbs: install gcc, libibverbs-dev and librdmacm-dev, and build again:\n%s", out)
	}
}

// publishBench writes the results, and the report where $RNBD_BENCH_REPORT says.
func publishBench(t *testing.T, r benchResult) {
	t.Helper()
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(repositoryRoot(), "bench-results-kernel.json"), append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	report := benchMarkdown(r)
	t.Log(report)
	if path := os.Getenv("RNBD_BENCH_REPORT"); path != "" {
		if err := os.WriteFile(path, []byte(report), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func (b *peerBench) names() (all []string) {
	for _, p := range b.pairs {
		all = append(all, p.name)
	}
	return all
}

func (b *peerBench) what() map[string]string {
	all := map[string]string{}
	for _, p := range b.pairs {
		all[p.name] = p.what
	}
	return all
}

// round lets every pair have a turn at w.
func (b *peerBench) round(w benchWork, secs int, seen benchSeries) {
	b.t.Helper()
	for _, p := range b.pairs {
		before := b.busyTime()
		iops, ios := b.run(p, w, secs)
		seen.add(w.name, p.name, benchRun{iops, (b.busyTime() - before) / ios * 1e6})
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
