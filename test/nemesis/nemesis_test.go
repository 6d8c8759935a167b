package nemesis

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/netns/netnstest"
	"github.com/rnbd-go/rnbd/test/lab"
)

func TestMain(m *testing.M) { os.Exit(lab.Run(m)) }

// rooted reports whether there are namespaces, TUN devices and FUSE.
func rooted(t testing.TB) bool {
	t.Helper()
	if err := netnstest.Usable(); err != nil {
		t.Logf("no faults of networks and disks: network namespaces cannot be used here: %v", err)
		return false
	}
	for _, name := range []string{"/dev/net/tun", "/dev/fuse", "/dev/loop-control"} {
		if _, err := os.Stat(name); err != nil {
			t.Logf("no faults of networks and disks: %v", err)
			return false
		}
	}
	for _, name := range []string{"ip", "ss"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Logf("no faults of networks and disks: %v", err)
			return false
		}
	}
	return true
}

// The short form has seeds that are always the same, so that a change that fails
// is a change that did it.
var shortSeeds = []uint64{1, 2, 3, 4, 5, 6}

const (
	shortLength = 6_000
	longLength  = 20_000
)

// TestSchedules runs those of RNBD_SCHEDULE (a file), of RNBD_SEED (one), of
// RNBD_SCHEDULES (their number; seeds count from RNBD_SEED or the time on), or
// the short form. RNBD_KINDS are the kinds of faults that are drawn, with commas
// between them; another choice is another schedule of the same seed.
func TestSchedules(t *testing.T) {
	root := rooted(t)
	o := options{length: shortLength, rooted: root}
	long := os.Getenv("RNBD_LONG") != ""
	if long {
		o.length, o.crowd = longLength, 200
	}
	if only := os.Getenv("RNBD_KINDS"); only != "" {
		o.only = strings.Split(only, ",")
	}
	if name := os.Getenv("RNBD_SCHEDULE"); name != "" {
		s, err := Load(name)
		if err != nil {
			t.Fatal(err)
		}
		play(t, s, root, long)
		return
	}
	var total Result
	for i, seed := range seeds(t) {
		s := Draw(seed, o)
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := play(t, s, root, long)
			total.Ops, total.Failed, total.Blocks = total.Ops+r.Ops, total.Failed+r.Failed, total.Blocks+r.Blocks
		})
		if long {
			fmt.Printf("%s %d schedules: %d requests answered, %d failed as they may, %d blocks judged\n",
				time.Now().Format(time.TimeOnly), i+1, total.Ops, total.Failed, total.Blocks)
		}
	}
}

// TestSchedulesThatFailed are those that have found something.
func TestSchedulesThatFailed(t *testing.T) {
	if os.Getenv("RNBD_LONG") == "" {
		t.Skip("in the long form")
	}
	names, err := filepath.Glob("testdata/*.json")
	if err != nil || len(names) == 0 {
		t.Fatalf("schedules: %v, %v", names, err)
	}
	root := rooted(t)
	if !root {
		t.Skip("they need namespaces")
	}
	for _, name := range names {
		t.Run(filepath.Base(name), func(t *testing.T) {
			s, err := Load(name)
			if err != nil {
				t.Fatal(err)
			}
			play(t, s, root, true)
		})
	}
}

// TestSlowDiskBehindFlappingPaths plays the schedule of the testdata that once left a
// device without an answer for minutes.
func TestSlowDiskBehindFlappingPaths(t *testing.T) {
	root := rooted(t)
	if !root {
		t.Skip("it needs namespaces")
	}
	s, err := Load("testdata/slow-disk-flapping-paths.json")
	if err != nil {
		t.Fatal(err)
	}
	play(t, s, root, false)
}

func seeds(t *testing.T) []uint64 {
	number := func(name string) uint64 {
		n, err := strconv.ParseUint(os.Getenv(name), 10, 64)
		if err != nil && os.Getenv(name) != "" {
			t.Fatalf("%s: %v", name, err)
		}
		return n
	}
	first, n := number("RNBD_SEED"), number("RNBD_SCHEDULES")
	switch {
	case first == 0 && n == 0 && os.Getenv("RNBD_LONG") == "":
		return shortSeeds
	case first == 0:
		first = uint64(time.Now().Unix())
	case n == 0:
		n = 1
	}
	var all []uint64
	for i := range max(n, 1) {
		all = append(all, first+i)
	}
	return all
}

// play runs a schedule. One that fails is tried with fewer faults in the long
// form.
func play(t *testing.T, s *Schedule, root, long bool) Result {
	t.Helper()
	r, err := Run(t, s, root)
	if err == nil && r.Took > s.Length.duration()+10*time.Second {
		t.Logf("it was slow:\n%s\n%v", strings.Join(r.Events, "\n"), s)
	}
	if err == nil {
		return r
	}
	name := filepath.Join(r.Logs, "schedule.json")
	if r.Logs != "" {
		if err := s.save(name); err != nil {
			t.Error(err)
		}
	}
	for _, e := range r.Events {
		t.Log(e)
	}
	t.Errorf("%v\n%vlogs and schedule are in %s; again: make faults SCHEDULE=%s", err, s, r.Logs, name)
	if !long || os.Getenv("RNBD_MINIMISE") == "" {
		return r
	}
	least := Minimise(s, time.Now().Add(15*time.Minute), func(less *Schedule) (failed bool) {
		t.Run("less", func(t *testing.T) {
			_, err := Run(t, less, root)
			failed = err != nil
			t.Logf("%d faults: %v", len(less.Faults), err)
		})
		return failed
	})
	t.Logf("with fewer faults: %v", least)
	return r
}

func TestDraw(t *testing.T) {
	seen := map[string]bool{}
	for seed := range uint64(400) {
		o := options{length: longLength, crowd: 200, rooted: seed%2 == 0}
		s := Draw(seed, o)
		if again := Draw(seed, o); !reflect.DeepEqual(s, again) {
			t.Fatalf("seed %d: %v, then %v", seed, s, again)
		}
		for _, f := range s.Faults {
			k, ok := kinds[f.Kind]
			seen[f.Kind] = true
			switch {
			case !ok, k.rooted && !o.rooted, f.At < 0, f.For < 0, f.At+f.For > o.length:
				t.Errorf("seed %d: %v", seed, f)
			case k.high > 0 && (f.Size < k.low-0.01 || f.Size > k.high):
				t.Errorf("seed %d: %v", seed, f)
			}
		}
		name := filepath.Join(t.TempDir(), "s.json")
		if err := s.save(name); err != nil {
			t.Fatal(err)
		}
		if again, err := Load(name); err != nil || !reflect.DeepEqual(s, again) {
			t.Fatalf("saved %v, loaded %v, %v", s, again, err)
		}
	}
	for name := range kinds {
		if !seen[name] {
			t.Errorf("%s is never drawn", name)
		}
	}
}

func TestMinimise(t *testing.T) {
	s := Draw(3, options{length: longLength, rooted: true})
	s.Faults = append(s.Faults, Fault{Kind: "cut", At: 7}, Fault{Kind: "reset", At: 8}, Fault{Kind: "remap", At: 9})
	has := func(s *Schedule, at Millis) bool {
		return slices.ContainsFunc(s.Faults, func(f Fault) bool { return f.At == at })
	}
	least := Minimise(s, time.Now().Add(time.Minute), func(s *Schedule) bool { return has(s, 7) && has(s, 9) })
	if len(least.Faults) != 2 || !has(least, 7) || !has(least, 9) {
		t.Errorf("left: %v", least)
	}
}
