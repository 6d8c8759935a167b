package kernelvm

import (
	"strings"
	"testing"
)

func TestBenchRows_JudgeByTheLowerQuartile(t *testing.T) {
	s := benchSeries{}
	for _, iops := range []float64{1000, 900, 700, 600, 500} {
		s.add("w", kernelPair, benchRun{1000, 10})
		s.add("w", kernelOurs, benchRun{iops, 20})
	}
	got := s.row(benchClaim{"U6", "w", kernelOurs, kernelPair, false, 0.6})
	if got.Median != 0.7 || got.LowerQuartile != 0.6 || !got.Met || got.OursMedian != 700 {
		t.Errorf("requests per second: %+v", got)
	}
	if got = s.row(benchClaim{"U8", "w", kernelOurs, kernelPair, true, 0.6}); got.Median != 0.5 || got.Met {
		t.Errorf("CPU time, of which less is better: %+v", got)
	}
	for range 5 {
		s.add("w", ublkTCP, benchRun{300, 30})
		s.add("w", ublkFloor, benchRun{400, 20})
	}
	if got = s.row(benchClaim{"U4", "w", ublkTCP, kernelPair, false, 0.6}); got.Floor != 0.4 || got.OfFloor != 0.75 {
		t.Errorf("requests per second of a skeleton: %+v", got)
	}
	if got = s.row(benchClaim{"U8", "w", ublkTCP, kernelPair, true, 0.6}); got.Floor != 0.5 || got.OfFloor != 20.0/30 {
		t.Errorf("CPU time of a skeleton: %+v", got)
	}
	s = benchSeries{"w": {kernelPair: s["w"][kernelPair], kernelOurs: s["w"][kernelOurs]}}
	if r := s.ratios(kernelPair)["w"]; len(r) != 1 || r[kernelOurs] != (ratio{0.7, 0.5, 1}) {
		t.Errorf("ratios: %+v", r)
	}
}

func TestBenchRows_AreInTheReport(t *testing.T) {
	s, r := benchSeries{}, benchResult{Order: []string{kernelPair, kernelOurs, ublkVerbs, ublkTCP, ublkFloor, nbdModule}}
	for _, w := range benchWorks() {
		for _, pair := range r.Order {
			s.add(w.name, pair, benchRun{100, 1})
		}
	}
	for _, c := range benchClaims() {
		r.Rows = append(r.Rows, s.row(c))
	}
	r.Ratios = s.ratios(kernelPair)
	text := benchMarkdown(r)
	for _, want := range []string{"18 of 20 targets", "| U4 | 4 KiB randread, depth 1 |", "| U5 | 1 MiB", "| U6 |", "| U8 | 4 KiB randwrite, depth 32 |", "| 1.00 to 1.00 |", "| met | 1.00 | 1.00 |\n", "| 0.95 | met | |\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("the report has no %q:\n%s", want, text)
		}
	}
}
