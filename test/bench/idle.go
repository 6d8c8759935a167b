package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// idleLimit is the peer of idle daemons: the most that they may take.
const idleLimit = "limit"

// allowance is that limit: 1 % of a core and 200 MB for all processes
// together, 10 wake-ups a second for each of them.
var allowance = sample{Elapsed: 1, ServerCPU: 0.01, Resident: 200, Wakes: 10}

// idleWatch is the shortest time of an observation of idle daemons: one look of
// each watchdog.
const idleWatch = 4 * time.Second

// addIdle starts a server and a client with many sessions and devices that stay
// unused.
func (s *site) addIdle(ctx context.Context) error {
	if !s.wants(idleFleet) {
		return nil
	}
	sessions, devices := 100, 1000
	if s.Quick {
		sessions, devices = 4, 16
	}
	server, err := s.memoryServer(1<<20, lab.ServerOptions{})
	if err != nil {
		return err
	}
	client, err := s.lab.StartClient(lab.ClientOptions{Extra: []string{"--log-level", "warn"}})
	if err != nil {
		return err
	}
	for i := range devices {
		if err := ctx.Err(); err != nil {
			return err
		}
		session := "idle" + strconv.Itoa(i%sessions)
		if _, err := client.Map("ram"+strconv.Itoa(i), server, func(r *controlpb.MapRequest) { r.Session = session }); err != nil {
			return fmt.Errorf("map device %d of %d: %w", i+1, devices, err)
		}
	}
	daemons := []int{server.PID(), client.PID()}
	s.targets = append(s.targets,
		&target{name: idleFleet, servers: daemons, run: func(ctx context.Context, _ workload, d time.Duration) (sample, error) {
			return watchIdle(ctx, daemons, d)
		}},
		&target{name: idleLimit, run: func(context.Context, workload, time.Duration) (sample, error) { return allowance, nil }})
	return nil
}

// watchIdle looks at daemons and their plugins while nothing happens. Their
// CPU time is counted by the caller, as that of all servers.
func watchIdle(ctx context.Context, daemons []int, d time.Duration) (s sample, err error) {
	var pids []int
	for _, pid := range daemons {
		pids = append(append(pids, pid), lab.Children(pid)...)
	}
	before := make([]uint64, len(pids))
	for i, pid := range pids {
		before[i] = wakeUps(pid)
	}
	start := time.Now()
	select {
	case <-ctx.Done():
		return s, ctx.Err()
	case <-time.After(max(d, idleWatch)):
	}
	s.Elapsed = time.Since(start).Seconds()
	var each []idleProcess
	for i, pid := range pids {
		kb, rerr := resident(pid)
		err = errors.Join(err, rerr)
		p := idleProcess{role(pid), float64(wakeUps(pid)-before[i]) / s.Elapsed, float64(kb) * 1024 / 1e6}
		s.Wakes, s.Resident = max(s.Wakes, p.Wakes), s.Resident+p.Resident
		each = append(each, p)
	}
	s.raw, _ = json.Marshal(each) // of plain numbers
	return s, err
}

// idleProcess is the usage of one of them, for the raw output.
type idleProcess struct {
	Process  string  `json:"process"`
	Wakes    float64 `json:"wakes_per_s"`
	Resident float64 `json:"resident_mb"`
}

// wakeUps counts how often threads of a process have gone to sleep.
func wakeUps(pid int) (sum uint64) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, task := range tasks {
		n, _ := field(task, "voluntary_ctxt_switches:")
		sum += n
	}
	return sum
}

// resident is the memory of a process in KiB; memory shared with others
// counts in part.
func resident(pid int) (uint64, error) {
	return field(fmt.Sprintf("/proc/%d/smaps_rollup", pid), "Pss:")
}

// field reads the number behind a name at the beginning of a line.
func field(path, name string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strconv.ParseUint(strings.Fields(rest)[0], 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, name)
}
