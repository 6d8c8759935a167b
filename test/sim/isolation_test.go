package sim

import (
	"testing"
	"time"
)

func TestQuiet(t *testing.T) {
	const s = time.Second
	fault := func(kind string, at, length time.Duration) Fault { return Fault{Kind: kind, At: at, For: length} }
	for _, c := range []struct {
		name     string
		paths    int
		faults   []Fault
		device   int
		from, to time.Duration
		want     time.Duration
	}{
		{"no fault", 1, nil, 0, 2 * s, 9 * s, 7 * s},
		{"the disk hangs", 1, []Fault{fault("hang-disk", 3*s, 20*s)}, 0, 2 * s, 30 * s, 1 * s},
		{"and is done with", 1, []Fault{fault("hang-disk", 3*s, 20*s)}, 0, 2 * s, 39 * s, 6 * s},
		{"another disk hangs", 1, []Fault{fault("hang-disk", 3*s, 20*s)}, 1, 2 * s, 30 * s, 28 * s},
		{"its server dies", 1, []Fault{fault("kill-server", 3*s, 1*s)}, 1, 2 * s, 30 * s, 1 * s},
		{"another server dies", 1, []Fault{fault("kill-server", 3*s, 1*s)}, 2, 2 * s, 30 * s, 28 * s},
		{"the front end dies", 1, []Fault{fault("kill-front", 3*s, 0)}, 2, 2 * s, 20 * s, 1 * s},
		{"its only path is dead", 1, []Fault{fault("stall", 3*s, 40*s)}, 0, 2 * s, 40 * s, 1 * s},
		{"one of two paths is dead", 2, []Fault{fault("stall", 3*s, 40*s)}, 0, 2 * s, 40 * s, 32 * s},
		{"one of two paths is dead, and a disk hangs", 2, []Fault{fault("stall", 3*s, 40*s), {Kind: "hang-disk", Device: 1}}, 0, 2 * s, 40 * s, 21 * s},
		{"one of two paths is dead, and the server dies", 2, []Fault{fault("stall", 3*s, 40*s), fault("kill-server", 4*s, 1*s)}, 0, 2 * s, 40 * s, 5 * s},
		{"between two faults", 1, []Fault{fault("kill-front", 40*s, 0), fault("hang-disk", 0, 1*s)}, 0, 2 * s, 60 * s, 29 * s},
	} {
		t.Run(c.name, func(t *testing.T) {
			plan := &Schedule{Servers: 2, Devices: 2, Paths: c.paths, Faults: c.faults}
			if got := plan.quiet(c.device, c.from, c.to); got != c.want {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

func TestWayFault(t *testing.T) {
	const s = time.Second
	plan := &Schedule{Servers: 2, Devices: 2, Paths: 3, Faults: []Fault{{Kind: "stall", At: 10 * s, For: 20 * s, Server: 1}, {Kind: "hang-disk", At: 0, For: 90 * s}}}
	for _, c := range []struct {
		device   int
		from, to time.Duration
		want     bool
	}{{2, 0, 9 * s, false}, {2, 0, 11 * s, true}, {3, 20 * s, 21 * s, true}, {2, 34 * s, 50 * s, true}, {2, 36 * s, 50 * s, false}, {0, 12 * s, 13 * s, false}} {
		if got := plan.wayFault(c.device, c.from, c.to); got != c.want {
			t.Errorf("device %d from %v to %v: %t", c.device, c.from, c.to, got)
		}
	}
}
