package client

import (
	"fmt"
	"strconv"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The watchdog looks at intervals for requests that are older than
// Config.HungAfter, and logs those that failed. Pumps without a request are not
// woken. A pump looks through its own requests, ring by ring, so that a look
// delays a request by no more than one ring.

// startWatchdog starts the watchdog, unless HungAfter is zero.
func (c *Client) startWatchdog() {
	if c.cfg.HungAfter <= 0 {
		return
	}
	w := &requestWatchdog{client: c, reporter: watchdog.NewReporter(watchdog.Config{Log: c.log, Limit: c.cfg.HungAfter, Journal: c.cfg.Journal})}
	for _, p := range c.pumps {
		l := &pumpScan{pump: p}
		l.done.Store(true)
		w.looks = append(w.looks, l)
	}
	c.watch = w
	c.watchers.Go(func() { watchdog.Run(c.life.Done(), c.cfg.HungAfter, w.scanAll) })
}

// scanAll logs what has failed, and takes over and begins the looks of the pumps.
func (w *requestWatchdog) scanAll(now time.Time) (busy bool) {
	failed := w.logFailures(now)
	return w.nextRound(now) || failed
}

// logFailures logs the requests that failed since the last round and reports
// whether there were any.
func (w *requestWatchdog) logFailures(now time.Time) (some bool) {
	for _, p := range w.client.pumps {
		p.failed.Take(func(f watchdog.Failure[*Device]) {
			watchdog.Failed(w.reporter, f.Device.log, f.Device.name, f, now)
			some = true
		})
	}
	return some
}

// nextRound takes over the looks that have ended and begins the next ones. A pump
// that has not answered keeps its last result. It reports whether a pump has
// requests, or had some that hung.
func (w *requestWatchdog) nextRound(now time.Time) (busy bool) {
	var found []watchdog.Hung
	for _, l := range w.looks {
		if l.done.Load() {
			found = append(found, w.client.namePaths(l.found)...)
			busy = l.beginScan(now) || busy
		} else {
			busy = true
			l.notAnswered(w.client, now)
		}
	}
	w.reporter.Look(found, now)
	return busy || len(found) > 0
}

// beginScan asks the pump to look, if it has a request, and reports whether it has.
func (l *pumpScan) beginScan(now time.Time) bool {
	l.found, l.isStuck = nil, false
	if !l.pump.busy() {
		return false
	}
	l.asked = now
	l.done.Store(false)
	l.pump.pump.Do(func() { l.scanSource(0) })
	return true
}

// notAnswered reports a pump that does not answer for HungAfter.
func (l *pumpScan) notAnswered(c *Client, now time.Time) {
	if took := now.Sub(l.asked); took >= c.cfg.HungAfter && !l.isStuck {
		l.isStuck = true
		c.log.Error("a pump does not answer", "pump", l.pump.pump.Name(), "after", took.Round(time.Second).String())
	}
}

// scanSource looks at the requests of source i and goes on with the next one after
// the pump has done other work. It runs on the pump.
func (l *pumpScan) scanSource(i int) {
	p := l.pump
	if i >= len(p.sources) {
		l.done.Store(true)
		return
	}
	if s := p.sources[i]; s != nil && s.inflight > 0 && !s.orphaned {
		l.scanRequests(s)
	}
	p.pump.Do(func() { l.scanSource(i + 1) })
}

// scanRequests adds the requests of s that hang. It runs on the pump.
func (l *pumpScan) scanRequests(s *ringSource) {
	var paths map[uint64]int // ids by tag; made for the first request that hangs on the wire
	limit := int64(l.pump.client.cfg.HungAfter)
	for i := range s.reqs {
		r := &s.reqs[i]
		age := l.pump.pump.Now() - r.arrived
		if r.dev == nil || age < limit || len(l.found) >= watchdog.MaxGroups {
			continue
		}
		h := watchdog.Hung{Device: r.dev.name, Session: r.dev.session.name, Stage: watchdog.Queue, Requests: 1,
			Oldest: time.Duration(age), Op: r.sqe.Op.String(), Offset: r.sqe.Offset}
		if r.held {
			if paths == nil {
				paths = l.pump.pathsOfRequests()
			}
			h.Stage = watchdog.Wire
			if id, ok := paths[s.requestTag(uint32(i))]; ok {
				h.Path = strconv.Itoa(id)
			}
		}
		l.found = watchdog.Merge(l.found, h)
	}
}

// pathsOfRequests returns the ids of the paths of requests, by tag. It runs on
// the pump, and only when requests hang.
func (p *pumpShare) pathsOfRequests() map[uint64]int {
	out := map[uint64]int{}
	done := map[*session]bool{}
	for _, d := range p.client.Devices() {
		s := d.session
		if done[s] {
			continue
		}
		done[s] = true
		s.lanes[p.index].queue.Inflight(func(tag uint64, path int) { out[tag] = path })
	}
	return out
}

// namePaths replaces the ids of paths by their names.
func (c *Client) namePaths(found []watchdog.Hung) []watchdog.Hung {
	for i := range found {
		h := &found[i]
		c.mu.Lock()
		s := c.sessions[h.Session]
		c.mu.Unlock()
		if s == nil || h.Path == "" {
			continue
		}
		for _, p := range s.transport.Paths() {
			if strconv.Itoa(p.ID) == h.Path {
				h.Path = describePath(p)
				break
			}
		}
	}
	return found
}

// describePath names a path for people.
func describePath(p rtrs.PathInfo) string {
	return fmt.Sprintf("%s%%%s", verbs.AddrPortString(p.Addr.Dst), p.Fabric)
}

// hungRequests returns the requests of d that hang.
func (c *Client) hungRequests(d *Device) []watchdog.Hung {
	if c.watch == nil {
		return nil
	}
	return c.watch.reporter.Now(d.name)
}

// lastFailure describes the last failed request of d, if that is not long ago.
func (c *Client) lastFailure(d *Device) string {
	if c.watch == nil {
		return ""
	}
	return c.watch.reporter.LastFailure(d.name, time.Now())
}

// failedRequests returns the numbers of d's requests that failed.
func (d *Device) failedRequests() (n watchdog.Counts) {
	for i := range d.shares {
		n.Add(&d.shares[i].failures)
	}
	return n
}
