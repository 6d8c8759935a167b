package watchdog

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
)

func TestCountsByStageAndErrno(t *testing.T) {
	var a, b Failures
	var c Counts
	c.Add(&a)
	if c.Sum() != 0 || c.List() != nil {
		t.Errorf("an empty one has %v", c.List())
	}
	a.Count(Wire, blk.EIO)
	b.Count(Wire, blk.EIO)
	b.Count(Check, blk.EINVAL)
	b.Count(Check, 500) // of a peer
	b.Count(Check, 77)
	c.Add(&a)
	c.Add(&b)
	want := []Count{{"check", "other", 2}, {"check", "EINVAL", 1}, {"wire", "EIO", 2}}
	got := c.List()
	if len(got) != len(want) || c.Sum() != 5 {
		t.Fatalf("%v, sum %d", got, c.Sum())
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%v, want %v", got[i], want[i])
		}
	}
}

// Failures pass from a pump to a reader in order; those without room are
// dropped.
func TestRecentPassesFailures(t *testing.T) {
	var r Recent[string]
	for i := range recent + 3 {
		r.Add(Failure[string]{Device: "d", Offset: uint64(i)})
	}
	n := uint64(0)
	r.Take(func(f Failure[string]) {
		if f.Offset != n || f.Device != "d" {
			t.Errorf("%v is the %dth", f, n)
		}
		n++
	})
	if n != recent {
		t.Errorf("%d failures", n)
	}
	r.Take(func(f Failure[string]) { t.Errorf("%v again", f) })
	var pump sync.WaitGroup
	pump.Go(func() {
		for i := range 1000 {
			r.Add(Failure[string]{Offset: uint64(i)})
		}
	})
	last := -1
	for range 100 {
		r.Take(func(f Failure[string]) {
			if int(f.Offset) <= last {
				t.Errorf("%d after %d", f.Offset, last)
			}
			last = int(f.Offset)
		})
	}
	pump.Wait()
}

