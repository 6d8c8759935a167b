package lab

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Usage is the resources of a process at one moment.
type Usage struct {
	Anonymous   int // bytes of private memory that is resident
	Heap        int // bytes that the last garbage collection found in use
	Goroutines  int
	Threads     int
	Descriptors int
	Mappings    int // lines of /proc/PID/maps
}

func (u Usage) String() string {
	return fmt.Sprintf("%d KiB resident, %d KiB of heap, %d goroutines, %d threads, %d descriptors, %d mappings",
		u.Anonymous>>10, u.Heap>>10, u.Goroutines, u.Threads, u.Descriptors, u.Mappings)
}

// UsageOf returns the resources of a process that was started with
// MetricsEnv(path). See Metrics.
func UsageOf(path string, pid int) (Usage, error) {
	m, err := Metrics(path, pid)
	if err != nil {
		return Usage{}, err
	}
	u := Usage{
		Heap:       int(m["/gc/heap/live:bytes"]),
		Goroutines: int(m["/sched/goroutines:goroutines"]),
	}
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return Usage{}, fmt.Errorf("count descriptors: %w", err)
	}
	maps, err := os.ReadFile(filepath.Join(proc, "maps"))
	if err != nil {
		return Usage{}, fmt.Errorf("count mappings: %w", err)
	}
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		return Usage{}, fmt.Errorf("read status: %w", err)
	}
	u.Descriptors, u.Mappings = len(fds), bytes.Count(maps, []byte("\n"))
	u.Anonymous, u.Threads = statusField(string(status), "RssAnon")<<10, statusField(string(status), "Threads")
	return u, nil
}

// statusField returns the number behind "name:" in a /proc/PID/status, -1 if
// there is none.
func statusField(status, name string) int {
	for line := range strings.Lines(status) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				if n, err := strconv.Atoi(f[0]); err == nil {
					return n
				}
			}
		}
	}
	return -1
}
