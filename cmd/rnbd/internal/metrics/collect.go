package metrics

import (
	"context"
	"fmt"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// api is the common part of both daemons' control APIs.
type api interface {
	Info(context.Context, *controlpb.InfoRequest) (*controlpb.DaemonInfo, error)
	ListSessions(context.Context, *controlpb.ListRequest) (*controlpb.SessionList, error)
	PathStats(context.Context, *controlpb.PathRequest) (*controlpb.PathStatsReply, error)
	DeviceStats(context.Context, *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error)
}

// device is one of either daemon.
type device struct {
	name, state     string
	rx, tx          uint64 // sectors
	size            uint64 // bytes
	inflight, users float64
	losses          float64 // of acknowledged writes
	mappings        []mapping
}

// mapping names one use of a device alike at both ends.
type mapping struct{ session, path string }

// Client shows a client daemon.
func Client(c controlpb.ClientDaemonServer) *Daemon {
	return newCollector("client", c, func(ctx context.Context) (out []device, err error) {
		l, err := c.ListDevices(ctx, &controlpb.ListRequest{})
		for _, d := range l.GetDevices() {
			out = append(out, device{d.Name, d.State, d.RxSectors, d.TxSectors, d.GetLimits().GetSize(), float64(d.Inflight), float64(d.Openers), float64(d.WriteLosses),
				[]mapping{{d.Session, d.Path}}})
		}
		return out, err
	})
}

// Server shows a server daemon.
func Server(s controlpb.ServerDaemonServer) *Daemon {
	return newCollector("server", s, func(ctx context.Context) (out []device, err error) {
		l, err := s.ListDevices(ctx, &controlpb.ListRequest{})
		for _, d := range l.GetDevices() {
			one := device{name: d.Path, state: d.State, size: d.GetLimits().GetSize(), users: float64(len(d.Users)), losses: float64(d.WriteLosses)}
			for _, u := range d.Users { // the server counts clients' writes as received
				one.rx += u.TxSectors
				one.tx += u.RxSectors
				one.mappings = append(one.mappings, mapping{u.Session, d.Name})
			}
			out = append(out, one)
		}
		return out, err
	})
}

// Daemon shows a daemon. It asks it at each scrape.
type Daemon struct {
	client  bool
	api     api
	devices func(context.Context) ([]device, error)
	descs   []*prometheus.Desc

	build, configProblems, conditions                                       metric
	sessions                                                                metric
	pathUp, pathReads, pathWrites, pathReadBytes, pathWriteBytes            metric
	pathInflight, pathReconnects, pathFailovers, pathLatency                metric
	pathSecurity, pathPeerExpiry                                            metric
	deviceOpen, deviceSize, deviceRead, deviceWritten, deviceUse, deviceRun metric
	pumpLoops, pumpSleeps, pumpWakes, pumpSpins                             metric
	pluginUp, pluginRestarts, pluginState                                   metric
	deviceInfo, deviceState, deviceFailed, deviceHung, deviceOldest         metric
	retired, deviceLosses                                                   metric
	fabric, fabricBytes                                                     metric
	latency                                                                 *prometheus.Desc
}

func newCollector(kind string, a api, devices func(context.Context) ([]device, error)) *Daemon {
	var descs []*prometheus.Desc
	desc := func(name, help string, labels []string) *prometheus.Desc {
		d := prometheus.NewDesc(prometheus.BuildFQName("rnbd", kind, name), help, labels, nil)
		descs = append(descs, d)
		return d
	}
	counter := func(name, help string, labels ...string) metric {
		return metric{desc(name, help, labels), prometheus.CounterValue}
	}
	gauge := func(name, help string, labels ...string) metric {
		return metric{desc(name, help, labels), prometheus.GaugeValue}
	}
	c := &Daemon{
		client: kind == "client", api: a, devices: devices,
		build:          gauge("build_info", "1, with the version of the daemon.", "version"),
		configProblems: gauge("config_problems", "Parts of the configuration that are left out, or 1 when the last reload was refused."),
		conditions:     gauge("condition", "1 for each condition that needs attention now.", "kind", "subject"),
		sessions:       gauge("sessions", "Sessions by state.", "state"),
		pathUp:         gauge("path_connected", "Whether the path takes requests.", "session", "path", "fabric"),
		pathReads:      counter("path_read_requests_total", "READs of the transport; flush and open are some.", "session", "path", "fabric"),
		pathWrites:     counter("path_write_requests_total", "WRITEs of the transport; discard, write zeroes and close are some.", "session", "path", "fabric"),
		pathReadBytes:  counter("path_read_bytes_total", "Data and messages of READs.", "session", "path", "fabric"),
		pathWriteBytes: counter("path_write_bytes_total", "Data and messages of WRITEs.", "session", "path", "fabric"),
		pathInflight:   gauge("path_inflight_requests", "Requests under way.", "session", "path", "fabric"),
		pathReconnects: counter("path_reconnects_total", "Attempts to connect the path again.", "session", "path", "fabric", "result"),
		pathFailovers:  counter("path_failovers_total", "Requests taken over from other paths.", "session", "path", "fabric"),
		pathSecurity:   gauge("path_security_info", "1 for a path whose ends have proved their identities, with the protocol (with challenge nothing is encrypted) and the identity of the other end.", "session", "path", "fabric", "protocol", "cipher", "peer"),
		pathPeerExpiry: gauge("path_peer_expiry_seconds", "End of the validity of the certificate of the path's other end, in seconds since 1970.", "session", "path", "fabric"),
		deviceOpen:     gauge("device_open", "Whether the device takes requests.", "device"),
		deviceSize:     gauge("device_size_bytes", "Size of the device.", "device"),
		deviceRead:     counter("device_read_bytes_total", "Bytes read from the device.", "device"),
		deviceWritten:  counter("device_written_bytes_total", "Bytes written to the device.", "device"),
		deviceUse:      gauge("device_users", "Who have the device open: users of the front end, or sessions.", "device"),
		deviceRun:      gauge("device_inflight_requests", "Requests under way.", "device"),
		pumpLoops:      counter("pump_loops_total", "Looks of a pump at all its sources, as of its last sleep.", "pump"),
		pumpSleeps:     counter("pump_sleeps_total", "Times a pump went to sleep.", "pump"),
		pumpWakes:      counter("pump_wakes_total", "Times a pump woke.", "pump"),
		pumpSpins:      counter("pump_spins_total", "Times a pump looked for work instead of sleeping.", "pump", "result"),
		pluginUp:       gauge("plugin_up", "Whether the plugin runs.", "plugin", "kind"),
		pluginRestarts: counter("plugin_restarts_total", "Times the plugin was started again.", "plugin", "kind"),
		fabric:         counter("fabric_events_total", "Events of a fabric, by its own names.", "fabric", "event", "reason"),
		fabricBytes:    counter("fabric_bytes_total", "Bytes by what a fabric did with them.", "fabric", "what"),
		latency:        desc("request_duration_seconds", "Time of requests in a stage.", []string{"device", "stage", "op"}),
	}
	c.pluginState = gauge("plugin_state", "1 for the state of the plugin, 0 for others.", "plugin", "kind", "state")
	c.deviceState = gauge("device_state", "1 for the state of the device, 0 for others.", "device", "state")
	c.deviceFailed = counter("device_failed_requests_total", "Requests that failed, by the stage that failed them.", "device", "stage", "errno")
	c.deviceHung = gauge("device_hung_requests", "Requests older than the limit of the watchdog, by the stage they wait in.", "device", "stage")
	c.deviceOldest = gauge("device_oldest_hung_request_seconds", "Age of the oldest request that hangs; 0: none.", "device")
	losses := "Times that a flush fails because the kernel reported an error of write-back while no plugin could tell, or because the storage behind a plugin was restarted without its caches."
	if c.client {
		losses = "Times that the server came back without writes that it had acknowledged: a flush fails then."
	}
	c.deviceLosses = counter("device_write_losses_total", losses, "device")
	if c.client {
		c.pathLatency = gauge("path_heartbeat_latency_seconds", "Round trip of the last heartbeat.", "session", "path", "fabric")
	} else {
		c.retired = gauge("session_retired_chunks", "Chunks of lost paths that wait for I/O that does not end.", "session")
	}
	c.deviceInfo = metric{prometheus.NewDesc("rnbd_device_info", "1 for each use of a device. Client and server have the same session and mapping_path.",
		[]string{"device", "session", "mapping_path", "server"}, nil), prometheus.GaugeValue}
	c.descs = append(descs, c.deviceInfo.desc)
	return c
}

// Describe lists all possible metrics.
func (c *Daemon) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		ch <- d
	}
}

