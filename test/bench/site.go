package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// target is something that is measured.
type target struct {
	name    string
	servers []int // processes that take part, without the load generator
	run     func(context.Context, workload, time.Duration) (sample, error)
	// cached is a file that is brought into the page cache before each read
	// workload; empty: none
	cached string

	// Of ours only.
	generator int // process of `rnbd bench`; 0: another program makes the load
	// verify writes and reads back as w would, and compares every byte; nil
	// for peers.
	verify func(context.Context, workload, time.Duration) error
}

// site holds everything that runs on behalf of a phase.
type site struct {
	settings
	plan    *plan
	dir     string // on a disk
	ram     string // on a tmpfs
	raw     string // for raw output; empty: it is not kept
	lab     *lab.Lab
	targets []*target
	skipped []string // and why
	ciphers map[string]string
	stops   []func()
}

// openSite makes the folders, that for disks below work, and a lab.
func openSite(work, raw string, c settings, p *plan) (s *site, err error) {
	s = &site{settings: c, plan: p, raw: raw, ciphers: map[string]string{}}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.dir, err = s.folder(work); err != nil {
		return s, err
	}
	if s.ram, err = s.folder("/dev/shm"); err != nil {
		return s, fmt.Errorf("folder in memory: %w", err)
	}
	if s.lab, err = lab.Open(); err != nil {
		return s, err
	}
	s.stops = append(s.stops, func() { s.lab.Close() })
	return s, nil
}

// folder makes one that ends with the site.
func (s *site) folder(parent string) (string, error) {
	dir, err := os.MkdirTemp(parent, "rnbd-bench-")
	if err == nil {
		s.stops = append(s.stops, func() { os.RemoveAll(dir) })
	}
	return dir, err
}

// close ends everything, the latest first.
func (s *site) close() {
	for i := len(s.stops) - 1; i >= 0; i-- {
		s.stops[i]()
	}
	s.stops = nil
}

func (s *site) skip(what string, err error) {
	s.skipped = append(s.skipped, fmt.Sprintf("%s: %v", what, err))
}

// try leaves out a target that does not work, with the reason.
func (s *site) try(what string, err error) {
	if err != nil {
		s.skip(what, err)
	}
}

// have reports whether tools are there; if not, it notes what as left out.
func (s *site) have(what string, tools ...string) bool {
	for _, t := range tools {
		if _, err := exec.LookPath(t); err != nil {
			s.skip(what, err)
			return false
		}
	}
	return true
}

// wants reports whether the plan has one of targets.
func (s *site) wants(targets ...string) bool { return s.plan.wants(targets...) }

// addFio adds a target that fio reaches with engine, its arguments.
func (s *site) addFio(name string, engine []string, servers ...int) *target {
	t := &target{name: name, servers: servers,
		run: func(ctx context.Context, w workload, d time.Duration) (sample, error) {
			return runFio(ctx, engine, s.Size, w, d)
		}}
	s.targets = append(s.targets, t)
	return t
}

// addGenerator adds a target that `rnbd bench` reaches: its first device, or as many
// of them as the workload says.
func (s *site) addGenerator(name string, c generatorConfig, servers ...int) (*generator, *target, error) {
	g, err := startGenerator(c, lab.MetricsEnv(s.metrics()))
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	s.stops = append(s.stops, g.stop)
	t := &target{name: name, servers: servers,
		run: func(_ context.Context, w workload, d time.Duration) (sample, error) { return g.run(w, d) }}
	s.targets = append(s.targets, t)
	return g, t, nil
}

// addOurs is addGenerator for targets of ours, with devices of size bytes: they are
// filled, counted and verified.
func (s *site) addOurs(name string, c generatorConfig, size int64, servers ...int) (*generator, *target, error) {
	g, t, err := s.addGenerator(name, c, servers...)
	if err != nil {
		return nil, nil, err
	}
	if err := g.fill(); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	t.generator = g.pid()
	t.verify = func(_ context.Context, w workload, d time.Duration) error { return g.verify(w, size, d) }
	return g, t, nil
}

// metrics is where processes of ours write theirs.
func (s *site) metrics() string { return filepath.Join(s.ram, "metrics") }

// disk makes a filled file on the disk.
func (s *site) disk(name string) (string, error) {
	path := filepath.Join(s.dir, name)
	return path, fillFile(path, s.Size)
}

// tmpfs makes a filled file in memory.
func (s *site) tmpfs(name string) (string, error) {
	path := filepath.Join(s.ram, name)
	return path, fillFile(path, s.Size)
}
