package client

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Control returns the daemon's control API. version is the output of `rnbd
// version`.
func (c *Client) Control(version string) controlpb.ClientDaemonServer {
	return &controlAPI{c: c, version: version, journal: control.NewJournal(c.cfg.Journal)}
}

type controlAPI struct {
	controlpb.UnimplementedClientDaemonServer
	c       *Client
	version string
	journal control.Journal
}

func (a *controlAPI) Info(context.Context, *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	info := &controlpb.DaemonInfo{Version: a.version, Kind: "client", Pid: int32(os.Getpid()), Pumps: int32(len(a.c.pumps))}
	for _, f := range a.c.frontends {
		info.Plugins = append(info.Plugins, f.describe())
		for _, s := range f.sockets {
			info.Listen = append(info.Listen, s.name)
		}
	}
	for _, p := range a.c.pumps {
		info.PumpStats = append(info.PumpStats, control.PumpStats(p.pump))
	}
	for fabric, n := range verbs.Counters(a.c.allFabrics()...) {
		info.FabricCounters = append(info.FabricCounters, &controlpb.FabricCounter{
			Fabric: fabric, Name: n.Name, Reason: n.Reason, Bytes: n.Bytes, Value: n.Value,
		})
	}
	info.Conditions = a.c.listConditions(info.Plugins)
	return info, nil
}

// listConditions lists what needs attention now.
func (c *Client) listConditions(plugins []*controlpb.Plugin) []*controlpb.Condition {
	var out control.Conditions
	out.AddPlugins(plugins)
	out.AddSessions(c.describeSessions())
	for _, d := range c.Devices() {
		d.mu.Lock()
		state, why := d.state, d.lastError
		d.mu.Unlock()
		if state == Closed {
			out.Add(control.DeviceClosed, d.name, strings.TrimSuffix(state.String()+": "+why, ": "))
		}
		out.AddRequests(d.name, control.HungRequests(c.hungRequests(d)), c.lastFailure(d))
	}
	for _, d := range c.describeWaiting() {
		out.Add(control.DeviceClosed, d.Name, strings.TrimSuffix(d.State+": "+d.LastError, ": "))
	}
	return out.List
}

func (a *controlAPI) Events(ctx context.Context, r *controlpb.EventsRequest) (*controlpb.EventList, error) {
	return a.journal.Answer(ctx, r), nil
}

func (f *frontend) describe() *controlpb.Plugin {
	st := f.sup.Status()
	d := &controlpb.Plugin{Name: f.cfg.Name, Kind: "frontend", Path: f.cfg.Path, State: st.String(), Restarts: int32(st.Restarts)}
	if st.State == supervise.Running {
		d.Pid, d.Version, d.Confined = int32(st.PID), f.sup.Info().Version, st.Confined
	}
	return d
}

func (a *controlAPI) Map(ctx context.Context, r *controlpb.MapRequest) (*controlpb.ClientDevice, error) {
	req := MapRequest{
		Path: r.Path, Session: r.Session, Paths: r.Paths, Mode: blk.ReadWrite,
		Frontend: r.Frontend, Loss: a.c.cfg.Loss, Name: r.Name, Options: r.Options, IOMode: r.IoMode,
	}
	if r.AccessMode != "" {
		mode, ok := blk.ParseAccessMode(r.AccessMode)
		if !ok {
			return nil, fmt.Errorf("access mode %q: use ro, rw or migration: %w", r.AccessMode, syscall.EINVAL)
		}
		req.Mode = mode
	}
	if r.Loss != "" {
		loss, err := ParseLoss(r.Loss)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", err, syscall.EINVAL)
		}
		req.Loss = loss
	}
	d, err := a.c.Map(ctx, req)
	if err != nil {
		return nil, err
	}
	return d.describeNow(ctx), nil
}

