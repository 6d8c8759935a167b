package devices

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// testKills ends the processes of the data path by SIGKILL, one kind after the
// other, under a load that verifies. Users of the disk see a pause each time,
// and nothing else.
func testKills(t *testing.T, s *stack) {
	for _, k := range []struct {
		name  string
		kills int // in the short form
		kill  func(t *testing.T, s *stack, node string)
	}{
		{"plugin", 3, killFrontend},
		{"client", 1, killClient},
		{"server", 1, killServer},
	} {
		t.Run(k.name, func(t *testing.T) {
			d, node := s.disk(t, s.image(t, 64<<20), queueing)
			end := load(t, node, "2m")
			var pauses []time.Duration
			for range pick(k.kills, 50) {
				awaitIO(t, node)
				at := time.Now()
				k.kill(t, s, node)
				awaitIO(t, node)
				pauses = append(pauses, time.Since(at).Round(10*time.Millisecond))
			}
			end()
			eventually(t, "the disk is open at "+node, func() bool {
				now, err := s.client.Device(d.Name)
				return err == nil && now.Endpoint == node && now.State == "open"
			})
			slices.Sort(pauses)
			t.Logf("%d kills; until there was as much I/O again as may be in flight: median %s, longest %s", len(pauses), pauses[len(pauses)/2], pauses[len(pauses)-1])
		})
	}
}

// killFrontend returns when the next process is there.
func killFrontend(t *testing.T, s *stack, _ string) {
	before, err := s.client.Plugin(s.frontend)
	must(t, err)
	must(t, s.client.KillPlugin(s.frontend))
	eventually(t, "the next process", func() bool {
		p, err := s.client.Plugin(s.frontend)
		return err == nil && p.Pid != 0 && p.Pid != before.Pid
	})
}

// killClient starts the next daemon. That serves the disks again automatically.
func killClient(t *testing.T, s *stack, node string) {
	must(t, s.client.Kill())
	if _, err := os.Stat("/sys/block/" + filepath.Base(node)); err != nil {
		t.Errorf("the disk went with the daemon: %v", err)
	}
	must(t, s.client.Start())
}

func killServer(t *testing.T, s *stack, _ string) {
	must(t, s.server.Kill())
	must(t, s.server.Start())
}

// load writes and verifies size of the disk, one pass after another, until it is
// told to end. A pass that fails fails the test. A pass may take long when its
// disk is away for much of the time; the end of the test ends it.
func load(t *testing.T, node, size string) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			_, err := attemptIn(ctx, fio(node, "--rw=randwrite", "--bs=4k", "--size="+size)...)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				t.Errorf("users saw it: %v", err)
				return
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	end = sync.OnceFunc(func() { close(stop); <-ended })
	t.Cleanup(func() { cancel(); end() })
	return end
}

// awaitIO waits until requests that are begun now have ended: more than may be
// in flight.
func awaitIO(t *testing.T, node string) {
	t.Helper()
	begin := completed(t, node)
	eventually(t, "I/O at "+node, func() bool { return completed(t, node) > begin+64 })
}

// completed is how many requests the disk at node has ended.
func completed(t *testing.T, node string) (n int) {
	t.Helper()
	f := strings.Fields(readFile("/sys/block/" + filepath.Base(node) + "/stat"))
	if len(f) < 5 {
		t.Fatalf("%s: no statistics: %q", node, f)
	}
	for _, column := range []string{f[0], f[4]} { // reads, writes
		i, err := strconv.Atoi(column)
		must(t, err)
		n += i
	}
	return n
}
