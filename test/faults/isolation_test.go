package faults

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// runner is the user of one device: it keeps requests in flight until stop reports
// true and they have ended, and returns how long each took.
type runner interface {
	run(stop func() bool) []time.Duration
}

// nbdUser is a user through the NBD front end.
type nbdUser struct {
	t     *testing.T
	nbd   *nbdclient.Client
	depth int
}

func (u *nbdUser) run(stop func() bool) (took []time.Duration) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range u.depth {
		wg.Go(func() {
			buf := make([]byte, 4096)
			for first := true; first || !stop(); first = false {
				begin, off := time.Now(), rand.Int64N(u.nbd.Size()/4096)*4096
				var err error
				if rand.IntN(2) == 0 {
					_, err = u.nbd.WriteAt(buf, off)
				} else {
					_, err = u.nbd.ReadAt(buf, off)
				}
				if err != nil {
					u.t.Errorf("request of an NBD client: %v", err)
					return
				}
				mu.Lock()
				took = append(took, time.Since(begin))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return took
}

// The requests in flight: more on the disk that hangs than it may have of the plugin.
const (
	stuckDepth   = 64
	healthyDepth = 4
)

// A disk that hangs costs its own device only: the 15 others of its session go on.
// They keep at least half of their requests per second here, where other programs
// take the processors away too, in one of some measurements; make bench measures by
// how much less it may be.
func TestADiskThatHangsLeavesTheOtherFifteen(t *testing.T) {
	for _, tt := range []struct{ store, engine, by string }{
		{"fileio", "uring", "library"}, {"fileio", "threads", "library"}, {"fileio", "uring", "NBD"},
		{"blockio", "uring", "library"}, {"blockio", "threads", "library"}, {"blockio", "threads", "NBD"},
	} {
		t.Run(fmt.Sprintf("%s with %s, %s", tt.store, tt.engine, tt.by), func(t *testing.T) {
			if err := uring.Supported(); tt.engine == "uring" && err != nil {
				t.Skipf("no io_uring here: %v", err)
			}
			hung := slowdisk.New(t, 1<<20)
			search, names := sixteen(t, tt.store, hung)
			l := lab.New(t) // ends before the disks
			s := l.Server(lab.ServerOptions{SearchPath: search, Plugins: []string{tt.store}, Env: []string{uring.EngineEnv + "=" + tt.engine}})
			var users []runner
			if tt.by == "library" {
				for i, u := range newUsers(t, s, names, stuckDepth) {
					if i < len(names)-1 {
						u.depth = healthyDepth
					}
					users = append(users, u)
				}
			} else {
				c := l.Client(lab.ClientOptions{})
				for _, name := range names {
					users = append(users, &nbdUser{t, mustDial(t, c, l.Map(c, name, s).Name), healthyDepth})
				}
				users[len(users)-1].(*nbdUser).depth = stuckDepth
			}
			judgeIsolation(t, users[:15], users[15], hung)
		})
	}
}

// sixteen makes the disks; the last one is hung.
func sixteen(t *testing.T, store string, hung *slowdisk.Disk) (search string, names []string) {
	t.Helper()
	dir := t.TempDir()
	for i := range 15 {
		path := filepath.Join(dir, fmt.Sprintf("disk%d", i))
		if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		names = append(names, path)
	}
	if store == "fileio" {
		for i := range names {
			names[i] = strings.TrimPrefix(names[i], "/")
		}
		return "/", append(names, strings.TrimPrefix(hung.Path(), "/"))
	}
	for i := range names {
		names[i] = slowdisk.Attach(t, names[i])
	}
	return "", append(names, hung.Loop())
}

// judgeIsolation measures the healthy users with and without the hang, in turn.
func judgeIsolation(t *testing.T, healthy []runner, stuck runner, hung *slowdisk.Disk) {
	const slice = 100 * time.Millisecond
	together(healthy, after(slice)) // warm up
	for try := 1; ; try++ {
		var alone, beside []time.Duration
		for range 3 {
			alone = append(alone, flat(together(healthy, after(slice)))...)
			hung.HoldReads()
			hung.HoldWrites()
			var quit atomic.Bool
			ended := make(chan struct{})
			go func() { stuck.run(quit.Load); close(ended) }()
			settled(hung)
			took := together(healthy, after(slice))
			quit.Store(true)
			if len(ended) > 0 || hung.Held() == 0 {
				t.Error("the disk did not hang to the end")
			}
			hung.Release()
			<-ended
			for i, d := range took {
				if len(d) == 0 {
					t.Errorf("device %d got no answer", i)
				}
			}
			beside = append(beside, flat(took)...)
		}
		ratio := float64(len(beside)) / float64(len(alone))
		t.Logf("alone %d requests, %s; beside the hang %d, %s: %.2f", len(alone), figures(alone), len(beside), figures(beside), ratio)
		if ratio >= 0.5 {
			return
		}
		if try == 8 {
			t.Fatalf("in %d measurements the healthy devices had less than half of their requests beside a disk that hangs", try)
		}
	}
}

// settled waits until the disk holds requests, and no more of them come.
func settled(hung *slowdisk.Disk) {
	hung.WaitHeld(1)
	for before, quiet := 0, 0; quiet < 20; quiet++ {
		if now := hung.Held(); now != before {
			before, quiet = now, 0
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// together runs all users at once.
func together(users []runner, stop func() bool) [][]time.Duration {
	took := make([][]time.Duration, len(users))
	var wg sync.WaitGroup
	for i, u := range users {
		wg.Go(func() { took[i] = u.run(stop) })
	}
	wg.Wait()
	return took
}

func flat(took [][]time.Duration) []time.Duration { return slices.Concat(took...) }
