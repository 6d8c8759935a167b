package status

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/fit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// api is the common part of both daemons' control APIs.
type api interface {
	Info(context.Context, *controlpb.InfoRequest) (*controlpb.DaemonInfo, error)
	ListSessions(context.Context, *controlpb.ListRequest) (*controlpb.SessionList, error)
	DeviceStats(context.Context, *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error)
	Events(context.Context, *controlpb.EventsRequest) (*controlpb.EventList, error)
}

// Daemon is a daemon as a Page asks it.
type Daemon struct {
	kind     string
	answered string // the stage that ends with the answer to a request
	api      api
	devices  func(context.Context, *sample) error
}

// Client is a client daemon.
func Client(c controlpb.ClientDaemonServer) *Daemon {
	return &Daemon{kind: "client", answered: "wire", api: c, devices: func(ctx context.Context, s *sample) error {
		l, err := c.ListDevices(ctx, &controlpb.ListRequest{Brief: true})
		for _, d := range l.GetDevices() {
			s.addMapped(d)
		}
		return err
	}}
}

// Server is a server daemon.
func Server(c controlpb.ServerDaemonServer) *Daemon {
	return &Daemon{kind: "server", answered: "plugin", api: c, devices: func(ctx context.Context, s *sample) error {
		l, err := c.ListDevices(ctx, &controlpb.ListRequest{})
		for _, d := range l.GetDevices() {
			s.addExported(d)
		}
		return err
	}}
}

// sample is one look at the daemon: its state, and the counts from which rates are
// made.
type sample struct {
	time     time.Time
	state    State
	index    map[string]int // of devices in state.Devices, by key
	uses     map[use]moved
	answered map[string]latency.Snapshot // by key
}

// use is one opening of a device. Its counts begin with it.
type use struct {
	device, session string
	id              uint32
}

// moved is an amount of data, in bytes.
type moved struct{ read, written uint64 }

// look asks the daemon.
func (d *Daemon) look(ctx context.Context) (*sample, error) {
	s := &sample{time: time.Now(), index: map[string]int{}, uses: map[use]moved{}, answered: map[string]latency.Snapshot{}}
	info, err := d.api.Info(ctx, &controlpb.InfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("daemon: %w", err)
	}
	s.addDaemon(info)
	sessions, err := d.api.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return nil, fmt.Errorf("sessions: %w", err)
	}
	for _, one := range sessions.Sessions {
		s.addSession(one)
	}
	if err := d.devices(ctx, s); err != nil {
		return nil, fmt.Errorf("devices: %w", err)
	}
	s.countDevices()
	stats, err := d.api.DeviceStats(ctx, &controlpb.DeviceRequest{})
	if err != nil {
		return nil, fmt.Errorf("statistics of devices: %w", err)
	}
	for _, one := range stats.Devices {
		s.addStats(one, d.answered)
	}
	return s, nil
}

// verdictWidth bounds the letters of a verdict.
const verdictWidth = 300

func (s *sample) addDaemon(info *controlpb.DaemonInfo) {
	s.state.Daemon, s.state.Version, s.state.PID = info.Kind, info.Version, info.Pid
	s.state.Config = append([]string{}, info.ConfigProblems...)
	var things []string
	for _, c := range info.Conditions {
		s.state.Conditions = append(s.state.Conditions, Condition{c.Kind, c.Subject, c.Text})
		if thing := strings.TrimSpace(c.Kind + " " + c.Subject); !slices.Contains(things, thing) {
			things = append(things, thing)
		}
	}
	s.state.Verdict = fit.Verdict(things, verdictWidth)
	for _, p := range info.Plugins {
		s.state.Plugins = append(s.state.Plugins, Plugin{p.Name, p.Kind, p.State, p.Restarts, p.Pid})
		s.state.Totals.Plugins++
		if p.State == "running" {
			s.state.Totals.PluginsRunning++
		}
	}
}

