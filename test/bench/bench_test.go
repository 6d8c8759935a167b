package main

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// The test binary is the load generator too, as the program itself is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-worker" {
		main()
		return
	}
	code := m.Run()
	lab.Cleanup()
	os.Exit(code)
}

func TestQuickRun(t *testing.T) {
	lab.Tool(t, "fio")
	lab.Tool(t, "nbdkit")
	dir := t.TempDir()
	o, err := parse([]string{"-quick", "-dir", dir, "-json", filepath.Join(dir, "results.json"), "-markdown", filepath.Join(dir, "README.md")}, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var out bytes.Buffer
	if err := bench(ctx, o, &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	checkResults(t, filepath.Join(dir, "results.json"))
	text, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil || !strings.Contains(out.String(), string(text)) {
		t.Errorf("the tables are not what was printed: %v", err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "rnbd-bench-*"))
	if left != nil {
		t.Errorf("left behind: %v", left)
	}
}

func checkResults(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var p report
	if err := json.Unmarshal(b, &p); err != nil {
		t.Fatal(err)
	}
	for _, e := range p.Errors {
		t.Errorf("failed: %s", e)
	}
	seen := map[string]bool{}
	for _, r := range p.Rows {
		seen[r.OursName+" / "+r.PeerName] = true
		if r.Runs != 1 || r.Ours <= 0 || r.Peer <= 0 || r.Ratio <= 0 {
			t.Errorf("odd row %+v", r)
		}
		lower := strings.HasPrefix(r.Metric, "latency") || strings.HasPrefix(r.Metric, "CPU")
		want := r.Ours / r.Peer
		if lower {
			want = 1 / want
		}
		if math.Abs(want/r.Ratio-1) > 1e-6 {
			t.Errorf("ratio of %s, %s is %g, want %g", r.Workload, r.Metric, r.Ratio, want)
		}
	}
	for _, o := range []string{frontEnd, direct, frontEnd + crcOff, direct + crcOff} {
		for _, peer := range []string{nbdkitMemory, nbdkitProxy, goClient, nbdkitFile} {
			if !seen[o+" / "+peer] {
				t.Errorf("%s was not compared with %s", o, peer)
			}
		}
	}
	if !seen[overRoCE+" / "+direct] {
		t.Error("rocev2 was not compared with iwarp")
	}
}

func TestInterruptedRunLeavesNothing(t *testing.T) {
	lab.Tool(t, "fio")
	lab.Tool(t, "nbdkit")
	dir := t.TempDir()
	s, err := openSite(dir, 16<<20)
	if err != nil {
		t.Fatal(err)
	}
	s.addPeers(t.Context())
	var pids []int
	for _, target := range s.targets {
		pids = append(pids, target.servers...)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	if _, err := s.measure(ctx, settings{Rounds: 1000, Cell: 50 * time.Millisecond, Depths: []int{1}}, &bytes.Buffer{}); err == nil {
		t.Error("a run that was interrupted has no error")
	}
	s.close()
	for _, pid := range pids {
		if alive(pid) {
			t.Errorf("process %d is still there", pid)
		}
	}
}

// alive tells whether a process runs, not as a zombie.
func alive(pid int) bool {
	for range 100 {
		b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
		if err != nil || strings.Contains(string(b), ") Z ") {
			return false
		}
		time.Sleep(20 * time.Millisecond)
	}
	return true
}

func TestHistogram(t *testing.T) {
	var h histogram
	for i := range 1000 {
		h.add(time.Duration(i+1) * time.Microsecond)
	}
	for q, want := range map[float64]float64{0.5: 500e3, 0.99: 990e3} {
		if got := h.quantile(q); math.Abs(got/want-1) > 0.04 {
			t.Errorf("quantile %g is %g ns, want about %g", q, got, want)
		}
	}
	for _, d := range []time.Duration{0, 1, 31, 32, 63, 64, 65, 12345, time.Second, math.MaxInt64} {
		if got := middle(bucket(d)); math.Abs(got-float64(d)) > 0.04*float64(d) {
			t.Errorf("%d is counted as %g", d, got)
		}
	}
}

func TestRatioAboveOneIsBetter(t *testing.T) {
	r := &results{samples: map[key][]*sample{}}
	w := workload{"w", false, false, 4096, 1}
	fast := sample{IOs: 2000, Bytes: 1, Elapsed: 1, Mean: 10, P50: 10, P99: 10, ClientCPU: 1, ServerCPU: 1}
	slow := sample{IOs: 1000, Bytes: 1, Elapsed: 1, Mean: 20, P50: 20, P99: 20, ClientCPU: 1, ServerCPU: 1}
	r.samples[key{"c", "a", "w"}] = []*sample{&fast, nil, &fast, &slow}
	r.samples[key{"c", "b", "w"}] = []*sample{&slow, &slow, &slow, &slow}
	rows := r.compare("c", w, "a", "b")
	if len(rows) != len(w.metrics()) {
		t.Fatalf("%d rows of %d metrics", len(rows), len(w.metrics()))
	}
	for _, got := range rows {
		if got.Ratio != 2 || got.Paired != 2 || got.Runs != 3 || got.Spread != [2]float64{1, 2} {
			t.Errorf("%s: %+v", got.Metric, got)
		}
	}
}

func TestParseFio(t *testing.T) {
	const out = `note: something
{"jobs": [{"error": 0, "job_runtime": 500, "usr_cpu": 20.0, "sys_cpu": 30.0,
 "read": {"total_ios": 1000, "io_bytes": 4096000, "runtime": 500, "lat_ns": {"mean": 90000},
  "clat_ns": {"percentile": {"50.000000": 80000, "99.000000": 200000}}}, "write": {}}]}`
	s, err := parseFio([]byte(out), workload{Block: 4096})
	want := sample{IOs: 1000, Bytes: 4096000, Elapsed: 0.5, Mean: 90, P50: 80, P99: 200, ClientCPU: 0.25}
	if err != nil || s != want {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := parseFio([]byte(out), workload{Write: true}); err == nil {
		t.Error("a run without writes is taken for one of writes")
	}
}
