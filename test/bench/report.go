package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// row is one comparison.
type row struct {
	Class    string  `json:"class"`
	Workload string  `json:"workload"`
	Metric   string  `json:"metric"`
	Unit     string  `json:"unit"`
	OursName string  `json:"ours_name"`
	PeerName string  `json:"peer_name"`
	Ours     float64 `json:"ours"` // medians
	Peer     float64 `json:"peer"`
	// Ratio of the medians; above 1 ours is better, whatever the metric.
	Ratio float64 `json:"ratio"`
	// Paired is the median of the ratios within each round, Spread the
	// smallest and the largest of them.
	Paired float64    `json:"paired_ratio"`
	Spread [2]float64 `json:"spread"`
	Runs   int        `json:"runs"` // rounds in which both gave a figure
}

// series is what was measured of one target, one figure per round.
type series struct {
	Class    string    `json:"class"`
	Target   string    `json:"target"`
	Workload string    `json:"workload"`
	Samples  []*sample `json:"samples"`
}

// report is everything that a run has to tell.
type report struct {
	Time     time.Time `json:"time"`
	Machine  machine   `json:"machine"`
	Settings settings  `json:"settings"`
	Defaults string    `json:"defaults"`
	Rounds   []round   `json:"rounds"`
	Flagged  int       `json:"flagged_rounds"`
	LeftOut  []string  `json:"left_out"`
	Errors   []string  `json:"errors"`
	Rows     []row     `json:"rows"`
	Series   []series  `json:"series"`
}

const defaults = "product defaults: MPA CRC on, always-invalidate on, 2 pumps per process, spinning 100 us; \"CRC off\" is --mpa-crc=false on both ends"

func newReport(c settings, s *site, r *results) *report {
	p := &report{Time: time.Now().UTC(), Machine: thisMachine(), Settings: c, Defaults: defaults,
		Rounds: r.rounds, LeftOut: s.skipped, Errors: r.errors}
	for _, n := range r.rounds {
		if n.Flagged {
			p.Flagged++
		}
	}
	for _, class := range []string{classRAM, classCached, classDirect} {
		ours, peers := s.sides(class)
		for _, w := range workloads(c.Depths...) {
			for _, t := range append(slices.Clone(ours), peers...) {
				if got := r.samples[key{class, t, w.Name}]; got != nil {
					p.Series = append(p.Series, series{class, t, w.Name, got})
				}
			}
			for _, o := range ours {
				peers := peers
				if o == overRoCE {
					peers = append([]string{direct}, peers...) // what UDP costs against TCP
				}
				for _, peer := range peers {
					p.Rows = append(p.Rows, r.compare(class, w, o, peer)...)
				}
			}
		}
	}
	return p
}

// sides lists our targets of a class and those of others.
func (s *site) sides(class string) (ours, peers []string) {
	for _, t := range s.targets {
		switch {
		case t.class != class:
		case isOurs(t.name):
			ours = append(ours, t.name)
		default:
			peers = append(peers, t.name)
		}
	}
	return ours, peers
}

func isOurs(name string) bool { return len(name) > 4 && name[:4] == "rnbd" }

// compare makes the rows of a pair of targets.
func (r *results) compare(class string, w workload, ours, peer string) (rows []row) {
	a, b := r.samples[key{class, ours, w.Name}], r.samples[key{class, peer, w.Name}]
	for _, m := range w.metrics() {
		var x, y, ratios []float64
		for i := range min(len(a), len(b)) {
			if a[i] == nil || b[i] == nil {
				continue
			}
			x, y = append(x, m.of(*a[i])), append(y, m.of(*b[i]))
			ratios = append(ratios, m.better(x[len(x)-1], y[len(y)-1]))
		}
		if len(x) == 0 {
			continue
		}
		o, p := median(x), median(y)
		rows = append(rows, row{Class: class, Workload: w.Name, Metric: m.name, Unit: m.unit, OursName: ours, PeerName: peer,
			Ours: o, Peer: p, Ratio: m.better(o, p), Paired: median(ratios),
			Spread: [2]float64{slices.Min(ratios), slices.Max(ratios)}, Runs: len(x)})
	}
	return rows
}

// better is the ratio of two figures, above 1 if the first is the better one.
func (m metric) better(ours, peer float64) float64 {
	if m.lower {
		ours, peer = peer, ours
	}
	if peer == 0 {
		return 0
	}
	return ours / peer
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	if n == 0 {
		return 0
	}
	return (v[(n-1)/2] + v[n/2]) / 2
}

// publish writes the report where it is wanted.
func publish(p *report, o options, out io.Writer) error {
	text := p.markdown()
	fmt.Fprintf(out, "\n%s", text)
	b, err := json.MarshalIndent(p, "", " ")
	if err != nil {
		return fmt.Errorf("results: %w", err)
	}
	if err := os.WriteFile(o.json, append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	if o.markdown == "" {
		return nil
	}
	if err := os.WriteFile(o.markdown, []byte(text), 0o644); err != nil {
		return fmt.Errorf("tables: %w", err)
	}
	return nil
}