func (s *sample) addSession(p *controlpb.Session) {
	row := Session{Name: p.Name, State: p.State, Peer: p.Hostname, Policy: p.Policy, Devices: p.Devices, Paths: len(p.Paths), RetiredChunks: p.RetiredChunks}
	for _, one := range p.Paths {
		path := Path{Session: p.Name, ID: one.Id, State: one.State, Fabric: one.Fabric, Source: one.Src, Target: one.Dst,
			Protected: one.GetSecurity().GetProtocol(), Received: one.RxBytes, Sent: one.TxBytes, Inflight: one.Inflight,
			Reconnects: one.Reconnects, Failovers: one.Failovers, Error: one.LastError}
		if one.LatencyNs > 0 {
			path.Heartbeat = known(float64(one.LatencyNs) / 1e9)
		}
		if one.State == "connected" {
			row.PathsConnected++
		}
		s.state.Paths = append(s.state.Paths, path)
	}
	t := &s.state.Totals
	t.Sessions++
	if p.State == "connected" {
		t.SessionsConnected++
	}
	t.Paths += row.Paths
	t.PathsConnected += row.PathsConnected
	s.state.Sessions = append(s.state.Sessions, row)
}

func (s *sample) addMapped(d *controlpb.ClientDevice) {
	row := s.device(d.Name)
	*row = Device{Name: d.Name, Path: d.Path, Session: d.Session, State: d.State, Size: d.GetLimits().GetSize(),
		Inflight: &d.Inflight, Failed: d.FailedRequests, Error: d.LastError}
	row.addHung(d.Hung)
	s.uses[use{device: d.Name}] = moved{512 * d.RxSectors, 512 * d.TxSectors}
}

// addExported adds a device of a server. One that is opened twice, for readers
// apart, is one here.
func (s *sample) addExported(d *controlpb.ServerDevice) {
	row := s.device(d.Path)
	row.Name, row.Path, row.Size = d.Name, d.Path, d.GetLimits().GetSize()
	if row.State == "" || row.State == "open" {
		row.State, _, _ = strings.Cut(d.State, ":")
		_, row.Error, _ = strings.Cut(d.State, ": ")
	}
	row.Failed += d.FailedRequests
	row.Hung, row.HungAt = 0, "" // they are counted by path
	row.addHung(d.Hung)
	names := strings.Fields(row.Session)
	for _, u := range d.Users { // a server receives the data of writes
		s.uses[use{d.Path, u.Session, u.DeviceId}] = moved{512 * u.TxSectors, 512 * u.RxSectors}
		names = append(names, u.Session)
	}
	slices.Sort(names)
	row.Session = strings.Join(slices.Compact(names), " ")
}

func (s *sample) countDevices() {
	t := &s.state.Totals
	t.Devices = len(s.state.Devices)
	for i := range s.state.Devices {
		d := &s.state.Devices[i]
		if d.State == "open" {
			t.DevicesOpen++
		}
		t.Hung += d.Hung
		t.Failed += d.Failed
	}
}

// device returns the row of a device, a new one the first time.
func (s *sample) device(key string) *Device {
	i, ok := s.index[key]
	if !ok {
		i = len(s.state.Devices)
		s.index[key] = i
		s.state.Devices = append(s.state.Devices, Device{})
	}
	return &s.state.Devices[i]
}

func (d *Device) addHung(all []*controlpb.HungRequests) {
	oldest := uint64(0)
	for _, h := range all {
		d.Hung += h.Count
		if h.OldestNs >= oldest {
			oldest = h.OldestNs
			d.HungAt = strings.TrimSpace(h.Stage + " " + h.Path)
		}
	}
}

func (s *sample) addStats(d *controlpb.DeviceStats, stage string) {
	sum := s.answered[d.Device]
	for _, one := range d.Stages {
		if one.Stage == stage {
			sum.Add(control.Latency(one.Latency))
		}
	}
	s.answered[d.Device] = sum
}

func known(v float64) *float64 { return &v }
