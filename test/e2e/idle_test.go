package e2e

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// fallsAsleep is how often the threads of a Go program have gone to sleep, but
// for its second: the runtime's monitor, which runs beside the first and sleeps
// for some 20 us at a time while any other works. So it counts how long the
// work takes, which a busy machine decides.
func fallsAsleep(t *testing.T, pid int) (n int) {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	byAge := slices.SortedFunc(slices.Values(tasks), func(a, b os.DirEntry) int {
		return cmp.Or(cmp.Compare(len(a.Name()), len(b.Name())), cmp.Compare(a.Name(), b.Name()))
	})
	for _, task := range slices.Delete(byAge, 1, 2) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", pid, task.Name()))
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
		most     = 15 // wake-ups a second; one for each session would be 20
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
