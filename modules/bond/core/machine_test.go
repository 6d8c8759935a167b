package core

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

var t0 = time.Unix(1000, 0)

// sim is a machine with a clock that stands until it is told to run.
type sim struct {
	t   testing.TB
	m   *Machine
	now time.Time
	log []Event // all events
}

func newSim(t testing.TB, options ...string) *sim {
	s := &sim{t: t, m: New(), now: t0}
	for _, o := range options {
		name, value, _ := strings.Cut(o, "=")
		if err := s.m.Set(name, value, s.now); err != nil {
			t.Fatal(err)
		}
	}
	s.m.SetUp(true, s.now)
	return s
}

func (s *sim) collect() []Event {
	e := s.m.Events()
	s.log = append(s.log, e...)
	return e
}

// event is a carrier event: it is reported, and acted upon at once.
func (s *sim) event(name string, carrier bool) {
	s.m.SetCarrier(name, carrier)
	s.m.Poll(s.now)
	s.collect()
}

// run lets time pass, with every poll at its time.
func (s *sim) run(d time.Duration) {
	end := s.now.Add(d)
	for {
		at, ok := s.m.Next()
		if !ok || at.After(end) {
			break
		}
		s.now = at
		s.m.Poll(s.now)
		s.collect()
	}
	s.now = end
}

func (s *sim) add(names ...string) {
	for _, n := range names {
		s.m.Add(Slave{Name: n, Carrier: true, Speed: 1000, FullDuplex: true}, s.now)
	}
	s.collect()
}

func (s *sim) wantActive(want string) {
	s.t.Helper()
	if got := s.m.Active(); got != want {
		s.t.Errorf("active slave at %v is %q, want %q", s.now.Sub(t0), got, want)
	}
}

func (s *sim) link(name string) Link {
	sl, _ := s.m.Slave(name)
	return sl.Link
}

func TestBO16_SwitchOnCarrierLoss(t *testing.T) {
	s := newSim(t, "miimon=100")
	s.add("ib0", "ib1")
	s.run(time.Second)
	s.wantActive("ib0")
	s.m.SetCarrier("ib0", false) // not an event: only the poll sees it
	s.run(100 * time.Millisecond)
	s.wantActive("ib1")
	s.event("ib0", true)
	s.run(time.Second)
	s.wantActive("ib1") // no primary: no fail-back
	s.event("ib1", false)
	s.wantActive("ib0") // an event does not wait for the poll
	if sl, _ := s.m.Slave("ib1"); sl.Failures != 1 {
		t.Errorf("%d failures of ib1, want 1", sl.Failures)
	}
}

func TestDowndelay_ShortLossIsIgnored(t *testing.T) {
	s := newSim(t, "miimon=50", "downdelay=200")
	s.add("ib0", "ib1")
	s.event("ib0", false)
	if got := s.link("ib0"); got != Fail {
		t.Fatalf("link is %v, want %v", got, Fail)
	}
	s.run(150 * time.Millisecond)
	s.event("ib0", true)
	s.run(time.Second)
	s.wantActive("ib0")
	if sl, _ := s.m.Slave("ib0"); sl.Failures != 0 || sl.Link != Up {
		t.Errorf("after a loss shorter than downdelay: %v, %d failures", sl.Link, sl.Failures)
	}
	s.event("ib0", false)
	s.run(199 * time.Millisecond)
	s.wantActive("ib0")
	s.run(time.Millisecond)
	s.wantActive("ib1")
}

func TestUpdelay(t *testing.T) {
	s := newSim(t, "miimon=50", "updelay=300", "primary=ib0")
	s.add("ib0", "ib1")
	s.run(time.Second)
	s.wantActive("ib0")
	s.event("ib0", false)
	s.wantActive("ib1")
	s.event("ib0", true)
	s.run(299 * time.Millisecond)
	s.wantActive("ib1")
	if got := s.link("ib0"); got != Back {
		t.Errorf("link is %v, want %v", got, Back)
	}
	s.run(time.Millisecond)
	s.wantActive("ib0")
}

func TestUpdelay_IsIgnoredWithoutAnActiveSlave(t *testing.T) {
	s := newSim(t, "miimon=50", "updelay=5000")
	s.add("ib0", "ib1")
	s.event("ib0", false)
	s.event("ib1", false)
	s.wantActive("")
	s.event("ib1", true)
	s.wantActive("ib1")
}

