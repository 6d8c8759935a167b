package sim

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Result is the judgement of a run; no violations: it was good.
type Result struct {
	Violations []string
	Answers    int           // requests of users
	Length     time.Duration // of virtual time
}

// livenessTime is how long devices may take to answer once all faults have ended:
// the heartbeats, transport and pauses of a session together, twice.
const livenessTime = time.Minute

// Run runs a schedule in a bubble of its own.
func Run(t *testing.T, plan *Schedule, log *slog.Logger) (result Result) {
	var w *world
	dir := ""
	if plan.has("kill-client") {
		dir = t.TempDir()
	}
	defer watch(plan, &w)()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		begin := time.Now()
		var err error
		w, err = newWorld(ctx, plan, dir, log)
		if err != nil {
			w.violate("set-up: %v", err)
		} else {
			w.run(ctx)
		}
		w.close()
		time.Sleep(time.Minute) // for goroutines that end by themselves; the others fail the bubble
		result.Violations = w.violations
		for _, l := range w.loads {
			result.Answers += l.answers
		}
		result.Length = time.Since(begin)
	})
	return result
}

// stuckTime is how much real time a run may take. Virtual time stands still while a
// goroutine waits for a lock; one that is held over a wait stops it for good.
const stuckTime = 2 * time.Minute

// watch ends the program, with all stacks, if the run does not end.
func watch(plan *Schedule, w **world) (stop func()) {
	t := time.AfterFunc(stuckTime, func() {
		buf := make([]byte, 4<<20)
		buf = buf[:runtime.Stack(buf, true)]
		fmt.Fprintf(os.Stderr, "panic: seed %d does not end: a lock is held over a wait, or a loop never sleeps\n%v\n%s\n%s\n",
			plan.Seed, (*w).violations, blocked(string(buf)), buf)
		os.Exit(3)
	})
	return func() { t.Stop() }
}

// blocked picks the goroutines that wait for locks out of a dump.
func blocked(stacks string) string {
	var out []string
	for g := range strings.SplitSeq(stacks, "\n\n") {
		if strings.Contains(g, "Mutex") && !strings.Contains(g, "(durable)") {
			out = append(out, g)
		}
	}
	return strings.Join(out, "\n\n")
}

// run lets users work while faults happen, and judges.
func (w *world) run(ctx context.Context) {
	w.start = time.Now()
	working, endWork := context.WithCancel(ctx)
	var users, faultsUnderWay sync.WaitGroup
	for i, l := range w.loads {
		l.run(working, w.plan.Users, w.plan.Seed*1000+uint64(i), &users)
	}
	for _, f := range w.plan.Faults {
		faultsUnderWay.Go(func() {
			time.Sleep(f.At)
			w.log.Info("fault", "at", w.since(time.Now()), "what", f.String())
			end := faults[f.Kind](w, f)
			time.Sleep(f.For)
			if end != nil {
				end()
				w.log.Info("fault ends", "at", w.since(time.Now()), "what", f.String())
			}
		})
	}
	faultsUnderWay.Wait()
	time.Sleep(time.Until(w.start.Add(w.plan.Length)))
	w.heal()
	w.log.Info("all faults have ended", "at", w.since(time.Now()))
	endWork()
	w.judgeLiveness(ctx, &users)
	endWork()
}

// heal undoes the remaining effects of faults: servers that are down come back.
func (w *world) heal() {
	w.client.start.set(0, 0)
	w.client.restartClient()
	for _, h := range w.servers {
		h.start.set(0, 0)
		h.restart()
		w.addMissingPaths(h)
	}
}

// addMissingPaths brings back paths that were removed and could not be added again.
func (w *world) addMissingPaths(h *host) {
	for i, a := range h.addrs {
		add := &controlpb.AddPathRequest{Session: h.name, Path: w.path(h, i)}
		for range 10 {
			if slices.ContainsFunc(w.paths(h.name), func(p *controlpb.Path) bool {
				dst, err := netip.ParseAddrPort(p.Dst)
				return err == nil && dst.Addr() == a && p.State != "dead"
			}) {
				break
			}
			w.command(func(ctx context.Context, api controlpb.ClientDaemonServer) error {
				_, err := api.AddPath(ctx, add)
				return err
			})
		}
	}
}

