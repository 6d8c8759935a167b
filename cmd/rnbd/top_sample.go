package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/top"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// topPatience bounds the time for one sample.
const topPatience = 5 * time.Second

// topSampler asks daemons for samples. It connects again to one that went away.
type topSampler struct {
	cmd   *cobra.Command
	set   daemonSet
	limit time.Duration

	daemons *daemons // nil: connect again
	kinds   []string // of daemons that answered once
	sources []*eventSource
	events  []daemonEvent
	lines   []string // of events
	err     error    // of the last sample
}

// open connects to the daemons that run, one at least.
func (t *topSampler) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, t.limit)
	defer cancel()
	d, err := connect(ctx, t.cmd, t.set)
	if err != nil {
		return err
	}
	t.daemons, t.sources, t.events, t.lines = d, d.eventSources(), nil, nil
	for _, s := range t.sources {
		if !slices.Contains(t.kinds, s.daemon) {
			t.kinds = append(t.kinds, s.daemon)
		}
	}
	slices.Sort(t.kinds)
	return nil
}

func (t *topSampler) close() {
	if t.daemons != nil {
		t.daemons.close()
		t.daemons = nil
	}
}

// sample asks for the numbers of a view. Errors are in the sample, and in t.err.
func (t *topSampler) sample(ctx context.Context, view string) *top.Sample {
	s := &top.Sample{}
	t.err = nil
	if t.daemons == nil {
		t.err = t.open(ctx)
	}
	for _, kind := range t.kinds {
		d := top.Daemon{Kind: kind}
		err := t.err
		if err == nil {
			err = t.ask(ctx, s, &d, view)
		}
		if err != nil {
			d.Err, t.err = strings.ReplaceAll(err.Error(), "\n", "; "), errors.Join(t.err, err)
			s.Devices = slices.DeleteFunc(s.Devices, func(d top.Device) bool { return d.Daemon == kind })
			s.Paths = slices.DeleteFunc(s.Paths, func(p top.Path) bool { return p.Daemon == kind })
		}
		s.Daemons = append(s.Daemons, d)
	}
	if t.err != nil {
		t.close()
	}
	s.Time, s.Events = time.Now(), t.lines
	return s
}

// ask adds what the daemon d says to s, and to d the journal of its events and what needs
// attention.
func (t *topSampler) ask(ctx context.Context, s *top.Sample, d *top.Daemon, view string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, t.limit)
	defer cancel()
	i := slices.IndexFunc(t.sources, func(s *eventSource) bool { return s.daemon == d.Kind })
	if i < 0 {
		return fmt.Errorf("it does not run: %w", errNoDaemon)
	}
	events, err := t.sources[i].next(ctx, false)
	if err != nil && !unimplemented(err) { // one from before events has none
		return err
	}
	t.keep(d.Kind, events)
	d.Journal = t.sources[i].seen.Journal
	var info *controlpb.DaemonInfo
	if d.Kind == "client" {
		info, err = t.daemons.client.Info(ctx, &controlpb.InfoRequest{})
	} else {
		info, err = t.daemons.server.Info(ctx, &controlpb.InfoRequest{})
	}
	if err != nil {
		return err
	}
	for _, c := range info.Conditions {
		d.Conditions = append(d.Conditions, top.Condition{Kind: c.Kind, Subject: c.Subject, Text: c.Text})
	}
	if d.Kind == "client" {
		return addTopClient(ctx, s, t.daemons.client, view)
	}
	return addTopServer(ctx, s, t.daemons.server, view)
}

// maxTopEvents bounds the events that are kept.
const maxTopEvents = 1000

// keep enters new events, in the order of their times.
func (t *topSampler) keep(kind string, events []*controlpb.Event) {
	if len(events) == 0 {
		return
	}
	for _, e := range events {
		t.events = append(t.events, daemonEvent{kind, e})
	}
	slices.SortStableFunc(t.events, func(a, b daemonEvent) int { return cmp.Compare(a.TimeUnixNs, b.TimeUnixNs) })
	t.events = t.events[max(0, len(t.events)-maxTopEvents):]
	t.lines = nil // that of the last sample stays as it is
	for _, e := range t.events {
		t.lines = append(t.lines, e.line())
	}
}

