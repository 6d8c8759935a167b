package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// fallsAsleep is how often the threads of a process have gone to sleep.
func fallsAsleep(t *testing.T, pid int) (n int) {
	t.Helper()
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
		line, _, _ := strings.Cut(rest, "\n")
		k, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		n += k
	}
	return n
}

// Sessions that nobody uses cost their daemons the heartbeats of one, once a
// second: a number of wake-ups that does not grow with the sessions.
func TestIdleDaemonsSleep(t *testing.T) {
	const (
		sessions = 20
		watch    = 3 * time.Second
		most     = 10 // wake-ups a second
	)
	l := lab.New(t)
	server := l.Server(lab.ServerOptions{SearchPath: l.Dir, Plugins: []string{"memory"},
		Extra: []string{"--io-mode", "ram*=memory", "--io-config", "memory:size=1048576"}})
	client := l.Client(lab.ClientOptions{})
	for i := range sessions {
		l.Map(client, fmt.Sprint("ram", i), server, func(r *controlpb.MapRequest) { r.Session = fmt.Sprint("idle", i) })
	}
	names := []string{"server", "client"}
	var best [2]int
	for try := range 5 { // Go's runtime and a busy machine have work of their own at times
		time.Sleep(watch)
		before := [2]int{fallsAsleep(t, server.PID()), fallsAsleep(t, client.PID())}
		time.Sleep(watch)
		for i, pid := range []int{server.PID(), client.PID()} {
			n := fallsAsleep(t, pid) - before[i]
			if try == 0 || n < best[i] {
				best[i] = n
			}
		}
		if max(best[0], best[1]) <= most*int(watch/time.Second) {
			break
		}
	}
	for i, n := range best {
		t.Logf("%s: %d wake-ups in %v", names[i], n, watch)
		if limit := most * int(watch/time.Second); n > limit || n == 0 {
			t.Errorf("%s with %d idle sessions: %d wake-ups in %v, want 1 to %d", names[i], sessions, n, watch, limit)
		}
	}
}