func (a *controlAPI) MapLine(ctx context.Context, r *controlpb.MapLineRequest) (*controlpb.ClientDevice, error) {
	l, err := mapline.Parse(r.Line, rtrs.PossibleCPUs())
	if err != nil {
		return nil, err
	}
	req := requestOf(l)
	req.Loss = a.c.cfg.Loss
	d, err := a.c.Map(ctx, req)
	if err != nil {
		return nil, err
	}
	return d.describeNow(ctx), nil
}

func (a *controlAPI) Resize(ctx context.Context, r *controlpb.ResizeRequest) (*controlpb.ClientDevice, error) {
	if r.Size%blk.SectorSize != 0 {
		return nil, fmt.Errorf("resize %q: %d bytes are no whole number of sectors of %d: %w", r.Device, r.Size, blk.SectorSize, syscall.EINVAL)
	}
	if err := a.withinExport(r); err != nil {
		return nil, err
	}
	if err := a.c.Resize(r.Device, r.Size/blk.SectorSize); err != nil {
		return nil, err
	}
	d, err := a.c.Device(r.Device)
	if err != nil {
		return nil, err
	}
	return d.describeNow(ctx), nil
}

// withinExport refuses a size beyond that of the server, since every request
// there would fail. Control files allow it, as the kernel's do.
func (a *controlAPI) withinExport(r *controlpb.ResizeRequest) error {
	d, err := a.c.Device(r.Device)
	if err != nil {
		return fmt.Errorf("resize %q: %w", r.Device, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if r.Size > d.served {
		return fmt.Errorf("resize %s: %d bytes are more than the %d that the server exports: resize changes what users see here only, grow the export on the server: %w", d.name, r.Size, d.served, syscall.EINVAL)
	}
	return nil
}

func (a *controlAPI) Unmap(ctx context.Context, r *controlpb.UnmapRequest) (*controlpb.Empty, error) {
	return &controlpb.Empty{}, a.c.Unmap(ctx, r.Device, r.Force)
}

func (a *controlAPI) Remap(ctx context.Context, r *controlpb.RemapRequest) (*controlpb.ClientDevice, error) {
	remap := a.c.Remap
	switch {
	case r.Force:
		remap = a.c.RemapByForce
	case r.AcceptNew:
		remap = a.c.RemapNew
	}
	d, err := remap(ctx, r.Device)
	if err != nil {
		return nil, err
	}
	if d == nil {
		return &controlpb.ClientDevice{Name: r.Device, State: Closed.String()}, nil
	}
	return d.describeNow(ctx), nil
}

func (a *controlAPI) ListDevices(ctx context.Context, r *controlpb.ListRequest) (*controlpb.ClientDeviceList, error) {
	devices := a.c.Devices()
	list := &controlpb.ClientDeviceList{Devices: make([]*controlpb.ClientDevice, len(devices))}
	if r.GetBrief() {
		for i, d := range devices {
			list.Devices[i] = d.describe(plugin.DeviceStatus{Location: d.Location()})
		}
		list.Devices = append(list.Devices, a.c.describeWaiting()...)
		return list, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askFrontends)
	defer cancel()
	var next atomic.Int64
	var asking sync.WaitGroup
	for range min(len(devices), askAtOnce) {
		asking.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(devices)); i = next.Add(1) - 1 {
				list.Devices[i] = devices[i].describeNow(ctx)
			}
		})
	}
	asking.Wait()
	list.Devices = append(list.Devices, a.c.describeWaiting()...)
	return list, nil
}

// Listing devices asks front ends for their users, a bounded number at a
// time. A front end that does not answer in time is left out.
const (
	askAtOnce    = 8
	askFrontends = 2 * time.Second
)

// describeNow asks the front end for the users of d.
func (d *Device) describeNow(ctx context.Context) *controlpb.ClientDevice {
	if fe := d.fe.Load(); fe != nil {
		return d.describe(fe.deviceStatus(ctx, d))
	}
	return d.describe(plugin.DeviceStatus{})
}

