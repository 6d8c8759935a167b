package server

import (
	"context"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
)

// The watchdog looks at intervals for requests that are older than
// Config.HungAfter, and logs those that failed. Pumps without a request are not
// woken. A pump looks through the requests of one session at a time, so that a
// scan delays a request by no more than that.

// startWatchdog starts the watchdog, unless HungAfter is zero.
func (s *Server) startWatchdog() {
	if s.cfg.HungAfter <= 0 {
		return
	}
	w := &requestWatchdog{server: s, reporter: watchdog.NewReporter(watchdog.Config{Log: s.log, Limit: s.cfg.HungAfter, Journal: s.cfg.Journal})}
	for i := range s.pumps {
		l := &pumpScan{server: s, pump: i}
		l.done.Store(true)
		w.looks = append(w.looks, l)
	}
	s.watchdog = w
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { watchdog.Run(ctx.Done(), s.cfg.HungAfter, w.scanAll) })
	s.stopWatchdog = func() { cancel(); wg.Wait() }
}

// scanAll logs what has failed, and takes over and begins the scans of the pumps.
func (w *requestWatchdog) scanAll(now time.Time) (busy bool) {
	failed := w.logFailures(now)
	return w.nextRound(now) || failed
}

// logFailures logs the requests that failed since the last round and reports
// whether there were any.
func (w *requestWatchdog) logFailures(now time.Time) (some bool) {
	for _, p := range w.server.pumps {
		p.failed.Take(func(f watchdog.Failure[*device]) {
			watchdog.Failed(w.reporter, w.server.log.With("device", f.Device.path), f.Device.path, f, now)
			some = true
		})
	}
	return some
}

// nextRound takes over the scans that have ended and begins the next ones. A pump
// that has not answered keeps its last result. It reports whether a pump has
// requests, or had some that hung.
func (w *requestWatchdog) nextRound(now time.Time) (busy bool) {
	var found []watchdog.Hung
	for _, l := range w.looks {
		if l.done.Load() {
			found = append(found, l.found...)
			busy = l.beginScan(now) || busy
		} else {
			busy = true
			l.notAnswered(now)
		}
	}
	w.reporter.Look(found, now)
	return busy || len(found) > 0
}

// beginScan asks the pump to look, if it has a request, and reports whether it has.
func (l *pumpScan) beginScan(now time.Time) bool {
	l.found, l.isStuck = nil, false
	if !l.server.pumps[l.pump].busy() {
		return false
	}
	var busy []*session
	for i := range l.server.sessions {
		if s := l.server.sessions[i].Load(); s != nil && s.busyOn(l.pump) {
			busy = append(busy, s)
		}
	}
	l.asked = now
	l.done.Store(false)
	l.server.pumps[l.pump].pump.Do(func() { l.scanSessions(busy) })
	return true
}

// busyOn reports whether a device of s has a request on a pump.
func (s *session) busyOn(pump int) bool {
	for _, m := range s.allMappings() {
		if m.flows[pump].inflight.Load() > 0 {
			return true
		}
	}
	return false
}

// notAnswered reports a pump that does not answer for HungAfter.
func (l *pumpScan) notAnswered(now time.Time) {
	if took := now.Sub(l.asked); took >= l.server.cfg.HungAfter && !l.isStuck {
		l.isStuck = true
		l.server.log.Error("a pump does not answer", "pump", l.server.pumps[l.pump].pump.Name(), "after", took.Round(time.Second).String())
	}
}

// scanSessions looks at the requests of the first session and goes on with the
// next one after the pump has done other work. It runs on the pump.
func (l *pumpScan) scanSessions(rest []*session) {
	if len(rest) == 0 {
		l.done.Store(true)
		return
	}
	l.scanRequests(rest[0])
	l.server.pumps[l.pump].pump.Do(func() { l.scanSessions(rest[1:]) })
}

// scanRequests adds the requests of s that hang. It runs on the pump.
func (l *pumpScan) scanRequests(s *session) {
	limit := int64(l.server.cfg.HungAfter)
	now := l.server.pumps[l.pump].pump.Now()
	for i := range s.reqs {
		r := &s.reqs[i]
		owner := int(r.owner.Load())
		if owner == 0 || (owner-1)/len(l.server.plugins) != l.pump || len(l.found) >= watchdog.MaxGroups {
			continue // idle, or another pump's
		}
		if age := now - r.arrived; r.op != nil && age >= limit {
			l.found = watchdog.Merge(l.found, watchdog.Hung{
				Device: r.m.dev.path, Session: s.name, Path: r.op.Path(), Stage: r.hangsAt(), Requests: 1,
				Oldest: time.Duration(age), Op: r.sqe.Op.String(), Offset: r.sqe.Offset,
			})
		}
	}
}

// hangsAt is the stage in which r waits.
func (r *request) hangsAt() watchdog.Stage {
	switch r.state {
	case reqSent:
		return watchdog.Plugin
	case reqParked:
		return watchdog.Fence
	case reqHeld:
		return watchdog.Turn
	}
	return watchdog.Queue
}

// hungRequests returns the requests of a device that hang.
func (s *Server) hungRequests(path string) []watchdog.Hung {
	if s.watchdog == nil {
		return nil
	}
	return s.watchdog.reporter.Now(path)
}

// lastFailure describes the last failed request of a device, if that is not long ago.
func (s *Server) lastFailure(path string) string {
	if s.watchdog == nil {
		return ""
	}
	return s.watchdog.reporter.LastFailure(path, time.Now())
}

// failedRequests returns the numbers of d's requests that failed.
func (d *device) failedRequests() (n watchdog.Counts) {
	for i := range d.failures {
		n.Add(&d.failures[i])
	}
	return n
}