// Collect is one scrape.
func (c *Daemon) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := collectTime()
	defer cancel()
	b := newBatch()
	for _, part := range []func(context.Context, *batch) error{c.daemon, c.paths, c.allDevices} {
		if err := part(ctx, b); err != nil {
			ch <- prometheus.NewInvalidMetric(c.build.desc, err)
			return
		}
	}
	b.send(ch)
}

func flag(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

func (c *Daemon) daemon(ctx context.Context, b *batch) error {
	info, err := c.api.Info(ctx, &controlpb.InfoRequest{})
	if err != nil {
		return fmt.Errorf("daemon: %w", err)
	}
	b.add(c.build, 1, info.Version)
	b.add(c.configProblems, float64(len(info.ConfigProblems)))
	holds := map[[2]string]bool{}
	for _, one := range info.Conditions {
		if key := [2]string{one.Kind, one.Subject}; !holds[key] { // one device may have several of a kind
			holds[key] = true
			b.add(c.conditions, 1, one.Kind, one.Subject)
		}
	}
	for _, p := range info.PumpStats {
		b.add(c.pumpLoops, float64(p.Loops), p.Name)
		b.add(c.pumpSleeps, float64(p.Sleeps), p.Name)
		b.add(c.pumpWakes, float64(p.Wakes), p.Name)
		b.add(c.pumpSpins, float64(p.SpinHits), p.Name, "hit")
		b.add(c.pumpSpins, float64(p.SpinMisses), p.Name, "miss")
	}
	for _, p := range info.Plugins {
		b.add(c.pluginUp, flag(p.State == "running"), p.Name, p.Kind)
		b.add(c.pluginRestarts, float64(p.Restarts), p.Name, p.Kind)
		b.addState(c.pluginState, pluginStates, p.State, p.Name, p.Kind)
	}
	for _, f := range info.FabricCounters {
		if f.Bytes {
			b.add(c.fabricBytes, float64(f.Value), f.Fabric, f.Name)
		} else {
			b.add(c.fabric, float64(f.Value), f.Fabric, f.Name, f.Reason)
		}
	}
	return nil
}

func (c *Daemon) paths(ctx context.Context, b *batch) error {
	list, err := c.api.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return fmt.Errorf("sessions: %w", err)
	}
	var names []string
	b.add(c.sessions, 0, "connected")
	b.add(c.sessions, 0, "disconnected")
	for _, s := range list.Sessions {
		names = append(names, s.Name)
		b.add(c.sessions, 1, s.State)
		b.servers[s.Name] = s.ServerName
	}
	name := bounded(names)
	for _, s := range list.Sessions {
		if !c.client {
			b.add(c.retired, float64(s.RetiredChunks), name(s.Name))
		}
		for _, p := range s.Paths {
			labels := []string{name(s.Name), strconv.Itoa(int(p.Id)), p.Fabric}
			if labels[0] == other {
				labels[1] = other
			}
			c.path(ctx, b, p, labels)
		}
	}
	return nil
}

