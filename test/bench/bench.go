package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"
)

// settings of a run.
type settings struct {
	Rounds  int           `json:"rounds"`
	Cell    time.Duration `json:"cell_ns"`
	Size    int64         `json:"device_bytes"`
	Foreign float64       `json:"foreign_cores_limit"`
	Depths  []int         `json:"depths"`
}

// round is what happened around a round.
type round struct {
	LoadBefore float64 `json:"load_before"`
	LoadAfter  float64 `json:"load_after"`
	Foreign    float64 `json:"foreign_cores"`
	Stolen     float64 `json:"stolen_cores"`
	Flagged    bool    `json:"flagged"` // foreign load above the limit
	Seconds    float64 `json:"seconds"`
}

// key names a series of samples.
type key struct {
	class, target, workload string
}

// results of a run: one sample per round for each key, nil where it failed.
type results struct {
	rounds  []round
	samples map[key][]*sample
	errors  []string
}

// measured tells which workloads a class is about: what is cached is read,
// what is direct is written.
func (t *target) measured(w workload) bool {
	switch t.class {
	case classCached:
		return !w.Write
	case classDirect:
		return w.Write
	}
	return true
}

// measure runs all rounds. In each, all targets of a class take turns at a
// workload before the next one comes; who is first changes from round to
// round.
func (s *site) measure(ctx context.Context, c settings, out io.Writer) (*results, error) {
	r := &results{samples: map[key][]*sample{}}
	for n := range c.Rounds {
		fmt.Fprintf(out, "round %d of %d, load average %.2f\n", n+1, c.Rounds, loadAverage())
		if err := s.round(ctx, c, n, r); err != nil {
			return nil, err
		}
		last := r.rounds[len(r.rounds)-1]
		fmt.Fprintf(out, "  %.0f s, foreign load %.2f cores%s\n", last.Seconds, last.Foreign, map[bool]string{true: ": flagged"}[last.Flagged])
	}
	return r, nil
}

func (s *site) round(ctx context.Context, c settings, n int, r *results) error {
	this := round{LoadBefore: loadAverage()}
	_, stolen := busy()
	var foreign float64 // core-seconds
	start := time.Now()
	var measured float64
	for _, w := range workloads(c.Depths...) {
		for i := range s.targets {
			t := s.targets[(i+n)%len(s.targets)]
			if !t.measured(w) {
				continue
			}
			began := time.Now()
			sample, err := s.cell(ctx, t, w, c.Cell)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			k := key{t.class, t.name, w.Name}
			for len(r.samples[k]) < n {
				r.samples[k] = append(r.samples[k], nil)
			}
			if err != nil {
				r.errors = append(r.errors, fmt.Sprintf("round %d, %s: %v", n+1, t.name, err))
				continue
			}
			r.samples[k] = append(r.samples[k], &sample)
			wall := time.Since(began).Seconds()
			foreign += sample.Foreign * wall
			measured += wall
		}
	}
	_, stolenAfter := busy()
	this.Seconds = time.Since(start).Seconds()
	this.LoadAfter = loadAverage()
	this.Stolen = (stolenAfter - stolen) / this.Seconds
	this.Foreign = foreign / max(measured, 1e-9)
	this.Flagged = this.Foreign > c.Foreign
	r.rounds = append(r.rounds, this)
	return nil
}

// cell is one run of one workload on one target.
func (s *site) cell(ctx context.Context, t *target, w workload, d time.Duration) (sample, error) {
	began, self := time.Now(), clockOf(os.Getpid())
	work, _ := busy()
	before := cpuOf(t.servers)
	m, err := t.run(ctx, w, d)
	if err != nil {
		return m, err
	}
	m.ServerCPU = cpuOf(t.servers) - before
	after, _ := busy()
	own := m.ServerCPU + m.processes + clockOf(os.Getpid()) - self
	m.Foreign = max(0, (after-work-own)/time.Since(began).Seconds())
	return m, nil
}