// judgeLiveness wants every request answered, and every device to serve.
func (w *world) judgeLiveness(ctx context.Context, users *sync.WaitGroup) {
	healed := time.Now()
	answered := make(chan struct{})
	go func() {
		users.Wait()
		for _, l := range w.loads {
			l.settle()
		}
		close(answered)
	}()
	select {
	case <-answered:
		w.log.Info("every device answers", "after", time.Since(healed))
		return
	case <-time.After(livenessTime):
	}
	for _, l := range w.loads {
		if age, op := l.oldest(); age > 0 {
			w.violate("liveness: a %s of %s has waited for %v, %v after all faults had ended", op, l.name, age.Round(time.Millisecond), livenessTime)
		}
	}
	w.describe(ctx)
	w.giveUp(ctx)
	<-answered
}

// settle works on a device until it answers, and reads all of it.
func (l *load) settle() {
	for range 3 { // the first may meet an error that belongs to a fault
		if l.probe() {
			break
		}
		time.Sleep(5 * time.Second)
	}
	l.flushLast()
	l.verify()
}

// giveUp unmaps devices by force, so that users are not left waiting.
func (w *world) giveUp(ctx context.Context) {
	for _, l := range w.loads {
		l.given.Store(true)
	}
	go func() {
		for _, l := range w.loads {
			if c, _ := w.client.daemon(); c != nil {
				_ = c.Unmap(ctx, l.name, true)
			}
			l.user.giveUp()
		}
	}()
	time.Sleep(30 * time.Second)
	for _, l := range w.loads {
		l.failPending()
	}
}

// describe logs the state of everything, for a person.
func (w *world) describe(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, api := w.client.daemon()
	if api == nil {
		return
	}
	if list, err := api.ListDevices(ctx, &controlpb.ListRequest{Brief: true}); err == nil {
		for _, d := range list.Devices {
			w.log.Info("device", "name", d.Name, "state", d.State, "inflight", d.Inflight, "error", d.LastError)
		}
	}
	if list, err := api.ListSessions(ctx, &controlpb.ListRequest{}); err == nil {
		for _, s := range list.Sessions {
			for _, p := range s.Paths {
				w.log.Info("path", "session", s.Name, "state", s.State, "path", p.Name, "path state", p.State, "inflight", p.Inflight, "error", p.LastError)
			}
		}
	}
}

// pathID is the id of a fault's path as it is now.
func (w *world) pathID(f Fault) uint32 {
	want := w.servers[f.Server].addrs[f.Path]
	for _, p := range w.paths(w.servers[f.Server].name) {
		if a, err := netip.ParseAddrPort(p.Dst); err == nil && a.Addr() == want {
			return p.Id
		}
	}
	return 99
}

func (w *world) destination(ref *controlpb.PathRequest) netip.Addr {
	for _, p := range w.paths(ref.Session) {
		if a, err := netip.ParseAddrPort(p.Dst); err == nil && p.Id == ref.Id {
			return a.Addr()
		}
	}
	return netip.Addr{}
}

func (w *world) paths(session string) []*controlpb.Path {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, api := w.client.daemon()
	if api == nil {
		return nil
	}
	list, err := api.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return nil
	}
	for _, s := range list.Sessions {
		if s.Name == session {
			return s.Paths
		}
	}
	return nil
}

// Minimise returns the least of the schedule's faults that still fail, as far as
// removing one after the other finds it.
func Minimise(t *testing.T, plan *Schedule) *Schedule {
	quiet := slog.New(slog.DiscardHandler)
	least := *plan
	for i := 0; i < len(least.Faults); {
		next := least
		next.Faults = append(append([]Fault(nil), least.Faults[:i]...), least.Faults[i+1:]...)
		if len(Run(t, &next, quiet).Violations) > 0 {
			least = next
		} else {
			i++
		}
	}
	return &least
}

func (r Result) String() string {
	return fmt.Sprintf("%d answers in %v\n  %s", r.Answers, r.Length.Round(time.Millisecond), strings.Join(r.Violations, "\n  "))
}
