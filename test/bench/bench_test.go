package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

func TestMain(m *testing.M) { os.Exit(lab.Run(m)) }

func TestQuickRun(t *testing.T) {
	lab.Tool(t, "fio")
	lab.Tool(t, "nbdkit")
	dir := t.TempDir()
	o, err := parse([]string{"-quick", "-dir", dir, "-json", filepath.Join(dir, "results.json"), "-markdown", filepath.Join(dir, "README.md")}, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
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
	missing := map[string]bool{}
	for _, c := range choose(nil, true).claims {
		missing[c.id] = os.Getenv("CI") != "" || len(p.LeftOut) == 0
	}
	for _, r := range p.Rows {
		delete(missing, r.ID)
		checkRow(t, r)
	}
	for id, must := range missing {
		if must {
			t.Errorf("row %s is missing; left out: %q", id, p.LeftOut)
		}
	}
	for _, target := range []string{direct, frontEnd, direct + crcOff, frontEnd + crcOff, overRoCE, keysChange, keysStay, tlsOurs, tlsRules, ioFileio} {
		if !slices.ContainsFunc(p.Verified, func(v string) bool { return strings.HasPrefix(v, target+", 4k") || strings.HasPrefix(v, target+", 1m") }) {
			t.Errorf("no data of %q was verified", target)
		}
	}
	for target, cipher := range p.Ciphers {
		if !strings.Contains(cipher, "AES") || !strings.Contains(cipher, "128") || !strings.Contains(cipher, "GCM") {
			t.Errorf("cipher of %q: %s", target, cipher)
		}
	}
	if n := len(p.Ciphers); n != 3 && len(p.LeftOut) == 0 {
		t.Errorf("the ciphers of %d targets are known, want 3", n)
	}
	if raw, _ := filepath.Glob(strings.TrimSuffix(path, ".json") + "-raw/nbdkit-memory-4k-*.json"); raw == nil {
		t.Error("no raw output of fio is kept")
	}
}

func checkRow(t *testing.T, r row) {
	t.Helper()
	if r.Runs != 1 || r.Ours < 0 || r.Peer <= 0 || r.Ratio < 0 {
		t.Errorf("odd row %+v", r)
	}
	if r.Met != (r.Quartiles[1] >= r.Target) {
		t.Errorf("%s, %s: ratios %v, target %g, met: %t", r.ID, r.Workload, r.Quartiles, r.Target, r.Met)
	}
}

func TestInterruptedRunLeavesNothing(t *testing.T) {
	lab.Tool(t, "fio")
	lab.Tool(t, "nbdkit")
	dir := t.TempDir()
	p := choose([]string{"P1", "P5"}, true)
	s, err := openSite(dir, "", quick, p)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.addNetwork(t.Context()); err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, target := range s.targets {
		pids = append(append(pids, target.servers...), max(target.generator, 0))
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	r := &results{samples: map[key][]*sample{}}
	for n := 0; err == nil && n < 1000; n++ {
		_, err = s.round(ctx, n, r)
	}
	if err == nil {
		t.Error("a run that was interrupted has no error")
	}
	s.close()
	for _, pid := range pids {
		if pid != 0 && alive(pid) {
			t.Errorf("process %d is still there", pid)
		}
	}
}

// alive reports whether a process runs, not as a zombie.
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

func TestRatioAboveOneIsBetter(t *testing.T) {
	w := random(false, 1, 1)
	fast := &sample{IOs: 2000, Bytes: 1, Elapsed: 1, Mean: 10, P50: 10, P99: 10, ClientCPU: 1, ServerCPU: 1}
	slow := &sample{IOs: 1000, Bytes: 1, Elapsed: 1, Mean: 20, P50: 20, P99: 20, ClientCPU: 2, ServerCPU: 0}
	spoilt := &sample{IOs: 1, Elapsed: 1, Dropped: true}
	r := &results{samples: map[key][]*sample{
		{"a", w.Name}: {fast, nil, fast, fast, slow, spoilt},
		{"b", w.Name}: {slow, slow, slow, slow, slow, slow},
		{"c", w.Name}: {spoilt, spoilt, spoilt, spoilt, spoilt, spoilt},
	}}
	for _, m := range []metric{kiops, mean, median50, tail99, cpuPerIO} {
		got, ok := r.row(claim{id: "P1", w: w, m: m, ours: "a", peers: []string{"c", "b"}, target: 2})
		if !ok || got.PeerName != "b" || got.Ratio != 2 || got.Runs != 4 || got.Dropped != 1 {
			t.Errorf("%s: %+v", m.name, got)
		}
		if got.Quartiles[0] != 1 || got.Quartiles[1] != 1.75 || got.Quartiles[4] != 2 || got.Met {
			t.Errorf("%s: quartiles %v, met: %t; the lower one decides", m.name, got.Quartiles, got.Met)
		}
	}
}

func TestBestPeerCounts(t *testing.T) {
	w, other := random(false, 16, 1), random(false, 64, 1)
	of := func(ios uint64) []*sample { return []*sample{{IOs: ios, Elapsed: 1}} }
	r := &results{samples: map[key][]*sample{
		{"a", w.Name}: of(4000), {"b", w.Name}: of(1000), {"c", w.Name}: of(2000), {"a", other.Name}: of(8000),
	}}
	if got, _ := r.row(claim{w: w, m: kiops, ours: "a", peers: []string{"b", "c"}, target: 2}); got.PeerName != "c" || got.Ratio != 2 || !got.Met {
		t.Errorf("of two peers: %+v", got)
	}
	got, _ := r.row(claim{w: w, m: kiops, ours: "a", peers: []string{"a"}, loads: []workload{w, other}, target: 0.8})
	if got.PeerName != "a, "+other.Name || got.Ratio != 0.5 || got.Met {
		t.Errorf("of two workloads: %+v", got)
	}
	if _, ok := r.row(claim{w: w, m: kiops, ours: "a", peers: []string{"nobody"}}); ok {
		t.Error("a row against nobody")
	}
}

func TestEveryRowHasATitleAndTakesPartInATryOut(t *testing.T) {
	all, part := choose(nil, false), choose(nil, true)
	for id := range titles {
		for what, p := range map[string]*plan{"the run": all, "a try-out": part} {
			has := slices.ContainsFunc(p.claims, func(c claim) bool { return c.id == id })
			if left := p == part && slices.Contains(repeats, id); has == left {
				t.Errorf("%s in %s: %t", id, what, has)
			}
		}
	}
	for _, c := range all.claims {
		if titles[c.id] == "" {
			t.Errorf("%s has no title", c.id)
		}
		if !all.has(c.ours, c.w) {
			t.Errorf("%s: %s is not measured with %s", c.id, c.ours, c.w.Name)
		}
		if slices.Contains(repeats, c.id) && !part.wants(c.ours) {
			t.Errorf("%s: %s takes no part in a try-out", c.id, c.ours)
		}
	}
	only := choose([]string{"P14"}, false)
	if !only.wants(overRoCE, direct) || only.wants(nbdkitMemory) {
		t.Errorf("P14 alone needs %v", only.loads)
	}
}

func TestParseFio(t *testing.T) {
	const out = `note: something
{"jobs": [{"error": 0, "job_runtime": 500, "usr_cpu": 20.0, "sys_cpu": 30.0,
 "read": {"total_ios": 1000, "io_bytes": 4096000, "runtime": 500,
  "lat_ns": {"mean": 90000, "percentile": {"50.000000": 80000, "99.000000": 200000}}}, "write": {}}]}`
	s, err := parseFio([]byte(out), workload{Block: 4096})
	want := sample{IOs: 1000, Bytes: 4096000, Elapsed: 0.5, Mean: 90, P50: 80, P99: 200, ClientCPU: 0.25}
	if err != nil || !reflect.DeepEqual(s, want) {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := parseFio([]byte(out), workload{Write: true}); err == nil {
		t.Error("a run without writes is taken for one of writes")
	}
}

func TestAnswersOfOtherOrdersAreKept(t *testing.T) {
	const out = `{"line":2,"results":[{"elapsed":500000000,"cpu":250000000,"requests":1000,"bytes":4096000,"mean":90000,"p50":80000,"p99":200000}]}
{"line":3,"error":"no such device"}
{"line":1,"results":[]}
`
	g := &generator{out: bufio.NewReader(strings.NewReader(out)), early: map[int]*figures{}}
	if f, err := g.answer(1); err != nil || len(f.Results) != 0 {
		t.Errorf("answer 1: %+v, %v", f, err)
	}
	f, err := g.answer(2)
	if err != nil {
		t.Fatal(err)
	}
	want := sample{IOs: 1000, Bytes: 4096000, Elapsed: 0.5, Mean: 90, P50: 80, P99: 200, ClientCPU: 0.25}
	if s, err := f.sample(); err != nil || !reflect.DeepEqual(s, want) {
		t.Errorf("sample %+v, %v", s, err)
	}
	if _, err := g.answer(3); err == nil || !strings.Contains(err.Error(), "no such device") {
		t.Errorf("answer 3: %v", err)
	}
	if _, err := g.answer(4); err == nil {
		t.Error("an answer that never comes has no error")
	}
}

func TestParseIperf(t *testing.T) {
	s, err := parseIperf([]byte(`{"end": {"sum_received": {"bytes": 3000000, "seconds": 1.5}}}`))
	if got := bandwidth.of(s); err != nil || got != 2 {
		t.Errorf("%g MB/s, %v", got, err)
	}
	if _, err := parseIperf([]byte(`{"error": "unable to connect"}`)); err == nil {
		t.Error("a run without data has no error")
	}
}

func TestPlotIsASVGWithAPointForEachDepth(t *testing.T) {
	p := &report{}
	for _, target := range []string{direct, nbdkitMemory} {
		for _, depth := range curve {
			p.Series = append(p.Series, series{target, random(true, depth, 1).Name, []*sample{
				{IOs: uint64(1000 * depth), Elapsed: 1, Mean: 50}, {IOs: uint64(3000 * depth), Elapsed: 1, Mean: 150},
			}})
		}
	}
	p.Series = append(p.Series, series{qemuNBD, random(true, 1, 1).Name, []*sample{{IOs: 1, Elapsed: 1, Mean: 50}}})
	pictures := p.pictures()
	if len(pictures) != 2 {
		t.Fatalf("%d pictures, want throughput and latency of writes", len(pictures))
	}
	for i, pic := range pictures {
		text := pic.SVG()
		if err := xml.Unmarshal(text, new(struct{})); err != nil {
			t.Errorf("%s: %v", pic.file, err)
		}
		if n := bytes.Count(text, []byte(`<path class="bar`)); n != 2*len(curve) || bytes.Contains(text, []byte("NaN")) || bytes.Contains(text, []byte("Inf")) {
			t.Errorf("%s has %d points with quartiles, want %d:\n%s", pic.file, n, 2*len(curve), text)
		}
		for _, want := range []string{"requests in flight, logarithmic scale", []string{"kIOPS", "us"}[i] + ", logarithmic scale", "quartile", direct, nbdkitMemory} {
			if !bytes.Contains(text, []byte(want)) {
				t.Errorf("%s does not say %q", pic.file, want)
			}
		}
		first := pic.Panels[0].Lines[0].Points[0]
		if first.Low >= first.Y || first.Y >= first.High {
			t.Errorf("%s: quartiles %g and %g around %g", pic.file, first.Low, first.High, first.Y)
		}
	}
}