func TestUpdelay_SlaveWhoseDelayEndsFirstIsTaken(t *testing.T) {
	s := newSim(t, "miimon=50", "updelay=1000")
	s.add("ib0", "ib1", "ib2")
	s.run(2 * time.Second)
	s.event("ib2", false)
	s.event("ib1", false)
	s.event("ib2", true)
	s.run(200 * time.Millisecond)
	s.event("ib1", true)
	s.run(200 * time.Millisecond)
	s.event("ib0", false)
	s.wantActive("ib2")
	if !slices.ContainsFunc(s.log, func(e Event) bool {
		return e.Kind == Log && e.Slave == "ib2" && e.Text == "making interface the new active one 600 ms earlier"
	}) {
		t.Error("the log does not say that updelay was cut short")
	}
}

func TestPrimaryReselect(t *testing.T) {
	for _, c := range []struct {
		policy       string
		primarySpeed int
		want         string
	}{
		{"always", 1000, "ib0"},
		{"better", 1000, "ib1"}, // as fast is not better
		{"better", 40000, "ib0"},
		{"failure", 40000, "ib1"},
	} {
		t.Run(fmt.Sprint(c.policy, " ", c.primarySpeed), func(t *testing.T) {
			s := newSim(t, "miimon=100", "primary=ib0", "primary_reselect="+c.policy)
			s.add("ib1", "ib0")
			s.wantActive("ib0") // a primary that is enslaved is taken once
			s.m.SetSpeed("ib0", c.primarySpeed, true)
			s.event("ib0", false)
			s.wantActive("ib1")
			s.event("ib0", true)
			s.run(time.Second)
			s.wantActive(c.want)
			s.event("ib1", false)
			s.run(time.Second)
			s.wantActive("ib0")
		})
	}
}

func TestActiveSlaveByHand(t *testing.T) {
	s := newSim(t, "miimon=100")
	s.add("ib0", "ib1")
	set := func(v string) error { return s.m.Set("active_slave", v+"\n", s.now) }
	if err := set("ib1"); err != nil {
		t.Fatal(err)
	}
	s.wantActive("ib1")
	s.event("ib0", false)
	err := set("ib0")
	if want := "Could not set ib0 as active slave; either ib0 is down or the link is down"; !errors.Is(err, syscall.EINVAL) || err.Error() != want {
		t.Errorf("a slave without a link: %v, want EINVAL %q", err, want)
	}
	if err := set("ib9"); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("no slave: %v, want EINVAL", err)
	}
	s.event("ib0", true)
	if err := set(""); err != nil {
		t.Fatal(err)
	}
	s.wantActive("ib0")
}

func TestRelease_OfTheActiveSlaveSwitches(t *testing.T) {
	s := newSim(t, "miimon=100")
	s.add("ib0", "ib1")
	s.log = nil
	s.m.Remove("ib0", s.now)
	s.collect()
	s.wantActive("ib1")
	if !slices.Contains(s.log, Event{Kind: ActiveChanged, Old: "ib0", New: "ib1"}) {
		t.Errorf("events %v tell no switch from ib0 to ib1", s.log)
	}
	s.m.Remove("ib1", s.now)
	s.wantActive("")
	if s.m.Carrier() {
		t.Error("a bond without slaves has a carrier")
	}
}

func count(events []Event, k EventKind) (n int) {
	for _, e := range events {
		if e.Kind == k {
			n++
		}
	}
	return n
}

func TestNotifications(t *testing.T) {
	s := newSim(t, "miimon=100", "num_grat_arp=3", "peer_notif_delay=500", "resend_igmp=2")
	s.add("ib0", "ib1")
	s.run(5 * time.Second)
	s.log = nil
	s.event("ib0", false)
	if n := count(s.log, NotifyPeers); n != 1 {
		t.Errorf("%d notifications at once, want 1", n)
	}
	s.run(499 * time.Millisecond)
	if n := count(s.log, NotifyPeers); n != 1 {
		t.Errorf("%d notifications before peer_notif_delay, want 1", n)
	}
	s.run(5 * time.Second)
	if n := count(s.log, NotifyPeers); n != 3 {
		t.Errorf("%d notifications, want 3", n)
	}
	if n := count(s.log, RejoinGroups); n != 2 {
		t.Errorf("%d reports of groups, want 2", n)
	}
}

