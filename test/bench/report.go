package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// row is one comparison, measured.
type row struct {
	ID       string  `json:"id"`
	Workload string  `json:"workload"`
	Metric   string  `json:"metric"`
	Unit     string  `json:"unit"`
	Ours     float64 `json:"ours"` // medians over the rounds
	OursName string  `json:"ours_name"`
	CRCOff   float64 `json:"ours_crc_off,omitempty"`
	Floor    float64 `json:"floor,omitempty"`
	// AtFloor is the median of the ratios of ours to the floor within each round: 1
	// is as good as the floor. Of a target against itself it is the ratio to the
	// floor's ratio.
	AtFloor  float64 `json:"ours_to_floor,omitempty"`
	Peer     float64 `json:"peer"`
	PeerName string  `json:"peer_name"`
	// Ratio of the medians; above 1 ours is better, whatever the metric.
	Ratio float64 `json:"ratio"`
	// Quartiles of the ratios within each round: least, lower, median, upper,
	// greatest.
	Quartiles [5]float64 `json:"quartiles"`
	Target    float64    `json:"target,omitempty"` // 0: none
	Runs      int        `json:"runs"`             // rounds with figures of both
	Dropped   int        `json:"dropped_runs"`     // rounds that foreign load has spoilt
	Met       bool       `json:"met"`              // by the lower quartile; true where there is no target
}

// series has the figures of one target, one per round.
type series struct {
	Target   string    `json:"target"`
	Workload string    `json:"workload"`
	Samples  []*sample `json:"samples"`
}

// report is everything that a run has to tell.
type report struct {
	Time     time.Time `json:"time"`
	Machine  platform  `json:"machine"`
	Settings settings  `json:"settings"`
	Defaults string    `json:"defaults"`
	Rounds   []round   `json:"rounds"`
	Runs     int       `json:"runs"`
	Dropped  int       `json:"dropped_runs"`
	LeftOut  []string  `json:"left_out"`
	Errors   []string  `json:"errors"`
	Verified []string  `json:"verified"`
	Rows     []row     `json:"rows"`
	Budgets  []cost    `json:"budgets"`
	Series   []series  `json:"series"`

	Ciphers map[string]string `json:"ciphers,omitempty"` // by target
}

const defaults = "product defaults: MPA CRC on, always-invalidate on, 1 pump for every 2 CPUs and 2 at most in each daemon, spinning 100 us; \"CRC off\" is --mpa-crc=false on both ends"

func newReport(c settings, p *plan, r *results) *report {
	rep := &report{Time: time.Now().UTC(), Machine: thisPlatform(), Settings: c, Defaults: defaults, Rounds: r.rounds,
		LeftOut: r.skipped, Errors: r.errors, Verified: r.verified, Budgets: r.budgets, Ciphers: r.ciphers}
	if c.Net {
		rep.Defaults = netDefaults
		rep.Machine.Versions = netVersions()
	}
	for _, n := range r.rounds {
		rep.Runs += n.Runs
		rep.Dropped += n.Dropped
	}
	for _, c := range p.claims {
		if row, ok := r.row(c); ok {
			rep.Rows = append(rep.Rows, row)
		}
	}
	for k, samples := range r.samples {
		rep.Series = append(rep.Series, series{k.target, k.workload, samples})
	}
	slices.SortFunc(rep.Series, func(a, b series) int {
		return slices.Compare([]string{a.Target, a.Workload}, []string{b.Target, b.Workload})
	})
	return rep
}

// row measures a claim by the peer with the best median; false: one side is
// missing.
func (r *results) row(c claim) (best row, found bool) {
	for _, peer := range c.peers {
		for _, w := range c.peerLoads() {
			got, ok := r.compare(c, key{peer, w.Name})
			if !ok || found && !c.tougher(got, best) {
				continue
			}
			if c.loads != nil {
				got.PeerName += ", " + w.Name
			}
			best, found = got, true
		}
	}
	best.CRCOff = r.median(key{c.ours + crcOff, c.w.Name}, c.m)
	best.Floor, best.AtFloor = r.atFloor(c, best.Ratio)
	return best, found
}

// atFloor returns the figure of the claim's skeleton, and ours as a part of it; 0: there
// is none. Where a target is compared with itself the parts are those of the ratios,
// because the skeleton's ratio is the bound then.
func (r *results) atFloor(c claim, ratio float64) (floor, part float64) {
	got, ok := r.compare(c, key{c.floor(), c.w.Name})
	if !ok {
		return 0, 0
	}
	if !c.ofItself() {
		return got.Peer, got.Quartiles[2]
	}
	skeleton := c
	skeleton.ours, skeleton.peers = c.floor(), []string{c.floor()}
	itself, ok := r.row(skeleton)
	if !ok || itself.Ratio == 0 {
		return got.Peer, 0
	}
	return got.Peer, ratio / itself.Ratio
}

// tougher reports whether the peer of a is better than that of b.
func (c claim) tougher(a, b row) bool {
	return b.Runs == 0 || a.Runs > 0 && c.m.better(a.Peer, b.Peer) > 1
}

// compare is a claim against one peer.
func (r *results) compare(c claim, peer key) (row, bool) {
	a, b := r.samples[key{c.ours, c.w.Name}], r.samples[peer]
	out := row{ID: c.id, Workload: c.w.Name, Metric: c.m.name, Unit: c.m.unit, OursName: c.ours, PeerName: peer.target, Target: c.target}
	var x, y, ratios []float64
	for i := range min(len(a), len(b)) {
		if a[i] == nil || b[i] == nil {
			continue
		}
		if a[i].Dropped || b[i].Dropped {
			out.Dropped++
			continue
		}
		ours, theirs := c.m.of(*a[i]), c.m.of(*b[i])
		x, y, ratios = append(x, ours), append(y, theirs), append(ratios, c.m.better(ours, theirs))
	}
	out.Runs = len(x)
	if len(x) > 0 {
		out.Ours, out.Peer = quantile(x, 0.5), quantile(y, 0.5)
		out.Ratio = c.m.better(out.Ours, out.Peer)
		for i := range out.Quartiles {
			out.Quartiles[i] = quantile(ratios, float64(i)/4)
		}
		out.Met = out.Quartiles[1] >= c.target
	}
	return out, len(x) > 0 || out.Dropped > 0
}

// median of a figure of a series; 0: there is none.
func (r *results) median(k key, m metric) float64 {
	return quantile(r.figures(k, m), 0.5)
}

// figures returns a figure of each sample of a series that counts.
func (r *results) figures(k key, m metric) (v []float64) {
	for _, s := range r.samples[k] {
		if s != nil && !s.Dropped {
			v = append(v, m.of(*s))
		}
	}
	return v
}

// quantile interpolates between the two figures around q.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	at := q * float64(len(v)-1)
	i := int(at)
	if i+1 == len(v) {
		return v[i]
	}
	return v[i] + (at-float64(i))*(v[i+1]-v[i])
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
	dir := filepath.Dir(o.markdown)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("tables: %w", err)
	}
	if err := os.WriteFile(o.markdown, []byte(text), 0o644); err != nil {
		return fmt.Errorf("tables: %w", err)
	}
	for _, pic := range p.pictures() {
		if err := os.WriteFile(filepath.Join(dir, pic.file), pic.SVG(), 0o644); err != nil {
			return fmt.Errorf("plot: %w", err)
		}
	}
	return nil
}
