package sim

import (
	"slices"
	"time"
)

// Isolation: a request may take long only if a fault reaches its device. Faults of a
// disk reach that disk, those of a server or of the way to it all disks of the server,
// those of the front end or of the client all disks; each until a while after its end.

// patience is how long a request may take while no fault reaches its device.
const patience = 5 * time.Second

// reach says how far a kind of fault goes.
type reach uint8

const (
	reachAll reach = iota
	reachDisk
	reachWay // one path to a server
	reachServer
)

// recovery is how long devices may need after the end of a fault: heartbeats, the end
// of the transport's patience, 5 s for operations that do not end, and pauses between
// attempts add up.
var recovery = [...]time.Duration{reachDisk: 10 * time.Second, reachWay: 30 * time.Second, reachServer: 30 * time.Second, reachAll: 30 * time.Second}

// remapTime is the time of recovery after a remap: names linger for 3 s,
// commands are repeated, and if a CLOSE was lost the device is opened again
// when the server has noticed.
const remapTime = 12 * time.Second

// How long the loss of a path may be felt while others are there: until heartbeats
// tell of it, and with a disk that hangs until the server does not wait for it.
const (
	failOver     = 5 * time.Second
	failOverHung = 16 * time.Second
)

var reaches = map[string]reach{
	"hang-disk": reachDisk, "slow-disk": reachDisk, "fail-disk": reachDisk, "fail-write-back": reachDisk, "remap": reachDisk, "hasty-remap": reachDisk,
	"cut": reachWay, "stall": reachWay, "stall-requests": reachWay, "stall-answers": reachWay, "delay": reachWay,
	"disconnect-path": reachWay, "reconnect-path": reachWay, "remove-path": reachWay,
	"kill-server": reachServer, "power-cut": reachServer, "stop-server": reachServer, "reboot-server": reachServer, "other-sizes": reachServer, "other-cache": reachServer, "swap-cache": reachServer,
	"kill-storage": reachServer, "refuse-opens": reachServer, "freeze-storage": reachServer, "deaf-storage": reachServer, "late-storage": reachServer, "slow-start-storage": reachServer,
}

// span is a time of a schedule.
type span struct{ from, to time.Duration }

// troubles returns when faults reach a device, in order.
func (s *Schedule) troubles(device int) (all []span) {
	for _, f := range s.Faults {
		if t, ok := s.trouble(f, device); ok {
			all = append(all, t)
		}
	}
	slices.SortFunc(all, func(a, b span) int { return int(a.from - b.from) })
	return all
}

func (s *Schedule) trouble(f Fault, device int) (t span, ok bool) {
	far := reaches[f.Kind]
	t = span{f.At, f.At + f.For + recovery[far]}
	switch {
	case f.Kind == "remap", f.Kind == "hasty-remap":
		t.to = f.At + f.For + remapTime
		return t, f.Device == device
	case far == reachDisk:
		return t, f.Device == device
	case far != reachAll && f.Server != device/s.Devices:
		return t, false
	case far == reachWay && s.otherWays(f):
		late := failOver
		if s.has("hang-disk") || s.has("slow-disk") {
			late = failOverHung
		}
		t.to = min(t.to, f.At+late)
	}
	return t, true
}

// otherWays reports whether a path is left that no fault touches, and no other one
// could stand in the way of using it. Faults of the server have times of their own: a
// path that is dead meanwhile must not make them longer.
func (s *Schedule) otherWays(f Fault) bool {
	return s.Paths > 1 && !slices.ContainsFunc(s.Faults, func(o Fault) bool {
		far := reaches[o.Kind]
		return far == reachAll || far == reachWay && o.Server == f.Server && o.Path != f.Path
	})
}

// quiet returns the longest part of from..to without a fault that reaches the
// device.
func (s *Schedule) quiet(device int, from, to time.Duration) (most time.Duration) {
	for _, t := range s.troubles(device) {
		if t.from > from {
			most = max(most, min(t.from, to)-from)
		}
		from = max(from, t.to)
	}
	return max(most, to-from)
}

// wayFault reports whether a fault of a path to the device's server lasts at some time
// in from..to, or has ended shortly before. A map that makes its session waits for all
// paths that it names, those too that do not answer.
func (s *Schedule) wayFault(device int, from, to time.Duration) bool {
	return slices.ContainsFunc(s.Faults, func(f Fault) bool {
		return reaches[f.Kind] == reachWay && f.Server == device/s.Devices && f.At < to && f.At+f.For+failOver > from
	})
}

// isolates reports whether the schedule has permits enough for isolation: with
// few permits, a device that hangs makes the others wait.
func (s *Schedule) isolates() bool { return s.QueueDepth >= max(16, 2*s.Devices) }

// judgeMap is judgeIsolation for a map that began then.
func (w *world) judgeMap(l *load, begin time.Time) {
	if !w.plan.wayFault(l.index, w.since(begin), w.since(time.Now())) {
		w.judgeIsolation(l, "the map", begin)
	}
}

// judgeIsolation wants a request or a command that began then to have ended in time.
func (w *world) judgeIsolation(l *load, what string, begin time.Time) {
	if took := time.Since(begin); w.plan.Soon > 0 && took > w.plan.Soon {
		w.violate("isolation: %s of %s, begun at %s, took %s, and nothing stood in the way for longer than %s", what, l.name,
			w.since(begin), took.Round(time.Millisecond), w.plan.Soon)
		return
	}
	if time.Since(begin) <= patience || l.given.Load() || !w.plan.isolates() {
		return
	}
	if d := w.plan.quiet(l.index, w.since(begin), w.since(time.Now())); d > patience {
		w.violate("isolation: %s of %s, begun at %s, took %s, in %s of which no fault reached the device", what, l.name,
			w.since(begin), time.Since(begin).Round(time.Millisecond), d)
	}
}
