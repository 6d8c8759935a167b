package status

import (
	"cmp"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// maxShares bounds the devices of one Point.
const maxShares = 8

// work fills in the work of the devices of s, and of all, since an earlier sample.
// Without one all rates stay unknown. It returns the devices that moved most.
func (s *sample) work(before *sample) []Share {
	if before == nil || !s.time.After(before.time) {
		return nil
	}
	seconds := s.time.Sub(before.time).Seconds()
	devices := s.movedSince(before)
	var all moved
	var answers latency.Snapshot
	busiest := []Share{}
	for key, i := range s.index {
		m, took := devices[key], s.answered[key].Since(before.answered[key])
		s.state.Devices[i].Work = workOf(m, took, seconds)
		all.read += m.read
		all.written += m.written
		answers.Add(took)
		if sum := m.read + m.written; sum > 0 {
			busiest = append(busiest, Share{s.state.Devices[i].Name, float64(sum) / seconds})
		}
	}
	s.state.Totals.Work = workOf(all, answers, seconds)
	slices.SortFunc(busiest, func(a, b Share) int {
		return cmp.Or(cmp.Compare(b.Rate, a.Rate), cmp.Compare(a.Device, b.Device))
	})
	return append([]Share{}, busiest[:min(len(busiest), maxShares)]...) // the rest is not kept
}

// movedSince returns the data that each device has moved since an earlier sample.
func (s *sample) movedSince(before *sample) map[string]moved {
	out := make(map[string]moved, len(s.index))
	for u, m := range s.uses {
		old := before.uses[u] // zero: the use is younger
		sum := out[u.device]
		sum.read += grown(old.read, m.read)
		sum.written += grown(old.written, m.written)
		out[u.device] = sum
	}
	return out
}

// grown returns the growth of a count. One that has fallen began again at 0.
func grown(before, now uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}

func workOf(m moved, answers latency.Snapshot, seconds float64) Work {
	n := answers.Count()
	w := Work{Read: known(float64(m.read) / seconds), Written: known(float64(m.written) / seconds), Requests: known(float64(n) / seconds)}
	if n > 0 {
		w.P50, w.P99 = known(answers.Quantile(0.5).Seconds()), known(answers.Quantile(0.99).Seconds())
	}
	return w
}

// point returns the interval from before to s.
func (s *sample) point(before *sample) Point {
	busiest := s.work(before)
	t := &s.state.Totals
	failed := grown(before.state.Totals.Failed, t.Failed)
	if t.Devices < before.state.Totals.Devices && t.Failed < before.state.Totals.Failed {
		failed = 0 // a device with failures is gone
	}
	return Point{Time: s.time.UnixMilli(), Failed: float64(failed) / s.time.Sub(before.time).Seconds(), Hung: t.Hung, Paths: t.PathsConnected,
		Work: t.Work, Busiest: busiest}
}

// ring has the last points.
type ring struct {
	points [points]Point
	next   int // total of those that were added
}

// Interval is the time between two points, History what they cover.
const (
	Interval = 5 * time.Second
	History  = 15 * time.Minute
	points   = int(History / Interval)
)

func (r *ring) add(p Point) {
	r.points[r.next%points] = p
	r.next++
}

// all returns the points, oldest first.
func (r *ring) all() []Point {
	out := make([]Point, 0, min(r.next, points))
	for i := max(0, r.next-points); i < r.next; i++ {
		out = append(out, r.points[i%points])
	}
	return out
}