func addTopClient(ctx context.Context, s *top.Sample, c controlpb.ClientDaemonClient, view string) error {
	sessions, err := c.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	addTopPaths(ctx, s, "client", sessions, view, func(r *controlpb.PathRequest) (*controlpb.PathStatsReply, error) { return c.PathStats(ctx, r) })
	list, err := c.ListDevices(ctx, &controlpb.ListRequest{Brief: true})
	if err != nil {
		return err
	}
	stats, err := c.DeviceStats(ctx, &controlpb.DeviceRequest{})
	if err != nil {
		return err
	}
	stages := topStages(stats)
	for _, d := range list.Devices {
		s.Devices = append(s.Devices, top.Device{
			Daemon: "client", ID: d.Name, Name: d.Name, Session: d.Session, State: d.State, Inflight: int64(d.Inflight),
			Uses:   map[string]top.Moved{"": {Read: 512 * d.RxSectors, Written: 512 * d.TxSectors}},
			Failed: d.FailedRequests, Hung: hungOf(d.Hung), Stages: stages[d.Name],
		})
	}
	return nil
}

// addTopServer adds exported devices. One that is opened twice, for readers apart, is
// one device here.
func addTopServer(ctx context.Context, s *top.Sample, c controlpb.ServerDaemonClient, view string) error {
	sessions, err := c.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	addTopPaths(ctx, s, "server", sessions, view, func(r *controlpb.PathRequest) (*controlpb.PathStatsReply, error) { return c.PathStats(ctx, r) })
	list, err := c.ListDevices(ctx, &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	stats, err := c.DeviceStats(ctx, &controlpb.DeviceRequest{})
	if err != nil {
		return err
	}
	stages, at := topStages(stats), map[string]int{}
	for _, d := range list.Devices {
		i, again := at[d.Path]
		if !again {
			i = len(s.Devices)
			at[d.Path] = i
			s.Devices = append(s.Devices, top.Device{Daemon: "server", ID: d.Path, Name: d.Name, State: d.State, Inflight: -1,
				Uses: map[string]top.Moved{}, Stages: stages[d.Path]})
		}
		addExported(&s.Devices[i], d)
	}
	return nil
}

// addExported adds the users and the counts of d to row.
func addExported(row *top.Device, d *controlpb.ServerDevice) {
	if row.State == "open" {
		row.State = d.State // one of two may be broken
	}
	row.Failed, row.Hung = row.Failed+d.FailedRequests, row.Hung+hungOf(d.Hung)
	var names []string
	if row.Session != "" {
		names = append(names, row.Session)
	}
	for _, u := range d.Users {
		// A server receives the data of writes.
		row.Uses[fmt.Sprintf("%s %d", u.Session, u.DeviceId)] = top.Moved{Read: 512 * u.TxSectors, Written: 512 * u.RxSectors}
		names = append(names, u.Session)
	}
	slices.Sort(names)
	row.Session = strings.Join(slices.Compact(names), ",")
}

// addTopPaths adds paths. Each is asked for its requests only where they are shown.
func addTopPaths(ctx context.Context, s *top.Sample, kind string, l *controlpb.SessionList, view string, stats func(*controlpb.PathRequest) (*controlpb.PathStatsReply, error)) {
	for _, session := range l.Sessions {
		for _, p := range session.Paths {
			row := top.Path{
				Daemon: kind, Session: session.Name, ID: p.Id, State: p.State, Fabric: p.Fabric, Address: cmp.Or(p.Name, p.Src+"@"+p.Dst),
				Received: p.RxBytes, Sent: p.TxBytes, Requests: -1, Inflight: p.Inflight, Latency: time.Duration(p.LatencyNs),
				Reconnects: p.Reconnects, Failovers: p.Failovers, LastError: p.LastError,
			}
			if view == "paths" && ctx.Err() == nil {
				// One that has gone meanwhile has none.
				if r, err := stats(&controlpb.PathRequest{Session: session.Name, Id: p.Id}); err == nil {
					row.Requests = int64(r.ReadCount + r.WriteCount)
				}
			}
			s.Paths = append(s.Paths, row)
		}
	}
}

// topStages are the stages of devices, by the names that the daemon gives them.
func topStages(l *controlpb.DeviceStatsList) map[string][]top.Stage {
	all := map[string][]top.Stage{}
	for _, d := range l.Devices {
		for _, s := range d.Stages {
			h := latency.Snapshot{Sum: s.Latency.GetSumNs()}
			for _, b := range s.Latency.GetBuckets() {
				h.Buckets = append(h.Buckets, latency.Bucket{Upper: b.GetUpperNs(), Count: b.GetCount()})
			}
			all[d.Device] = append(all[d.Device], top.Stage{Name: s.Stage, Latency: h})
		}
	}
	return all
}

func hungOf(all []*controlpb.HungRequests) (n uint64) {
	for _, h := range all {
		n += h.Count
	}
	return n
}