// describe returns the message about d. st is the status at its front end.
func (d *Device) describe(st plugin.DeviceStatus) *controlpb.ClientDevice {
	l := d.Limits()
	out := &controlpb.ClientDevice{
		Name: d.name, Index: d.index, Path: d.path, Session: d.session.name, AccessMode: d.mode.String(),
		Frontend: "none", Loss: d.loss.String(), DeviceId: d.id.Load(), Inflight: uint64(d.inFlight()),
		Options: d.options,
		Limits:  control.Limits(&l),
	}
	for i := range d.shares {
		out.RxSectors += d.shares[i].rx.Load()
		out.TxSectors += d.shares[i].tx.Load()
	}
	if fe := d.fe.Load(); fe != nil {
		out.Frontend, out.Openers, out.Endpoint = fe.cfg.Name, uint32(st.Openers), st.Location
		out.Frontend = frontendAsAsked(fe.cfg.Name, st.Location)
	}
	failed := d.failedRequests()
	out.FailedRequests, out.Hung = failed.Sum(), control.HungRequests(d.client.hungRequests(d))
	d.mu.Lock()
	defer d.mu.Unlock()
	out.State, out.LastError = d.state.String(), d.lastError
	out.OpensAgain = d.state == Closed && !d.needsRemap && (!d.expired || st.Openers == 0 && out.Frontend != "")
	if d.patience != nil {
		out.FailsUnixMs = d.patienceEnds.UnixMilli()
	}
	out.ExportedSize, out.IoMode = d.served, d.ioMode
	out.PassedOver = d.passedOver
	out.WritesLost, out.WriteLosses = d.lossText(), d.losses
	return out
}

func (a *controlAPI) ListSessions(context.Context, *controlpb.ListRequest) (*controlpb.SessionList, error) {
	return &controlpb.SessionList{Sessions: a.c.describeSessions()}, nil
}

func (c *Client) describeSessions() (all []*controlpb.Session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.sessions {
		all = append(all, s.describe())
	}
	return all
}

// describe is called with Client.mu held.
func (s *session) describe() *controlpb.Session {
	out := &controlpb.Session{
		Name: s.name, State: "disconnected", Policy: s.transport.Policy().String(), Devices: uint32(len(s.devices)),
		QueueDepth: uint32(s.transport.QueueDepth()), MaxIoSize: uint32(s.transport.MaxIOSize()),
		MaxReconnectAttempts: int32(s.transport.Timing().MaxReconnectAttempts),
	}
	if s.transport.Connected() {
		out.State = "connected"
	}
	for _, p := range s.transport.Paths() {
		out.Paths = append(out.Paths, s.describePath(p))
	}
	out.Hostname = s.serverHost(out.Paths)
	out.ServerName = out.Hostname
	return out
}

// serverHost names the server. By custom a session is called client@server.
// Otherwise, and if this client has chosen the name itself, it is the
// server's address.
func (s *session) serverHost(paths []*controlpb.Path) string {
	_, server, ok := strings.Cut(s.name, "@")
	if ok && server != "" && !s.hasDefaultName() {
		return server
	}
	if len(paths) == 0 {
		return ""
	}
	addr, ok := mapline.ParseDst(paths[0].Dst)
	if !ok {
		return ""
	}
	return verbs.AddrString(addr.Addr())
}

func (s *session) describePath(p rtrs.PathInfo) *controlpb.Path {
	out := &controlpb.Path{
		Session: s.name, Id: uint32(p.ID), State: p.State.String(), Fabric: p.Fabric,
		Device: p.Device, Dst: verbs.AddrPortString(p.Addr.Dst), Connections: uint32(s.transport.Queues() + 1),
		RxBytes: p.Stats.ReadBytes, TxBytes: p.Stats.WriteBytes, Inflight: uint64(max(p.Stats.Inflight, 0)),
		Reconnects: p.Stats.Reconnects, Failovers: p.Stats.Failovers, LatencyNs: uint64(p.Stats.Latency),
	}
	out.HcaPort = uint32(p.Port)
	out.Security = securityOf(p.Security)
	out.Name = pathText(p)
	if p.Src.IsValid() {
		out.Src = verbs.AddrString(p.Src)
	}
	if p.Err != nil {
		out.LastError = p.Err.Error()
	}
	return out
}

