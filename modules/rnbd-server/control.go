package server

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"sort"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Control returns the daemon's control API. version is the output of `rnbd
// version`.
func (s *Server) Control(version string) controlpb.ServerDaemonServer {
	return &controlAPI{s: s, version: version, journal: control.NewJournal(s.cfg.Journal)}
}

type controlAPI struct {
	controlpb.UnimplementedServerDaemonServer
	s       *Server
	version string
	journal control.Journal
}

func (c *controlAPI) Info(context.Context, *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	info := &controlpb.DaemonInfo{
		Version: c.version, Kind: "server", Pid: int32(os.Getpid()),
		Listen: c.s.boundAddresses(), Pumps: int32(len(c.s.pumps)),
	}
	for _, p := range c.s.plugins {
		info.Plugins = append(info.Plugins, p.describe())
	}
	for _, p := range c.s.pumps {
		info.PumpStats = append(info.PumpStats, control.PumpStats(p.pump))
	}
	for fabric, n := range verbs.Counters(c.s.listenDevices()...) {
		info.FabricCounters = append(info.FabricCounters, &controlpb.FabricCounter{
			Fabric: fabric, Name: n.Name, Reason: n.Reason, Bytes: n.Bytes, Value: n.Value,
		})
	}
	info.FabricCounters = append(info.FabricCounters, c.s.limitCounters()...)
	info.Conditions = c.s.listConditions(info.Plugins)
	return info, nil
}

// listConditions lists what needs attention now.
func (s *Server) listConditions(plugins []*controlpb.Plugin) []*controlpb.Condition {
	var c control.Conditions
	c.AddPlugins(plugins)
	if err := s.cfg.Audit.Failed(); err != nil {
		c.Add(control.AuditLost, "", fmt.Sprintf("%v; records lost: %d", err, s.cfg.Audit.Dropped()))
	}
	for _, d := range s.openDevices() {
		if state := d.stateText(); state != "open" {
			c.Add(control.DeviceFailed, d.path, state)
		}
		c.AddRequests(d.path, control.HungRequests(s.hungRequests(d.path)), s.lastFailure(d.path))
	}
	return c.List
}

func (c *controlAPI) Events(ctx context.Context, r *controlpb.EventsRequest) (*controlpb.EventList, error) {
	return c.journal.Answer(ctx, r), nil
}

func (p *ioPlugin) describe() *controlpb.Plugin {
	st := p.sup.Status()
	return &controlpb.Plugin{
		Name: p.cfg.Name, Kind: "io", Path: p.cfg.Path, State: st.String(), Version: p.info().Version,
		Restarts: int32(st.Restarts), Pid: int32(st.PID), Confined: st.Confined,
	}
}

// ResetPlugin is Server.ResetPlugin.
func (c *controlAPI) ResetPlugin(ctx context.Context, r *controlpb.PluginRequest) (*controlpb.Plugin, error) {
	if err := c.s.ResetPlugin(ctx, r.Name); err != nil {
		return nil, err
	}
	return c.s.pluginByName(r.Name).describe(), nil
}

// ResetPlugin makes a plugin that is given up, or waits for its next start,
// start at once. It waits for the start until ctx ends. The error is ENOENT if
// there is no such plugin.
func (s *Server) ResetPlugin(ctx context.Context, name string) error {
	p := s.pluginByName(name)
	if p == nil {
		return fmt.Errorf("there is no plugin %q: %w", name, syscall.ENOENT)
	}
	if err := p.sup.Reset(); err != nil {
		return err
	}
	if _, err := p.sup.Await(ctx); err != nil {
		return fmt.Errorf("%w (%s)", err, p.sup.Status().LastError)
	}
	return nil
}

func (c *controlAPI) ListDevices(context.Context, *controlpb.ListRequest) (*controlpb.ServerDeviceList, error) {
	byDevice := map[*device]*controlpb.ServerDevice{}
	for i := range c.s.sessions {
		sess := c.s.sessions[i].Load()
		if sess == nil {
			continue
		}
		for _, m := range sess.allMappings() {
			if m.closed.Load() && m.inFlight() == 0 {
				continue
			}
			d := byDevice[m.dev]
			if d == nil {
				d = m.dev.describe()
				d.Hung = control.HungRequests(c.s.hungRequests(m.dev.path))
				byDevice[m.dev] = d
			}
			use := m.describe()
			c.s.describeShare(m, use)
			d.Users = append(d.Users, use)
		}
	}
	list := &controlpb.ServerDeviceList{}
	for _, d := range byDevice {
		list.Devices = append(list.Devices, d)
	}
	sort.Slice(list.Devices, func(i, j int) bool { return list.Devices[i].Path < list.Devices[j].Path })
	return list, nil
}

func (d *device) describe() *controlpb.ServerDevice {
	failed := d.failedRequests()
	out := &controlpb.ServerDevice{
		Name: d.name, Path: d.path, IoMode: d.plugin.cfg.Name, State: d.stateText(),
		Limits:         control.Limits(d.limits.Load()),
		FailedRequests: failed.Sum(),
	}
	if u := d.plugin.server.knownUsage(d.key.id); u != nil {
		out.WriteLosses, out.WritesLost = u.losses.Load(), u.describeLoss()
	}
	return out
}

func (m *mapping) describe() *controlpb.ServerDeviceUse {
	u := &controlpb.ServerDeviceUse{Session: m.session.name, DeviceId: m.id, AccessMode: m.mode.String()}
	for i := range m.flows {
		u.RxSectors += m.flows[i].rx.Load()
		u.TxSectors += m.flows[i].tx.Load()
	}
	return u
}

