package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/syscalls"
)

// cost is the counted cost of one I/O on a path of ours: system calls,
// objects on the heap and copies of payload, in all processes of both hosts
// but fio.
type cost struct {
	Path     string                     `json:"path"`
	Workload string                     `json:"workload"`
	IOs      uint64                     `json:"ios"`
	Calls    map[string]syscalls.Counts `json:"calls,omitempty"` // by process; nil: they cannot be counted here
	CallsIO  float64                    `json:"calls_per_io"`
	Objects  map[string]float64         `json:"objects_per_io"`   // by process
	Copies   map[string]float64         `json:"copies_of_a_byte"` // by process, of those that copy
	without  error                      // why there are no calls
}

// waiting are calls that pass time: an idle pump yields, the monitor of the Go
// runtime sleeps. They are shown, and not in the sum.
var waiting = []string{"sched_yield", "nanosleep", "clock_nanosleep"}

// countTime is how long is counted: some thousand I/Os.
const countTime = 400 * time.Millisecond

// countedLoads are small requests at depth and large ones.
var countedLoads = []workload{random(true, 32, 1), random(false, 32, 1), sequential(true), sequential(false)}

// countAll counts the costs of the library and the front end.
func (s *site) countAll(ctx context.Context) (all []cost, err error) {
	for _, t := range s.targets {
		if t.name != direct && t.name != frontEnd {
			continue
		}
		loads := countedLoads
		if s.Quick {
			loads = loads[:1]
		}
		costs, err := s.countLoads(ctx, t, loads)
		if all = append(all, costs...); err != nil {
			return all, err
		}
	}
	return all, nil
}

func (s *site) countLoads(ctx context.Context, t *target, loads []workload) (all []cost, err error) {
	pids := t.processes()
	calls, without := watchCalls(pids)
	defer calls.close()
	for _, w := range loads {
		c, err := s.count(ctx, t, w, pids, calls)
		if err != nil {
			return all, fmt.Errorf("%s, %s: %w", t.name, w.Name, err)
		}
		c.without = without
		all = append(all, c)
	}
	return all, nil
}

// count runs w on a target of ours and counts.
func (s *site) count(ctx context.Context, t *target, w workload, pids map[string]int, calls watched) (cost, error) {
	c := cost{Path: t.name, Workload: w.Name, Objects: map[string]float64{}, Copies: map[string]float64{}}
	// The short run has the costs that do not depend on its length, too:
	// reports of metrics and connections of fio.
	brief, err := s.counted(ctx, t, w, countTime/10, pids, calls)
	if err != nil {
		return c, err
	}
	full, err := s.counted(ctx, t, w, countTime, pids, calls)
	if err != nil {
		return c, err
	}
	if full.ios <= brief.ios {
		return c, fmt.Errorf("%d I/Os in %v, and %d in %v: the machine is too busy to count", brief.ios, countTime/10, full.ios, countTime)
	}
	c.IOs = full.ios
	if calls != nil {
		c.Calls = full.calls
	}
	for role := range pids {
		c.CallsIO += float64(full.calls[role].Sum(waiting...)) / float64(full.ios)
		n := float64(full.ios - brief.ios)
		c.Objects[role] = max(0, full.objects[role]-brief.objects[role]) / n
		if copied := (full.copied[role] - brief.copied[role]) / n / float64(w.Block); copied > 0 {
			c.Copies[role] = copied
		}
	}
	return c, nil
}

// counts are the counters of a run, by process.
type counts struct {
	ios             uint64
	calls           map[string]syscalls.Counts
	objects, copied map[string]float64
}

func (s *site) counted(ctx context.Context, t *target, w workload, d time.Duration, pids map[string]int, calls watched) (c counts, err error) {
	before, err := s.reports(pids)
	if err != nil {
		return c, err
	}
	if err := calls.read(); err != nil {
		return c, err
	}
	m, err := t.run(ctx, w, d)
	if err != nil {
		return c, err
	}
	if c.calls, err = calls.since(); err != nil {
		return c, err
	}
	after, err := s.reports(pids)
	if err != nil {
		return c, err
	}
	c.ios, c.objects, c.copied = m.IOs, map[string]float64{}, map[string]float64{}
	for role := range pids {
		c.objects[role] = after[role]["/gc/heap/allocs:objects"] - before[role]["/gc/heap/allocs:objects"]
		c.copied[role] = after[role][selfstats.PayloadCopied] - before[role][selfstats.PayloadCopied]
	}
	return c, nil
}

// reports asks every process for its metrics.
func (s *site) reports(pids map[string]int) (map[string]map[string]float64, error) {
	all := map[string]map[string]float64{}
	for role, pid := range pids {
		var err error
		if all[role], err = lab.Metrics(s.metrics(), pid); err != nil {
			return nil, fmt.Errorf("%s: %w", role, err)
		}
	}
	return all, nil
}

// watched are processes with counted system calls, by role.
type watched map[string]*watch

type watch struct {
	counter *syscalls.Counter
	before  syscalls.Counts
}

func watchCalls(pids map[string]int) (watched, error) {
	all := watched{}
	for role, pid := range pids {
		counter, err := syscalls.Watch(pid)
		if err != nil {
			all.close()
			return nil, fmt.Errorf("%s: %w", role, err)
		}
		all[role] = &watch{counter: counter}
	}
	return all, nil
}

func (all watched) read() (err error) {
	for _, w := range all {
		var rerr error
		w.before, rerr = w.counter.Read()
		err = errors.Join(err, rerr)
	}
	return err
}

// since returns the calls since read.
func (all watched) since() (map[string]syscalls.Counts, error) {
	calls := map[string]syscalls.Counts{}
	for role, w := range all {
		now, err := w.counter.Read()
		if err != nil {
			return nil, err
		}
		calls[role] = now.Sub(w.before)
	}
	return calls, nil
}

func (all watched) close() {
	for _, w := range all {
		w.counter.Close()
	}
}

// processes are ours, by role; those that have no part in the I/O are left
// out.
func (t *target) processes() map[string]int {
	pids := map[string]int{}
	for _, pid := range t.servers {
		for _, p := range append(lab.Children(pid), pid) {
			if name := role(p); name != "frontend-ublk" {
				pids[name] = p
			}
		}
	}
	if t.generator != 0 {
		pids["application"] = t.generator
	}
	return pids
}

// role names a process of ours: a daemon by the command that runs it, a plugin
// by its program.
func role(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	argv := strings.Split(string(b), "\x00")
	if name := filepath.Base(argv[0]); name != "rnbd" || len(argv) < 2 {
		return name
	}
	return argv[1]
}
