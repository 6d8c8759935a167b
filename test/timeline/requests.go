package main

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Roles of the processes.
const (
	roleApp      = "application"
	roleFrontend = "front end"
	roleClient   = "client"
	roleServer   = "server"
	rolePlugin   = "plugin"
)

// steps are the system calls that every request makes, in order: the hand-overs lie
// between them. A send counts from its beginning, a receive to its end.
var steps = []struct {
	role string
	way  call
}{
	{roleApp, sends}, {roleFrontend, receives}, {roleClient, sends}, {roleServer, receives},
	{roleServer, sends}, {roleClient, receives}, {roleFrontend, sends}, {roleApp, receives}, {roleApp, sends},
}

// mark is a step of one request.
type mark struct {
	at, back int64 // of a send: its beginning and end; of a receive twice its end
	tid      int
}

// handOver is a part of a request, from one thread to another. Of its time, work is that
// of the first thread until it has handed over, and of the second until its step.
type handOver struct {
	from, to string
	times    times
	woken    bool // the second thread slept
	switches int  // of the CPU of the second thread since it was given the request
}

func (h *handOver) sum() (ns float64) {
	for _, t := range h.times {
		ns += t
	}
	return ns
}

// recording is what was recorded.
type recording struct {
	events  []event
	threads map[int]string
	hist    map[int]*history
	plugin  int  // the plugin's pump
	yields  bool // calls of sched_yield were recorded
}

func newRecording(text []byte, threads map[int]string) (*recording, error) {
	events, err := parse(text)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(events, func(a, b event) int { return int(a.at - b.at) })
	r := &recording{events: events, threads: threads, hist: histories(events)}
	r.yields = slices.ContainsFunc(events, func(e event) bool { return e.kind == enterCall && e.call == unix.SYS_SCHED_YIELD })
	busiest := 0.
	for tid, role := range threads {
		if t := r.hist[tid].between(0, 1<<62); role == rolePlugin && t[scheduler]+t[working] > busiest {
			busiest, r.plugin = t[scheduler]+t[working], tid
		}
	}
	return r, nil
}

// requests finds the requests that made every step, one after the other.
func (r *recording) requests() (all [][]mark) {
	begun := map[int]int64{} // calls of threads
	var marks []mark
	for i := range r.events {
		e := &r.events[i]
		if e.kind == enterCall {
			begun[e.tid] = e.at
			continue
		}
		role, way := r.threads[e.tid], receives
		if e.kind != exitCall || role == "" {
			continue
		}
		m := mark{e.at, e.at, e.tid}
		if e.moves(sends) {
			if m.at, way = begun[e.tid], sends; m.at == 0 {
				continue
			}
		} else if !e.moves(receives) {
			continue
		}
		step := steps[len(marks)]
		switch {
		case role == step.role && way == step.way:
			if marks = append(marks, m); len(marks) == len(steps) {
				all = append(all, marks)
				marks = []mark{m} // the next one
			}
		case role == roleApp && way == sends && len(marks) > 1: // some step was missed
			marks = []mark{m}
		}
	}
	return all
}

// handOvers are those of one request.
func (r *recording) handOvers(marks []mark) (all []handOver) {
	for i := range len(marks) - 1 {
		a, b := marks[i], marks[i+1]
		from, to := steps[i].role, steps[i+1].role
		switch {
		case from == roleServer && to == roleServer && r.plugin != 0:
			given, woken := r.handed(a, r.plugin, b.at)
			has := r.hist[r.plugin].firstWork(given, b.at)
			all = append(all, r.handOver(from, rolePlugin, a.at, given, has, a.tid, r.plugin, woken))
			back, woken := r.handed(mark{has, has, r.plugin}, b.tid, b.at)
			all = append(all, r.handOver(rolePlugin, to, has, back, b.at, r.plugin, b.tid, woken))
		case from == roleApp && to == roleApp:
			all = append(all, r.handOver(from, "its next request", a.at, b.at, b.at, a.tid, b.tid, false))
		default:
			given, woken := r.handed(a, b.tid, b.at)
			all = append(all, r.handOver(from, to, a.at, given, b.at, a.tid, b.tid, woken))
		}
	}
	return all
}

// handOver adds up the states of the first thread to the moment when the second one was
// given the request, and of the second from there.
func (r *recording) handOver(from, to string, start, given, end int64, a, b int, woken bool) handOver {
	h := handOver{from: from, to: to, woken: woken, times: r.hist[a].between(start, given)}
	for s, t := range r.hist[b].between(given, end) {
		h.times[s] += t
	}
	h.switches = r.switches(b, given, end)
	return h
}

// handed returns the moment when the thread of m has given the request to another one, at
// most limit: it wakes the other one, or its send is over, or it has nothing left to do
// and gives its CPU away. The moment of a publication in a ring cannot be seen: it is up
// to a look at a socket earlier.
func (r *recording) handed(m mark, to int, limit int64) (at int64, woken bool) {
	for _, e := range r.events[r.since(m.at):] {
		switch {
		case e.at >= limit:
			return limit, false
		case e.kind == waking && e.woken == to && r.hist[to].is(e.at-1) == asleep:
			return e.at, true
		case m.back > m.at && e.at >= m.back:
			return m.back, false
		case e.tid != m.tid || m.back > m.at || e.at == m.at:
		case e.kind == enterCall && e.call == unix.SYS_SCHED_YIELD, e.kind == switchTo && (!e.stays || !r.yields):
			return e.at, false
		}
	}
	return limit, false
}

// since returns the place of the first event at a moment or after it.
func (r *recording) since(at int64) int {
	n, _ := slices.BinarySearchFunc(r.events, at, func(e event, at int64) int { return int(e.at - at) })
	return n
}

// switches counts those of the CPU that a thread is on at the end.
func (r *recording) switches(tid int, from, to int64) (n int) {
	cpu := -1
	for i := r.since(to+1) - 1; i >= 0 && r.events[i].at >= from; i-- {
		e := &r.events[i]
		if cpu < 0 && (e.tid == tid && e.kind != switchTo || e.kind == switchTo && e.next == tid) {
			cpu = e.cpu
		}
		if e.kind == switchTo && e.cpu == cpu {
			n++
		}
	}
	return n
}

// middle returns the fifth of the requests around the median of their times.
func middle(all [][]mark) ([][]mark, error) {
	if len(all) < 5 {
		return nil, fmt.Errorf("%d whole requests were recorded, at least 5 are needed: record longer (-window)", len(all))
	}
	slices.SortFunc(all, func(a, b []mark) int { return int(length(a) - length(b)) })
	return all[len(all)*2/5 : max(len(all)*3/5, len(all)*2/5+1)], nil
}

// length of a request, with what the application does before its next one.
func length(marks []mark) int64 { return marks[len(marks)-1].at - marks[0].at }