func (a *controlAPI) findSession(name string) (*session, error) {
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	if s := a.c.sessions[name]; s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("there is no session %q: %w", name, syscall.ENOENT)
}

func (a *controlAPI) AddPath(ctx context.Context, r *controlpb.AddPathRequest) (*controlpb.Path, error) {
	s, err := a.findSession(r.Session)
	if err != nil {
		return nil, err
	}
	addrs, err := a.c.pathAddresses(ctx, []string{r.Path})
	if err != nil {
		return nil, err
	}
	id, err := s.addPath(ctx, r.Path, addrs[0])
	if err != nil {
		return nil, withPathHint(addrs, err)
	}
	return s.pathNumbered(id), nil
}

func (a *controlAPI) RemovePath(ctx context.Context, r *controlpb.PathRequest) (*controlpb.Empty, error) {
	s, err := a.findSession(r.Session)
	if err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, s.removePath(ctx, int(r.Id), r.Force)
}

func (a *controlAPI) ReaddPath(ctx context.Context, r *controlpb.PathRequest) (*controlpb.Path, error) {
	s, err := a.findSession(r.Session)
	if err != nil {
		return nil, err
	}
	id, err := s.readdPath(ctx, int(r.Id))
	if err != nil {
		return nil, err
	}
	return s.pathNumbered(id), nil
}

// pathNumbered describes the path of an id.
func (s *session) pathNumbered(id int) *controlpb.Path {
	for _, p := range s.transport.Paths() {
		if p.ID == id {
			return s.describePath(p)
		}
	}
	return &controlpb.Path{Session: s.name, Id: uint32(id)}
}

func (a *controlAPI) DisconnectPath(ctx context.Context, r *controlpb.PathRequest) (*controlpb.Empty, error) {
	return a.onPath(r, func(s *rtrs.Session) error { return s.DisconnectPath(ctx, int(r.Id)) })
}

func (a *controlAPI) ReconnectPath(ctx context.Context, r *controlpb.PathRequest) (*controlpb.Empty, error) {
	return a.onPath(r, func(s *rtrs.Session) error { return s.ReconnectPath(ctx, int(r.Id)) })
}

func (a *controlAPI) onPath(r *controlpb.PathRequest, do func(*rtrs.Session) error) (*controlpb.Empty, error) {
	s, err := a.findSession(r.Session)
	if err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, do(s.transport)
}

func (a *controlAPI) SetPolicy(_ context.Context, r *controlpb.SetPolicyRequest) (*controlpb.Empty, error) {
	s, err := a.findSession(r.Session)
	if err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, s.setPolicy(r.Policy)
}

func (a *controlAPI) SetMaxReconnectAttempts(_ context.Context, r *controlpb.SetMaxReconnectAttemptsRequest) (*controlpb.Empty, error) {
	s, err := a.findSession(r.Session)
	if err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, s.setMaxReconnects(int(r.Attempts))
}

// LogLevels returns the log levels of the daemon's subsystems.
func (a *controlAPI) LogLevels(context.Context, *controlpb.LogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	return a.c.logControl().Levels()
}

// SetLogLevels changes log levels. It changes all that are named or none.
func (a *controlAPI) SetLogLevels(ctx context.Context, r *controlpb.SetLogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	return a.c.logControl().Set(ctx, r.Levels)
}

// logControl controls the log levels of the daemon and its plugins.
func (c *Client) logControl() control.LogControl {
	return control.LogControl{Logs: c.cfg.Logs, Plugins: func(ctx context.Context, level slog.Level) {
		var told sync.WaitGroup
		for _, f := range c.frontends {
			told.Go(func() { f.sup.SetLog(ctx, level) })
		}
		told.Wait()
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