func (c *Daemon) path(ctx context.Context, b *batch, p *controlpb.Path, labels []string) {
	st, err := c.api.PathStats(ctx, &controlpb.PathRequest{Session: p.Session, Id: p.Id})
	if err != nil {
		return // it has gone meanwhile
	}
	b.add(c.pathUp, flag(p.State == "connected"), labels...)
	b.add(c.pathReads, float64(st.ReadCount), labels...)
	b.add(c.pathWrites, float64(st.WriteCount), labels...)
	b.add(c.pathReadBytes, float64(st.ReadBytes), labels...)
	b.add(c.pathWriteBytes, float64(st.WriteBytes), labels...)
	b.add(c.pathInflight, float64(st.Inflight), labels...)
	if c.client {
		b.add(c.pathReconnects, float64(st.Reconnects), append(labels[:3:3], "ok")...)
		b.add(c.pathReconnects, float64(st.ReconnectsFailed), append(labels[:3:3], "failed")...)
		b.add(c.pathFailovers, float64(st.Failovers), labels...)
	}
	if labels[0] == other {
		return // a sum of latencies or of times means nothing
	}
	if c.client { // a server waits for no answer to a heartbeat
		b.add(c.pathLatency, float64(st.LatencyNs)/1e9, labels...)
	}
	if sec := p.Security; sec != nil {
		b.add(c.pathSecurity, 1, append(labels[:3:3], sec.Protocol, sec.Cipher, sec.Peer)...)
		if sec.ExpiresUnixMs != 0 {
			b.add(c.pathPeerExpiry, float64(sec.ExpiresUnixMs)/1e3, labels...)
		}
	}
}
