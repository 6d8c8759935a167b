package kernelvm

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// eventually waits until a condition holds, and ends the test after a limit.
var eventually = sdktest.Within

// A link is cut while both kinds of session work over two paths: the kernel's client
// with our server and ours with the kernel's server, each beside a session that is
// idle on the other link. Requests under way go over the other path, nothing is lost or
// written late, the path comes back with the link, and the idle sessions live on
// heartbeats alone for longer than they would without.
func TestLinkLossAndIdle(t *testing.T) {
	for _, col := range columns {
		if !col.cuts {
			continue
		}
		t.Run(col.fabric, func(t *testing.T) {
			var all []*lossy
			for _, pair := range [][2]side{{kernel, ours}, {ours, kernel}} {
				all = append(all, startLossy(t, cell{column: col, from: pair[0], to: pair[1], invalidate: true}))
			}
			begin := time.Now()
			time.Sleep(3 * time.Second)
			g := all[0].b.g
			if err := g.CutLink(0, true); err != nil {
				t.Fatal(err)
			}
			defer g.CutLink(0, false)
			for _, l := range all { // Linux notices after 6 to 7 heartbeats of 5 s
				eventually(t, 90*time.Second, l.b.String()+": one path is lost", func() bool { return l.connected() == 1 })
			}
			time.Sleep(2 * time.Second)
			if err := g.CutLink(0, false); err != nil {
				t.Fatal(err)
			}
			for _, l := range all { // after 30 s for the dead peer and 31 s of pause
				eventually(t, 120*time.Second, l.b.String()+": both paths are back", func() bool { return l.connected() == 2 })
			}
			if rest := 45*time.Second - time.Since(begin); rest > 0 {
				time.Sleep(rest)
			}
			endAll(t, all)
		})
	}
}

// lossy is a bench with one session that works on two links, and an idle one.
type lossy struct {
	b          *bench
	t          testing.TB
	busy, idle disk
	work       process
	silence    func() time.Duration // the guest's longest
}

func startLossy(t testing.TB, c cell) *lossy {
	t.Helper()
	return lossyOn(t, c.set(t))
}

func lossyOn(t testing.TB, b *bench) *lossy {
	t.Helper()
	l := &lossy{b: b, t: t, silence: watchSilence(t, b.g)}
	l.busy = l.b.mapDisk(t, "rw", 0, fast)
	idle := l.b.mapping("ro", fast)
	idle.session = "idle"
	var err error
	if l.idle, err = l.b.c.Map(t.Context(), idle); err != nil {
		t.Fatalf("map the idle one: %v", err)
	}
	l.work = l.b.c.StartExercise(t, l.busy, "--until-stopped")
	return l
}

// watchSilence measures until the end of the test how long the guest does not answer.
func watchSilence(t testing.TB, g *vm.Guest) (longest func() time.Duration) {
	var most atomic.Int64
	go func() {
		for t.Context().Err() == nil {
			begin := time.Now()
			_, _ = g.Read("/proc/uptime")
			most.Store(max(most.Load(), int64(time.Since(begin))))
			time.Sleep(200 * time.Millisecond)
		}
	}()
	return func() time.Duration { return time.Duration(most.Load()) }
}

// connected counts the paths of the busy session.
func (l *lossy) connected() int { return l.b.connected(l.t) }

// endAll ends the work of all before it looks at any: to stop, each reads its disk.
func endAll(t *testing.T, all []*lossy) {
	for _, l := range all {
		l.work.Terminate()
	}
	for _, l := range all {
		l.end(t)
	}
}

func (l *lossy) end(t *testing.T) {
	if err := l.work.Wait(3 * time.Minute); err != nil {
		l.report()("%s: %v", l.b, err)
	}
	t.Logf("%s: %s", l.b, strings.TrimSpace(l.work.Output()))
	l.checkIdle(t)
	l.b.c.Unmap(t, l.busy)
	l.b.c.Unmap(t, l.idle)
}

// checkIdle: the idle path was never lost.
func (l *lossy) checkIdle(t *testing.T) {
	s, n := l.b.c.Paths(t, "idle"), l.b.c.Reconnects(t, "idle")
	if len(s) == 1 && s[0] == "connected" && n == 0 {
		return
	}
	l.report()("%s: the idle session has paths %v, and was reconnected %d times; the guest was silent for %s at most", l.b, s, n, l.silence())
}

// report reports a failure, unless the guest was silent for so long that a path
// may be lost: 4 s; half of that as measured, since the measure is coarse.
func (l *lossy) report() func(format string, args ...any) {
	if l.silence() > 2*time.Second {
		return l.t.Logf
	}
	return l.t.Errorf
}

// The server goes away in order and comes back: the device is closed meanwhile and
// open again afterwards, without being mapped anew, and has its data.
func TestServerRestart(t *testing.T) {
	for _, col := range columns {
		for _, pair := range [][2]side{{kernel, ours}, {ours, kernel}} {
			// Here our client does not wait for a path, and with always_invalidate a
			// kernel server may lose one: see ourClient.Map.
			c := cell{column: col, from: pair[0], to: pair[1], invalidate: pair[1] == ours}
			t.Run(c.String(), func(t *testing.T) { restart(t, c.set(t)) })
		}
	}
}

func restart(t *testing.T, b *bench) {
	m := b.mapping("rw", 0, fast)
	m.loss = "fail"
	d := b.mustMap(t, m)
	if _, err := b.c.Exercise(t.Context(), d, "--for", "1s"); err != nil {
		t.Fatal(err)
	}
	sum := b.s.Sum(t)
	b.s.Stop(t)
	eventually(t, 60*time.Second, "device is closed", func() bool { return b.c.State(t, d) == "closed" })
	if _, err := b.c.Exercise(t.Context(), d, "--read"); err == nil {
		t.Error("a closed device can be read")
	}
	b.s.Start(t)
	for path := range 2 {
		eventually(t, 90*time.Second, "path is reconnected", func() bool {
			return b.c.TryReconnect(t, "s", path) == nil || b.c.Paths(t, "s")[path] == "connected"
		})
	}
	eventually(t, 90*time.Second, "device is open", func() bool { return b.c.State(t, d) == "open" })
	got, err := b.c.Exercise(t.Context(), d, "--read")
	if strings.TrimSpace(got) != sum || err != nil {
		t.Errorf("after the restart the sum is %s, error %v; before it was %s", got, err, sum)
	}
	if _, err := b.c.Exercise(t.Context(), d, "--for", "1s"); err != nil {
		t.Error(err)
	}
	b.c.Unmap(t, d)
}