func TestAllocCountingAllocatesOnce(t *testing.T) {
	var f Failures
	var r Recent[*int]
	f.Count(Wire, blk.EIO)
	if n := testing.AllocsPerRun(100, func() {
		f.Count(Wire, blk.EIO)
		r.Add(Failure[*int]{})
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestMergeJoinsGroups(t *testing.T) {
	var all []Hung
	all = Merge(all, Hung{Device: "a", Stage: Wire, Path: "p", Requests: 1, Oldest: 11 * time.Second, Op: "read", Offset: 1})
	all = Merge(all, Hung{Device: "a", Stage: Wire, Path: "p", Requests: 2, Oldest: 12 * time.Second, Op: "write", Offset: 2})
	all = Merge(all, Hung{Device: "a", Stage: Wire, Path: "q", Requests: 1, Oldest: 9 * time.Second})
	all = Merge(all, Hung{Device: "a", Stage: Queue, Requests: 1})
	if len(all) != 3 || all[0].Requests != 3 || all[0].Oldest != 12*time.Second || all[0].Op != "write" || all[0].Offset != 2 {
		t.Errorf("%+v", all)
	}
}

// A group is warned about when it begins, every ten minutes, and when it has
// ended; one that comes back at once goes on.
func TestReporterWarnsOfHungRequests(t *testing.T) {
	var out bytes.Buffer
	j := journal.New(100)
	events := func() (began, ended int) {
		for _, e := range j.After(0) {
			switch {
			case e.Device == "rnbd0" && e.To == "requests hang":
				began++
			case e.Device == "rnbd0" && e.From == "requests hang":
				ended++
			}
		}
		return began, ended
	}
	r := NewReporter(Config{Log: slog.New(slog.NewTextHandler(&out, nil)), Limit: 10 * time.Second, Journal: j})
	now := time.Unix(1000, 0)
	h := Hung{Device: "rnbd0", Stage: Wire, Path: "10.0.0.1:1234", Requests: 3, Oldest: 11 * time.Second, Op: "read", Offset: 4096}
	lines := func() int { return strings.Count(out.String(), "msg=") }
	for i := range 30 {
		r.Look([]Hung{h}, now.Add(time.Duration(i)*time.Second))
	}
	if began, _ := events(); lines() != 1 || began != 1 {
		t.Fatalf("%d times begun:\n%s", began, &out)
	}
	for _, want := range []string{"device=rnbd0", "requests=3", "older_than=10s", "stage=wire", "path=10.0.0.1:1234", "op=read", "offset=4096"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %s in %s", want, &out)
		}
	}
	if got := r.Now("rnbd0"); len(got) != 1 || got[0] != h || r.Now("rnbd1") != nil {
		t.Errorf("now %v", got)
	}
	now = now.Add(35 * time.Second)
	r.Look(nil, now)
	r.Look([]Hung{h}, now.Add(3*time.Second))
	if _, ended := events(); lines() != 1 || ended != 0 {
		t.Errorf("it has not ended:\n%s", &out)
	}
	r.Look([]Hung{h}, now.Add(20*time.Minute))
	if lines() != 2 {
		t.Errorf("no reminder:\n%s", &out)
	}
	r.Look(nil, now.Add(21*time.Minute))
	if began, ended := events(); lines() != 3 || began != 1 || ended != 1 || r.Now("") != nil {
		t.Errorf("no end:\n%s", &out)
	}
}

// A device that goes on failing has a line after 1, 2, 4, ... seconds; one that
// failed long ago has one at once.
func TestReporterLogsFailuresAtAPace(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	j := journal.New(100)
	r := NewReporter(Config{Log: log, Journal: j})
	f := Failure[int]{Op: blk.Write, Stage: Server, Errno: blk.ENOSPC, Len: 4096, Offset: 8192}
	now := time.Unix(1000, 0)
	if got := r.LastFailure("rnbd0", now); got != "" {
		t.Errorf("before the first failure: %s", got)
	}
	for i := range 16_000 { // a millisecond apart
		Failed(r, log, "rnbd0", f, now.Add(time.Duration(i)*time.Millisecond))
	}
	if got := len(j.After(0)); got != 5 {
		t.Errorf("%d events", got)
	}
	if got := r.LastFailure("rnbd1", now); got != "" {
		t.Errorf("of another device: %s", got)
	}
	last := now.Add(16 * time.Second)
	if got := r.LastFailure("rnbd0", last); !strings.HasPrefix(got, "write of 4096 bytes at 8192: ENOSPC, stage server, 0s ago") {
		t.Errorf("the last failure: %s", got)
	}
	if got := r.LastFailure("rnbd0", last.Add(failedLately)); got != "" {
		t.Errorf("it is never forgotten: %s", got)
	}
	if n := strings.Count(out.String(), "a request failed"); n != 5 { // at 0, 1, 3, 7, 15 s
		t.Errorf("%d lines:\n%s", n, &out)
	}
	for _, want := range []string{"op=write", "offset=8192", "size=4096", "errno=ENOSPC", "stage=server", "more=999"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %s in %s", want, &out)
		}
	}
	out.Reset()
	Failed(r, log, "rnbd1", f, now)
	Failed(r, log, "rnbd0", f, now.Add(time.Hour))
	if n := strings.Count(out.String(), "a request failed"); n != 2 {
		t.Errorf("%d lines:\n%s", n, &out)
	}
}

// A request that began right after a look of an idle daemon is found no later
// than a second after it hangs.
func TestPause(t *testing.T) {
	for _, limit := range []time.Duration{time.Millisecond, time.Second, 2 * time.Second, 10 * time.Second, time.Hour} {
		look := Pause(false, limit)
		for look < limit {
			look += Pause(true, limit)
		}
		if late := look - limit; late > time.Second {
			t.Errorf("hanging after %v: found %v later, want 1s at most", limit, late)
		}
	}
	if Pause(false, 10*time.Second) <= Pause(true, 10*time.Second) {
		t.Error("an idle daemon is woken as often as one with requests")
	}
}
