package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// The classes: only targets of one class are compared with one another.
const (
	classRAM    = "RAM"
	classCached = "file, cached"
	classDirect = "file, direct"
)

// target is something that is measured.
type target struct {
	name    string
	class   string
	servers []int // processes that take part, without the load generator
	run     func(context.Context, workload, time.Duration) (sample, error)
}

// site holds everything that runs on behalf of a benchmark.
type site struct {
	exe     string // this program
	dir     string // on a disk
	ram     string // on a tmpfs
	size    int64  // of each device, bytes
	targets []*target
	skipped []string // and why
	stops   []func()
}

// openSite makes the folders. The one for disks is below work.
func openSite(work string, size int64) (*site, error) {
	s := &site{size: size}
	var err error
	if s.exe, err = os.Executable(); err != nil {
		return nil, err
	}
	if s.dir, err = os.MkdirTemp(work, "rnbd-bench-"); err != nil {
		return nil, err
	}
	s.stops = append(s.stops, func() { os.RemoveAll(s.dir) })
	if s.ram, err = os.MkdirTemp("/dev/shm", "rnbd-bench-"); err != nil {
		s.close()
		return nil, fmt.Errorf("folder in memory: %w", err)
	}
	s.stops = append(s.stops, func() { os.RemoveAll(s.ram) })
	return s, nil
}

// close ends everything, what was started last first.
func (s *site) close() {
	for i := len(s.stops) - 1; i >= 0; i-- {
		s.stops[i]()
	}
	s.stops = nil
}

func (s *site) skip(what string, err error) {
	s.skipped = append(s.skipped, fmt.Sprintf("%s: %v", what, err))
}

// have tells whether tools are there; if not, what is left out.
func (s *site) have(what string, tools ...string) bool {
	for _, t := range tools {
		if _, err := exec.LookPath(t); err != nil {
			s.skip(what, err)
			return false
		}
	}
	return true
}

// addFio adds a target that fio reaches at uri.
func (s *site) addFio(class, name, uri string, servers ...int) {
	s.targets = append(s.targets, &target{name: name, class: class, servers: servers,
		run: func(ctx context.Context, w workload, d time.Duration) (sample, error) {
			return runFio(ctx, uri, s.size, w, d)
		}})
}

// addWorker adds a target that a worker reaches.
func (s *site) addWorker(class, name string, c workerConfig, servers ...int) error {
	w, err := startWorker(s.exe, c)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	s.stops = append(s.stops, w.stop)
	if c.kind == "rnbd" {
		if err := w.fill(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	s.targets = append(s.targets, &target{name: name, class: class, servers: servers,
		run: func(_ context.Context, l workload, d time.Duration) (sample, error) { return w.run(l, d) }})
	return nil
}

// disk makes a filled file on the disk.
func (s *site) disk(name string) (string, error) {
	path := filepath.Join(s.dir, name)
	return path, fillFile(path, s.size)
}

// tmpfs makes a filled file in memory.
func (s *site) tmpfs(name string) (string, error) {
	path := filepath.Join(s.ram, name)
	return path, fillFile(path, s.size)
}
