package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// usage is the resources of a process.
type usage struct{ memory, descriptors, goroutines float64 }

// TestNothingGrowsUnderLoad compares the resources of each process early in a
// run at full load with those at the end: 30 minutes in the long form.
func TestNothingGrowsUnderLoad(t *testing.T) {
	length, samples, slack := 15*time.Second, 30, 3.
	if long() {
		length, samples, slack = 30*time.Minute, 180, 1
	}
	stats := filepath.Join(t.TempDir(), "stats")
	env := []string{lab.MetricsEnv(stats)}
	r := newRig(t, rigOptions{size: 256 << 20, server: lab.ServerOptions{Env: env}, client: lab.ClientOptions{Env: env}})
	for _, load := range [][]string{
		{"--rw=randrw", "--bs=4k", "--iodepth=32", "--numjobs=2", "--offset=128m", "--size=128m"},
		{"--rw=rw", "--bs=1m", "--iodepth=4", "--size=128m"},
	} {
		r.loadFor(length, load...)
	}
	eventually(t, "fio's jobs are connected", func() bool {
		d, err := r.client.Device(r.device.Name)
		return err == nil && d.Openers == 3
	})
	seen := map[string][]usage{}
	for range samples {
		time.Sleep(length / time.Duration(samples+1))
		for role, pid := range r.pids() {
			seen[role] = append(seen[role], usageOf(t, stats, pid))
		}
	}
	for role, all := range seen {
		early, late := typical(all[samples/4:samples/2]), typical(all[samples*3/4:])
		t.Logf("%-13s anonymous memory %.1f, then %.1f MiB; %g, then %g descriptors; %g, then %g goroutines", role,
			early.memory, late.memory, early.descriptors, late.descriptors, early.goroutines, late.goroutines)
		if late.memory > 1.05*early.memory+slack || late.descriptors > early.descriptors || late.goroutines > early.goroutines+1 {
			t.Errorf("%s grows", role)
		}
	}
}

// loadFor starts fio on the device; the end of the test waits for it.
func (r *rig) loadFor(length time.Duration, args ...string) {
	r.t.Helper()
	cmd := exec.Command(lab.Tool(r.t, "fio"), append([]string{"--name=load", "--ioengine=nbd", "--uri=" + r.unixURI(), "--thread",
		"--norandommap", "--time_based", fmt.Sprintf("--runtime=%d", int(length.Seconds())+1)}, args...)...)
	out := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := cmd.Wait(); err != nil {
			r.t.Errorf("fio: %v: %s", err, out)
		}
	})
}

// usageOf looks at a process that was started with the metrics of path.
func usageOf(t *testing.T, path string, pid int) (u usage) {
	t.Helper()
	m, err := lab.Metrics(path, pid)
	if err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(status), "RssAnon:")
	kib, err := strconv.ParseFloat(strings.Fields(after + " none")[0], 64)
	if err != nil {
		t.Fatalf("memory of process %d: %v", pid, err)
	}
	return usage{kib / 1024, float64(len(fds)), m["/sched/goroutines:goroutines"]}
}

// typical is the median of each figure.
func typical(all []usage) usage {
	median := func(of func(usage) float64) float64 {
		v := make([]float64, len(all))
		for i := range all {
			v[i] = of(all[i])
		}
		slices.Sort(v)
		return v[len(v)/2]
	}
	return usage{
		median(func(u usage) float64 { return u.memory }),
		median(func(u usage) float64 { return u.descriptors }),
		median(func(u usage) float64 { return u.goroutines }),
	}
}
