package e2e

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestDataPathAllocatesNothing counts the objects that the four processes put
// on their heaps over many requests.
func TestDataPathAllocatesNothing(t *testing.T) {
	requests := 20_000
	if long() {
		requests = 1_000_000
	}
	const bound = 1000 // whatever the number: what is not per request, as timers
	stats := filepath.Join(t.TempDir(), "stats")
	env := []string{lab.MetricsEnv(stats)}
	r := newRig(t, rigOptions{size: 64 << 20, server: lab.ServerOptions{Env: env}, client: lab.ClientOptions{Env: env}})
	load := func(uri string, n int) {
		t.Helper()
		run(t, "fio", "--name=allocs", "--ioengine=nbd", "--uri="+uri, "--rw=randrw", "--bs=4k", "--iodepth=32",
			"--size=64m", "--norandommap", fmt.Sprintf("--io_size=%d", n*4096))
	}
	objects := func(pid int) int64 {
		t.Helper()
		m, err := lab.Metrics(stats, pid)
		if err != nil {
			t.Fatal(err)
		}
		n, ok := m["/gc/heap/allocs:objects"]
		if !ok {
			t.Fatal("the metrics have no number of objects")
		}
		return int64(n)
	}
	load(r.unixURI(), 2000) // buffers and pools are filled
	pids, before := r.pids(), map[string]int64{}
	for role, pid := range pids {
		before[role] = objects(pid)
	}
	start := time.Now()
	load(r.unixURI(), requests)
	t.Logf("%d requests in %v", requests, time.Since(start).Round(time.Millisecond))
	for role, pid := range pids {
		grown := objects(pid) - before[role]
		t.Logf("%-13s %d objects", role, grown)
		if grown >= bound {
			t.Errorf("%s allocated %d objects over %d requests, want less than %d", role, grown, requests, bound)
		}
	}
}