func (c *controlAPI) ListSessions(context.Context, *controlpb.ListRequest) (*controlpb.SessionList, error) {
	list := &controlpb.SessionList{}
	for i := range c.s.sessions {
		if sess := c.s.sessions[i].Load(); sess != nil && !sess.ended.Load() {
			list.Sessions = append(list.Sessions, sess.describe())
		}
	}
	return list, nil
}

func (s *session) describe() *controlpb.Session {
	out := &controlpb.Session{
		Name: s.name, State: "connected", QueueDepth: uint32(len(s.reqs)), RetiredChunks: uint32(s.transport.Retired()),
		Devices:    uint32(len(s.openMappings())),
		ServerName: hostname(),
	}
	paths := s.transport.Paths()
	out.Hostname = clientHost(s.name, paths)
	for _, p := range paths {
		out.Paths = append(out.Paths, &controlpb.Path{
			Session: s.name, Id: uint32(p.ID), State: p.State.String(), Fabric: p.Fabric, Device: p.Device,
			Src: verbs.AddrPortString(p.Client), Dst: verbs.AddrPortString(p.Server), Connections: uint32(p.Conns),
			RxBytes: p.Stats.WriteBytes, TxBytes: p.Stats.ReadBytes, Inflight: uint64(max(p.Stats.Inflight, 0)),
			LatencyNs: uint64(p.Stats.Latency), HcaPort: uint32(p.Port), ChangingKeys: p.ChangingKeys,
			Security: securityOf(p.Security),
			Name:     pathAddresses(p),
		})
	}
	return out
}

// madeUp matches the names that our clients give to sessions:
// HOST-TOKEN@ADDRESS:PORT with dots replaced.
var madeUp = regexp.MustCompile(`^(.+)-[0-9a-f]{4}@(?:gid:)?[][0-9a-fA-F:-]+:[0-9]+$`)

// clientHost returns a name for the client of a session: the part before the
// @ of a session called client@server, else the client's address.
func clientHost(session string, paths []rtrs.SrvPathInfo) string {
	if m := madeUp.FindStringSubmatch(session); m != nil {
		return m[1]
	}
	if client, _, ok := strings.Cut(session, "@"); ok && client != "" {
		return client
	}
	if len(paths) == 0 {
		return ""
	}
	return verbs.AddrString(paths[0].Client.Addr())
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// CloseDevice closes a device by force: from now on its I/O ends with
// ENOTCONN. Its id stays reserved.
func (c *controlAPI) CloseDevice(_ context.Context, r *controlpb.CloseDeviceRequest) (*controlpb.Empty, error) {
	sess, err := c.s.sessionByName(r.Session)
	if err != nil {
		return nil, err
	}
	m := sess.mappingByID(r.DeviceId)
	if m == nil {
		return nil, fmt.Errorf("session %q has no device %d: %w", r.Session, r.DeviceId, syscall.ENOENT)
	}
	c.s.forceClose(m, "asked for on the control socket")
	return &controlpb.Empty{}, nil
}

// ResizeDevice checks the size of a device now and lists the devices served
// under its name.
func (c *controlAPI) ResizeDevice(ctx context.Context, r *controlpb.DeviceRequest) (*controlpb.ServerDeviceList, error) {
	if err := c.s.Resize(ctx, r.Device); err != nil {
		return nil, err
	}
	all, err := c.ListDevices(ctx, &controlpb.ListRequest{})
	if err != nil {
		return nil, err
	}
	list := &controlpb.ServerDeviceList{}
	for _, d := range all.Devices {
		if d.Name == r.Device || d.Path == r.Device {
			list.Devices = append(list.Devices, d)
		}
	}
	return list, nil
}

func (c *controlAPI) DisconnectSession(ctx context.Context, r *controlpb.SessionRequest) (*controlpb.Empty, error) {
	sess, err := c.s.sessionByName(r.Session)
	if err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, sess.transport.Close(ctx)
}

func (c *controlAPI) DisconnectPath(_ context.Context, r *controlpb.PathRequest) (*controlpb.Empty, error) {
	sess, err := c.s.sessionByName(r.Session)
	if err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, sess.transport.DisconnectPath(int(r.Id))
}

// LogLevels returns the log levels of the daemon's subsystems.
func (c *controlAPI) LogLevels(context.Context, *controlpb.LogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	return c.s.logControl().Levels()
}

// SetLogLevels changes log levels. It changes all that are named or none.
func (c *controlAPI) SetLogLevels(ctx context.Context, r *controlpb.SetLogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	return c.s.logControl().Set(ctx, r.Levels)
}

// logControl controls the log levels of the daemon and its plugins.
func (s *Server) logControl() control.LogControl {
	return control.LogControl{Logs: s.cfg.Logs, Plugins: func(ctx context.Context, level slog.Level) {
		for _, p := range s.plugins {
			p.sup.SetLog(ctx, level)
		}
	}}
}

// securityOf returns nil for a path that is not protected.
func securityOf(s verbs.Security) *controlpb.Security {
	if s.Protocol == "" {
		return nil
	}
	out := &controlpb.Security{Protocol: s.Protocol, Cipher: s.Cipher, Peer: s.Peer, Resumed: s.Resumed}
	if !s.Expires.IsZero() {
		out.ExpiresUnixMs = s.Expires.UnixMilli()
	}
	return out
}
