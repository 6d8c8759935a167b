package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
	"github.com/rnbd-go/rnbd/test/lab"
)

// metric asks a running process for one of its metrics.
func metric(t *testing.T, path string, pid int, name string) int64 {
	t.Helper()
	path += "." + strconv.Itoa(pid)
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	var text []byte
	eventually(t, "process "+strconv.Itoa(pid)+" writes its metrics", func() (ok bool) {
		var err error
		text, err = os.ReadFile(path)
		return err == nil
	})
	for line := range strings.Lines(string(text)) {
		if k, v, _ := strings.Cut(strings.TrimSpace(line), " "); k == name {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// TestDataPathAllocatesNothing counts the objects that the four processes put
// on their heaps over many requests.
func TestDataPathAllocatesNothing(t *testing.T) {
	requests := 200_000
	if long() {
		requests = 1_000_000
	}
	const bound = 1000 // whatever the number: what is not per request, as timers
	stats := filepath.Join(t.TempDir(), "stats")
	env := []string{selfstats.FileEnv + "=" + stats}
	r := newRig(t, rigOptions{size: 64 << 20, server: lab.ServerOptions{Env: env}, client: lab.ClientOptions{Env: env}})
	load := func(uri string, n int) {
		t.Helper()
		run(t, "fio", "--name=allocs", "--ioengine=nbd", "--uri="+uri, "--rw=randrw", "--bs=4k", "--iodepth=32",
			"--size=64m", "--norandommap", fmt.Sprintf("--io_size=%d", n*4096))
	}
	load(r.unixURI(), 2000) // buffers and pools are filled
	pids, before := r.pids(), map[string]int64{}
	const name = "/gc/heap/allocs:objects"
	for role, pid := range pids {
		before[role] = metric(t, stats, pid, name)
	}
	start := time.Now()
	load(r.unixURI(), requests)
	t.Logf("%d requests in %v", requests, time.Since(start).Round(time.Millisecond))
	for role, pid := range pids {
		grown := metric(t, stats, pid, name) - before[role]
		t.Logf("%-13s %d objects", role, grown)
		if grown >= bound {
			t.Errorf("%s allocated %d objects over %d requests, want less than %d", role, grown, requests, bound)
		}
	}
}
