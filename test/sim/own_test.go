package sim

import (
	"log/slog"
	"testing"
	"time"
)

// The simulator's own actions must not count as violations.
func TestTheSimulatorItself(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	for _, c := range []struct {
		name   string
		faults []Fault
	}{
		{"a server is away for longer than a minute while devices are to be opened again", []Fault{
			{Kind: "other-sizes", At: s, For: s, N: 3}, {Kind: "kill-server", At: 2100 * ms, For: 70 * s}}},
		{"a device is to be mapped again while the client is away", []Fault{
			{Kind: "remap", At: s, For: s}, {Kind: "kill-client", At: 1500 * ms, For: 150 * s}}},
		{"the client is killed while it starts", []Fault{
			{Kind: "slow-start-front", At: 500 * ms, For: 6 * s, N: 92},
			{Kind: "kill-client", At: s, For: 10 * ms}, {Kind: "kill-client", At: 1500 * ms, For: 100 * ms}, {Kind: "kill-client", At: 1900 * ms, For: s}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			plan := &Schedule{Servers: 1, Devices: 2, Sessions: 1, Paths: 2, Pumps: 1, QueueDepth: 16, ChunkSize: 65536, Slots: 8, Users: 2, Blocks: 8,
				Queue: 2 * time.Minute, Resets: []bool{true}, Length: 10 * s, Faults: c.faults}
			if r := Run(t, plan, slog.New(slog.DiscardHandler)); len(r.Violations) > 0 {
				t.Errorf("%s", r)
			}
		})
	}
}

// A path is lost at the moment another one joins, again and again: a request
// that found only the lost path must not wait for ever.
func TestPathLostWhileAnotherJoins(t *testing.T) {
	const ms = time.Millisecond
	plan := &Schedule{Servers: 1, Devices: 2, Sessions: 1, Paths: 2, Pumps: 1, QueueDepth: 16, ChunkSize: 65536, Slots: 8, Users: 4, Blocks: 8,
		Queue: 2 * time.Minute, Resets: []bool{true}, Length: 21 * time.Second}
	plan.Faults = append(plan.Faults, Fault{Kind: "delay", At: 500 * ms, For: 21 * time.Second, N: 21})
	for i := range time.Duration(40) {
		at := time.Second + i*500*ms
		plan.Faults = append(plan.Faults, Fault{Kind: "cut", At: at}, Fault{Kind: "cut", Path: 1, At: at + 60*ms + i*ms/2})
	}
	if r := Run(t, plan, slog.New(slog.DiscardHandler)); len(r.Violations) > 0 {
		t.Errorf("%s", r)
	}
}

// A loss is owed to the users of a mapping in which a write was acknowledged, and to no others.
func TestLossIsOwedToTheMappingOfTheWrite(t *testing.T) {
	for _, x := range []struct {
		name string
		acks []string // mappings of acknowledged writes, in order
		now  string   // the mapping when the power fails
		want bool
	}{
		{"the same mapping", []string{"a"}, "a", true},
		{"the next mapping", []string{"a"}, "b", false},
		{"the next mapping has written, too", []string{"a", "b"}, "b", true},
		{"no write", nil, "a", false},
	} {
		h := newHistory(1, 1)
		for _, mapping := range x.acks {
			h.acknowledge(0, h.begin(0, make([]byte, blockSize)), mapping, false)
		}
		if lost := h.powerCut(make([]byte, blockSize), x.now); lost != x.want {
			t.Errorf("%s: lost %t", x.name, lost)
		}
	}
}

// A flush of the users fails after a failure of the server's power, whether requests
// wait for it or not, and whether the front end dies then or not.
func TestPowerCutOfTheServerIsTold(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	for _, queue := range []time.Duration{0, 2 * time.Minute} {
		for _, kind := range []string{"", "kill-front"} {
			plan := &Schedule{Servers: 1, Devices: 2, Sessions: 1, Paths: 2, Pumps: 2, QueueDepth: 16, ChunkSize: 65536, Slots: 8, Users: 4, Blocks: 8,
				Cache: true, Queue: queue, Resets: []bool{true}, Length: 20 * s}
			for i := range time.Duration(6) {
				at := s + i*3*s
				plan.Faults = append(plan.Faults, Fault{Kind: "power-cut", At: at, For: 50 * ms})
				if kind != "" {
					plan.Faults = append(plan.Faults, Fault{Kind: kind, At: at + s + i*200*ms})
				}
			}
			if r := Run(t, plan, slog.New(slog.DiscardHandler)); len(r.Violations) > 0 {
				t.Errorf("%s, loss=%s: %s", kind, queue, r)
			}
		}
	}
}

// The error of a flush that the disk has failed may come again if the front end dies, or a path is
// lost, before its user is known to have it.
func TestErrorOfAFlushMayComeAgain(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	for _, kind := range []string{"kill-front", "cut"} {
		plan := &Schedule{Servers: 1, Devices: 2, Sessions: 1, Paths: 1, Pumps: 2, QueueDepth: 16, ChunkSize: 65536, Slots: 8, Users: 4, Blocks: 8,
			Cache: true, Queue: 2 * time.Minute, Resets: []bool{true}, Length: 20 * s}
		for i := range time.Duration(5) {
			at := s + i*3*s
			plan.Faults = append(plan.Faults, Fault{Kind: "fail-disk", At: at, For: s}, Fault{Kind: kind, At: at + s + ms})
		}
		if r := Run(t, plan, slog.New(slog.DiscardHandler)); len(r.Violations) > 0 {
			t.Errorf("%s: %s", kind, r)
		}
	}
}

// A flush fails after write-back has failed, also if its answer is lost with a path, or with a
// process at either end. A server that is rebooted in order causes at most one such error.
func TestFailedWriteBackIsTold(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	for _, kind := range []string{"", "cut", "kill-storage", "kill-front", "kill-client", "remap", "reboot-server"} {
		for _, queue := range []time.Duration{0, 2 * time.Minute} {
			plan := &Schedule{Servers: 1, Devices: 2, Sessions: 1, Paths: 2, Pumps: 2, QueueDepth: 16, ChunkSize: 65536, Slots: 8, Users: 4, Blocks: 8,
				Cache: true, Queue: queue, Resets: []bool{true}, Length: 20 * s}
			for i := range time.Duration(6) {
				at := s + i*3*s
				plan.Faults = append(plan.Faults, Fault{Kind: "fail-write-back", At: at, Device: int(i) % 2}, Fault{Kind: "slow-disk", At: at, For: s, N: 5, Device: int(i) % 2})
				for j := range time.Duration(4) {
					if kind != "" {
						plan.Faults = append(plan.Faults, Fault{Kind: kind, At: at + j*60*ms, For: 20 * ms, Device: int(i) % 2, Path: int(j) % 2})
					}
				}
			}
			if r := Run(t, plan, slog.New(slog.DiscardHandler)); len(r.Violations) > 0 {
				t.Errorf("%s, loss=%s: %s", kind, queue, r)
			}
		}
	}
}