func TestDownBond_MonitorsNothing(t *testing.T) {
	s := newSim(t, "miimon=100")
	s.m.SetUp(false, s.now)
	s.add("ib0", "ib1")
	if _, ok := s.m.Next(); ok {
		t.Error("a bond that is down wants to be polled")
	}
	s.event("ib0", false)
	s.wantActive("ib0")
	s.m.SetUp(true, s.now)
	s.run(0)
	s.wantActive("ib1")
}

// flapper is a random schedule of carriers against the promises of the MII monitor.
type flapper struct {
	*sim
	names []string
	lost  map[string]time.Time // carrier lost since
	have  map[string]time.Time // carrier there since
}

func (f *flapper) toggle(name string, event bool) {
	sl, _ := f.m.Slave(name)
	f.m.SetCarrier(name, !sl.Carrier)
	delete(f.lost, name)
	delete(f.have, name)
	if sl.Carrier {
		f.lost[name] = f.now
	} else {
		f.have[name] = f.now
	}
	if event {
		f.m.Poll(f.now)
		f.collect()
	}
}

func (f *flapper) check() {
	f.t.Helper()
	active := f.m.Active()
	o := f.m.Options()
	limit := o.Miimon + o.Downdelay()
	for _, sl := range f.m.Slaves() {
		if sl.Name == active && sl.Link != Up && sl.Link != Fail {
			f.t.Fatalf("the active slave %s is %v", active, sl.Link)
		}
		if since, gone := f.lost[sl.Name]; gone && sl.Name == active && f.now.Sub(since) > limit {
			f.t.Fatalf("%s is active %v after its carrier was lost; miimon + downdelay is %v", active, f.now.Sub(since), limit)
		}
		if since, there := f.have[sl.Name]; there && active == "" && f.now.Sub(since) > o.Miimon {
			f.t.Fatalf("no slave is active although %s has had a carrier for %v", sl.Name, f.now.Sub(since))
		}
	}
	current := ""
	for _, e := range f.log {
		if e.Kind != ActiveChanged {
			continue
		}
		if e.Old != current || e.Old == e.New {
			f.t.Fatalf("switch from %q to %q while %q is active", e.Old, e.New, current)
		}
		current = e.New
	}
	if current != active {
		f.t.Fatalf("events say that %q is active, the machine %q", current, active)
	}
}

func TestBO16_RandomCarriers(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		opts := []string{
			fmt.Sprintf("miimon=%d", 10+r.IntN(200)),
			fmt.Sprintf("downdelay=%d", r.IntN(600)), fmt.Sprintf("updelay=%d", r.IntN(600)),
			fmt.Sprintf("primary_reselect=%d", r.IntN(3)),
		}
		if r.IntN(2) == 0 {
			opts = append(opts, "primary=b")
		}
		f := &flapper{sim: newSim(t, opts...), names: []string{"a", "b", "c"}[:2+r.IntN(2)],
			lost: map[string]time.Time{}, have: map[string]time.Time{}}
		f.add(f.names...)
		for _, n := range f.names {
			f.have[n] = f.now
		}
		for range 200 {
			if r.IntN(2) == 0 {
				f.toggle(f.names[r.IntN(len(f.names))], r.IntN(2) == 0)
			}
			f.run(time.Duration(r.IntN(300)) * time.Millisecond)
			f.check()
		}
	}
}

func FuzzMachine(f *testing.F) {
	f.Add([]byte{0, 1, 200, 130, 5, 64, 9})
	f.Fuzz(func(t *testing.T, script []byte) {
		f := &flapper{sim: newSim(t, "miimon=20", "downdelay=40", "updelay=60", "primary=b"), names: []string{"a", "b"},
			lost: map[string]time.Time{}, have: map[string]time.Time{}}
		f.add(f.names...)
		f.have["a"], f.have["b"] = f.now, f.now
		for _, b := range script {
			if b&3 < 2 {
				f.toggle(f.names[b&1], b&4 != 0)
			}
			f.run(time.Duration(b>>3) * 4 * time.Millisecond)
			f.check()
		}
	})
}
