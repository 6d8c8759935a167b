package nemesis

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// Result is the outcome of a schedule.
type Result struct {
	Ops    int64 // requests that succeeded
	Failed int64 // that failed, as they may
	Blocks int64 // judged
	Logs   string
	Took   time.Duration
	Events []string
}

// Run carries out a schedule. The error describes a violation, or a failure of the
// set-up; with it Result.Logs holds the daemons' logs.
func Run(t testing.TB, s *Schedule, rooted bool) (r Result, err error) {
	built := time.Now()
	w, err := build(t, s.Setup, rooted)
	var mu sync.Mutex
	start := time.Now()
	w.log = func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		r.Events = append(r.Events, fmt.Sprintf("%7.3f ", time.Since(start).Seconds())+fmt.Sprintf(format, args...))
	}
	w.log("built in %v", start.Sub(built))
	defer func() {
		w.close()
		w.log("gone")
		r.Took = time.Since(built)
	}()
	if err == nil {
		err = w.suffer(s, &r)
	}
	if err != nil && w.lab != nil {
		r.Logs = w.keep()
	}
	return r, err
}

// suffer is the time from the first request to the end of the daemons.
func (w *world) suffer(s *Schedule, r *Result) error {
	var loads []*load
	for i, device := range w.loaded() {
		loads = append(loads, w.startLoad(device, s.Seed*16+uint64(i)))
	}
	errs := []error{w.play(s)}
	w.log("healed")
	deadline := time.Now().Add(patience)
	w.heal(s)
	for _, l := range loads {
		errs = append(errs, l.end(deadline))
	}
	w.log("load ended")
	errs = append(errs, w.awaitBack(time.Until(deadline)))
	w.log("back")
	for _, l := range loads {
		errs = append(errs, l.last(deadline))
		r.Ops += l.ops.Load()
		r.Failed += l.failed.Load()
		r.Blocks += l.h.Judged()
	}
	errs = append(errs, w.crowdAnswers(deadline))
	w.log("judged")
	errs = append(errs, w.stop())
	w.log("stopped")
	return errors.Join(errs...)
}

// crowdAnswers reads from every idle device.
func (w *world) crowdAnswers(deadline time.Time) error {
	buf := make([]byte, 4096)
	for device := range w.names {
		if !strings.HasPrefix(device, "crowd") {
			continue
		}
		if err := w.answers(device, deadline, func(c *nbdclient.Client) error {
			_, err := c.ReadAt(buf, 0)
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// play lets the faults begin and end, each on a goroutine of its own, and waits
// for the end of all.
func (w *world) play(s *Schedule) error {
	start := time.Now()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for i := range s.Faults {
		f := &s.Faults[i]
		wg.Go(func() {
			time.Sleep(f.At.duration() - time.Since(start))
			began := time.Now()
			err := w.begin(f)
			time.Sleep(f.For.duration() - time.Since(began))
			if err = errors.Join(err, w.end(f)); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("%v: %w", f, err))
			}
		})
	}
	wg.Wait()
	time.Sleep(s.Length.duration() - time.Since(start))
	return errors.Join(errs...)
}

// Minimise leaves out faults, one at a time, as long as the schedule fails, until
// the deadline. A schedule may fail by chance only: each is tried twice.
func Minimise(s *Schedule, deadline time.Time, fails func(*Schedule) bool) *Schedule {
	for i := 0; i < len(s.Faults) && time.Now().Before(deadline); {
		less := s.without(i)
		if fails(less) || time.Now().Before(deadline) && fails(less) {
			s = less
		} else {
			i++
		}
	}
	s.Faults = slices.Clip(s.Faults)
	return s
}
