package core

import (
	"net/netip"
	"testing"
	"time"
)

var (
	target = netip.MustParseAddr("10.0.0.1")
	other  = netip.MustParseAddr("10.0.0.2")
	mine   = netip.MustParseAddr("10.0.0.9")
)

func own(a netip.Addr) bool { return a == mine }

// wire answers probes through the slaves with a working path to the target.
type wire struct {
	*sim
	works map[string]bool
	both  bool // the second target answers too
}

// run lets time pass; each probe is answered 1 ms later, and the other slaves
// with a working path see the broadcast.
func (w *wire) run(d time.Duration) {
	end := w.now.Add(d)
	for w.now.Before(end) {
		at, ok := w.m.Next()
		if !ok || at.After(end) {
			w.now = end
			return
		}
		w.now = at
		w.m.Poll(w.now)
		for _, e := range w.collect() {
			if e.Kind == Probe && w.works[e.Slave] {
				w.answer(e.Slave)
			}
		}
	}
}

func (w *wire) answer(from string) {
	at := w.now.Add(time.Millisecond)
	w.m.Received(from, Seen{At: at, ARP: true, Reply: true, SPA: target, TPA: mine}, own)
	if w.both {
		w.m.Received(from, Seen{At: at, ARP: true, Reply: true, SPA: other, TPA: mine}, own)
	}
	for name, works := range w.works {
		if name != from && works {
			w.m.Received(name, Seen{At: at, ARP: true, SPA: mine, TPA: target}, own)
		}
	}
}

func newWire(t testing.TB, options ...string) *wire {
	w := &wire{sim: newSim(t, append([]string{"arp_interval=100", "arp_ip_target=+10.0.0.1"}, options...)...),
		works: map[string]bool{"ib0": true, "ib1": true}}
	w.add("ib0", "ib1")
	return w
}

func TestBO16_ArpMonitor_SilentLossIsSeen(t *testing.T) {
	for _, validate := range []string{"none", "active", "backup", "all", "filter", "filter_active", "filter_backup"} {
		t.Run(validate, func(t *testing.T) {
			w := newWire(t, "arp_validate="+validate)
			w.run(2 * time.Second)
			w.wantActive("ib0")
			w.works["ib0"] = false
			w.run(700 * time.Millisecond)
			w.wantActive("ib1")
			w.works["ib0"] = true
			w.run(2 * time.Second)
			w.wantActive("ib1")
			if got := w.link("ib0"); got != Up {
				t.Errorf("the old slave is %v, want %v", got, Up)
			}
		})
	}
}

func TestArpMonitor_SearchesInTurn(t *testing.T) {
	w := newWire(t, "arp_validate=all")
	w.run(2 * time.Second)
	w.works["ib0"], w.works["ib1"] = false, false
	w.run(2 * time.Second)
	w.wantActive("")
	if w.m.Carrier() {
		t.Error("the bond has a carrier although no target answers")
	}
	if w.m.Probing() == "" {
		t.Error("no slave is being probed")
	}
	w.works["ib1"] = true
	w.run(500 * time.Millisecond)
	w.wantActive("ib1")
	if w.m.Probing() != "" {
		t.Errorf("%s is still probed although %s is active", w.m.Probing(), w.m.Active())
	}
}

func TestArpMonitor_ForeignTrafficIsNoLife(t *testing.T) {
	for _, c := range []struct {
		validate string
		frame    Seen
		life     bool
	}{
		{"none", Seen{}, true},
		{"filter", Seen{}, false},
		{"filter", Seen{ARP: true, SPA: other, TPA: mine}, true},
		{"active", Seen{}, false},
		{"active", Seen{ARP: true, Reply: true, SPA: other, TPA: mine}, false},   // no target
		{"active", Seen{ARP: true, Reply: true, SPA: target, TPA: other}, false}, // not for us
		{"active", Seen{ARP: true, Reply: true, SPA: target, TPA: mine}, true},
	} {
		w := newWire(t, "arp_validate="+c.validate)
		w.run(time.Second)
		w.works["ib0"], w.works["ib1"] = false, false
		for range 20 {
			w.run(50 * time.Millisecond)
			c.frame.At = w.now
			w.m.Received("ib0", c.frame, own)
		}
		if alive := w.m.Active() == "ib0"; alive != c.life {
			t.Errorf("arp_validate %s, only %+v comes: the slave is alive: %v, want %v", c.validate, c.frame, alive, c.life)
		}
	}
}

func TestArpMonitor_AllTargets(t *testing.T) {
	for _, c := range []struct {
		option string
		alive  bool
	}{{"any", true}, {"all", false}} {
		w := newWire(t, "arp_validate=active", "arp_ip_target=+10.0.0.2", "arp_all_targets="+c.option)
		w.both = true
		w.run(time.Second)
		w.wantActive("ib0")
		w.both = false
		w.works["ib1"] = false
		w.run(2 * time.Second)
		failed, _ := w.m.Slave("ib0")
		if (failed.Failures == 0) != c.alive {
			t.Errorf("arp_all_targets %s, one target is silent: %d failures of the active slave", c.option, failed.Failures)
		}
	}
}

func TestArpMissedMax(t *testing.T) {
	w := newWire(t, "arp_validate=active", "arp_missed_max=10")
	w.run(2 * time.Second)
	w.works["ib0"] = false
	w.run(900 * time.Millisecond)
	w.wantActive("ib0")
	w.run(500 * time.Millisecond)
	w.wantActive("ib1")
}
