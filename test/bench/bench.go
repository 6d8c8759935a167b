package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/machine"
)

// settings of a run.
type settings struct {
	Rounds  int           `json:"rounds"`
	Cell    time.Duration `json:"cell_ns"`
	Size    int64         `json:"device_bytes"`
	Foreign float64       `json:"foreign_cores_limit"`
	Only    []string      `json:"only,omitempty"`
	Quick   bool          `json:"quick,omitempty"`
	Verify  bool          `json:"verify,omitempty"`
	Net     bool          `json:"net,omitempty"` // networks in the place of block devices

	FloorSums bool `json:"floor_sums,omitempty"` // the skeletons' messages have checksums
}

// phase is a set of targets that are there at the same time and take turns.
// Targets are compared within one phase; the others do not disturb it.
type phase struct {
	name  string
	start func(*site, context.Context) error
}

var phases = []phase{
	{"network", (*site).addNetwork},
	{"keys", (*site).addKeys},
	{"TLS", (*site).addTLS},
	{"paths", (*site).addPaths},
	{"disks", (*site).addDisks},
	{"plugins", (*site).addPlugins},
	{"idle", (*site).addIdle},
	{"isolation, files, io_uring", isolation("fileio", "io_uring")},
	{"isolation, files, threads", isolation("fileio", "threads")},
	{"isolation, devices, io_uring", isolation("blockio", "io_uring")},
	{"isolation, devices, threads", isolation("blockio", "threads")},
}

// networks is the only phase of a run with -net.
var networks = []phase{{"networks", (*site).addNetworks}}

// round is the record of a round of a phase.
type round struct {
	Phase      string  `json:"phase"`
	LoadBefore float64 `json:"load_before"`
	LoadAfter  float64 `json:"load_after"`
	Stolen     float64 `json:"stolen_cores"`
	Runs       int     `json:"runs"`
	Dropped    int     `json:"dropped_runs"`
	Seconds    float64 `json:"seconds"`
}

// key names a series of samples.
type key struct{ target, workload string }

// results of a run: one sample per round for each key, nil where it failed.
type results struct {
	rounds   []round
	samples  map[key][]*sample
	budgets  []cost
	skipped  []string
	errors   []string
	verified []string          // runs of the verifying twins
	ciphers  map[string]string // by target
}

// run does all phases of a plan.
func run(ctx context.Context, c settings, p *plan, dir, raw string, out io.Writer) (*results, error) {
	r := &results{samples: map[key][]*sample{}, ciphers: map[string]string{}}
	all := phases
	if c.Net {
		all = networks
	}
	for _, ph := range all {
		if err := ph.run(ctx, c, p, dir, raw, r, out); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// run starts the targets of a phase, as far as the plan wants them, and does
// its rounds.
func (ph phase) run(ctx context.Context, c settings, p *plan, dir, raw string, r *results, out io.Writer) error {
	s, err := openSite(dir, raw, c, p)
	if err != nil {
		return err
	}
	defer s.close()
	if err := ph.start(s, ctx); err != nil {
		return fmt.Errorf("%s: %w", ph.name, err)
	}
	for _, why := range s.skipped {
		fmt.Fprintln(out, "left out:", why)
	}
	r.skipped = append(r.skipped, s.skipped...)
	maps.Copy(r.ciphers, s.ciphers)
	if len(s.targets) == 0 {
		return ctx.Err()
	}
	if err := s.prepare(ctx, ph, r, out); err != nil {
		return err
	}
	for n := range c.Rounds {
		this, err := s.round(ctx, n, r)
		if err != nil {
			return err
		}
		this.Phase = ph.name
		r.rounds = append(r.rounds, this)
		fmt.Fprintf(out, "%s, round %d of %d: %.0f s, load average %.2f, %d of %d runs dropped\n",
			ph.name, n+1, c.Rounds, this.Seconds, this.LoadAfter, this.Dropped, this.Runs)
	}
	return nil
}

// prepare makes the runs before the rounds: the verifying twins, and the
// counts of the budgets.
func (s *site) prepare(ctx context.Context, ph phase, r *results, out io.Writer) error {
	if s.Verify {
		if err := s.verify(ctx, r, out); err != nil {
			return err
		}
	}
	if ph.name != "network" {
		return ctx.Err()
	}
	var err error
	if r.budgets, err = s.countAll(ctx); err == nil && len(r.budgets) > 0 {
		err = r.budgets[0].without
	}
	if err != nil && ctx.Err() == nil {
		r.skipped = append(r.skipped, fmt.Sprintf("budgets: %v", err))
	}
	return ctx.Err()
}

// round gives every target a turn at every workload that it has. The order
// changes from round to round.
func (s *site) round(ctx context.Context, n int, r *results) (round, error) {
	this := round{LoadBefore: machine.LoadAverage()}
	_, stolen := busy()
	start := time.Now()
	for _, w := range s.plan.order {
		for i := range s.targets {
			t := s.targets[(i+n)%len(s.targets)]
			if !s.plan.has(t.name, w) {
				continue
			}
			if err := s.turn(ctx, t, w, n, r, &this); err != nil {
				return this, err
			}
		}
	}
	_, stolenAfter := busy()
	this.Seconds = time.Since(start).Seconds()
	this.LoadAfter = machine.LoadAverage()
	this.Stolen = (stolenAfter - stolen) / max(this.Seconds, 1e-9)
	return this, nil
}

// turn adds the sample of one run in round n. A run that fails is noted, and
// the round goes on.
func (s *site) turn(ctx context.Context, t *target, w workload, n int, r *results, this *round) error {
	got, err := s.cell(ctx, t, w)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		r.errors = append(r.errors, fmt.Sprintf("round %d, %s: %v", n+1, t.name, err))
		return nil
	}
	k := key{t.name, w.Name}
	for len(r.samples[k]) < n {
		r.samples[k] = append(r.samples[k], nil)
	}
	r.samples[k] = append(r.samples[k], got)
	this.Runs++
	if got.Dropped {
		this.Dropped++
	}
	return s.keep(got, t, w, n)
}

// cell is one run of one workload on one target.
func (s *site) cell(ctx context.Context, t *target, w workload) (*sample, error) {
	if err := t.warm(w); err != nil {
		return nil, err
	}
	began, self := time.Now(), clockOf(os.Getpid())
	work, _ := busy()
	kernel := kernelThreads()
	before := cpuOf(t.servers)
	m, err := t.run(ctx, w, s.Cell)
	if err != nil {
		return nil, err
	}
	m.ServerCPU += cpuOf(t.servers) - before
	after, _ := busy()
	own := m.ServerCPU + m.processes + clockOf(os.Getpid()) - self + kernelThreads() - kernel
	if wall := time.Since(began).Seconds(); wall > 5./clockTick { // else the clock of the machine is too coarse
		m.Foreign = max(0, (after-work-own)/wall)
	}
	m.Dropped = m.Foreign > s.Foreign
	return &m, nil
}

// keep writes the output of the load generator into the folder of raw output.
func (s *site) keep(m *sample, t *target, w workload, n int) error {
	if m.raw == nil || s.raw == "" {
		return nil
	}
	plain := strings.NewReplacer(", ", "-", ": ", "-", " ", "-")
	name := fmt.Sprintf("%s-%s-round%d.json", plain.Replace(t.name), w.Name, n+1)
	if err := os.WriteFile(filepath.Join(s.raw, name), m.raw, 0o644); err != nil {
		return fmt.Errorf("raw output: %w", err)
	}
	return nil
}
