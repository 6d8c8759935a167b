package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// ioPlugin is one storage plugin, with its open devices and the sessions whose
// memory it is shown. supervise keeps its process running.
//
// Locks of the package are taken in this order: device.sizeMu, session.arenaMu,
// session.mu, ioPlugin.mu, Server.mu, turns.mu. None is held during a system
// call on a name that a client chose. ioPlugin.mu and Server.mu are held for a
// few lines at a time, never during a call to a plugin or to a pump, and never
// one inside the other. A node's turn is taken before all of them. session.rulesMu
// is taken inside none of them, and none inside it.
type ioPlugin struct {
	server *Server
	cfg    PluginConfig
	log    *slog.Logger
	queues []*ioQueue  // by pump
	info   plugin.Info // of the first process
	sup    *supervise.Supervisor

	life    context.Context // ends with stop
	endLife context.CancelFunc
	opens   chan struct{}  // tokens for devices that are opened again
	work    sync.WaitGroup // goroutines that wait for fences; Add only while in is not nil, or by the supervisor

	mu      sync.Mutex          // guards the rest, and the states of devices
	in      *supervise.Instance // the process that serves; nil: none
	dead    *supervise.Instance // the last process that has ended
	indices indices
	devices map[uint32]*device
	// shown has the sessions with an arena that every new process is shown.
	shown map[*session]*showing
	// mappings is how many the sessions have, leaving is closed when the process has let go
	// of the arena of a session that has none left.
	mappings map[*session]int
	leaving  map[*session]chan struct{}
}

// callTimeout bounds control calls to a plugin that do no I/O.
const callTimeout = 10 * time.Second

func (s *Server) startPlugin(ctx context.Context, i int, cfg PluginConfig) error {
	p := &ioPlugin{
		server: s, cfg: cfg, log: s.log.With("plugin", cfg.Name),
		devices: map[uint32]*device{}, shown: map[*session]*showing{}, mappings: map[*session]int{},
		leaving: map[*session]chan struct{}{}, opens: make(chan struct{}, opensAtOnce),
	}
	profile, err := s.cfg.profile(cfg.Name)
	if err != nil {
		return fmt.Errorf("plugin %s: %w", cfg.Name, err)
	}
	p.life, p.endLife = context.WithCancel(context.Background())
	for pump := range s.pumps {
		p.queues = append(p.queues, &ioQueue{server: s, plugin: p, pump: pump, index: pump*len(s.cfg.Plugins) + i})
	}
	p.sup = supervise.New(supervise.Config{
		Plugin: plugin.Config{
			Path: cfg.Path, Kind: plugin.KindIO, Name: cfg.Name, Pumps: len(p.queues), SHA256: cfg.SHA256,
			Configure: cfg.Configure, Logger: s.cfg.logger("plugins"),
			Confine: profile, Launcher: s.cfg.Confine.Launcher,
		},
		Launch: s.cfg.Launch, NewRing: s.cfg.NewRing, Entries: s.cfg.RingEntries,
		Crash:  supervise.Limit{Count: s.cfg.CrashLimit, Window: s.cfg.CrashWindow},
		Logger: s.log, Journal: s.cfg.Journal, Joined: p.joined, Left: p.left, GaveUp: p.gaveUp,
	})
	s.plugins = append(s.plugins, p)
	return p.sup.Start(ctx)
}

// profile returns what the plugin keeps of the daemon's rights; nil: all of them.
// It may open what the jail can resolve to.
func (c *Config) profile(plugin string) (*confine.Profile, error) {
	return c.Confine.Storage(plugin, commonFolder(c.SearchPath), c.SearchPathLater)
}

// commonFolder returns the folder that the search path of each session is below.
func commonFolder(searchPath string) string {
	if before, _, found := strings.Cut(searchPath, sessionMarker); found {
		searchPath = strings.TrimRight(before, "/") + "/"
	}
	if before, _, found := strings.Cut(searchPath, identityMarker); found {
		searchPath = before[:strings.LastIndex(before, "/")+1]
		if searchPath == "" {
			searchPath = "."
		}
	}
	return searchPath
}

// open opens d in the running process.
func (p *ioPlugin) open(ctx context.Context, d *device) error {
	in, err := p.sup.Current()
	if err != nil {
		return err
	}
	p.mu.Lock()
	d.index, err = p.indices.take(in.Generation)
	p.mu.Unlock()
	if err != nil {
		return fmt.Errorf("open %q in plugin %s: %w", d.name, p.cfg.Name, err)
	}
	limits, err := in.OpenDisk(ctx, d.request(in.Generation))
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.indices.give(d.index)
		if ctx.Err() != nil { // the process may open it later
			p.indices.spoil(d.index, in.Generation)
		}
		return fmt.Errorf("open %q in plugin %s: %w", d.name, p.cfg.Name, err)
	}
	if p.in != in {
		p.indices.give(d.index)
		return fmt.Errorf("open %q: plugin %s died meanwhile: %w", d.name, p.cfg.Name, syscall.EBUSY)
	}
	d.limits.Store(&limits)
	p.devices[d.index] = d
	d.move(devOpen)
	return nil
}

func (d *device) request(generation uint32) plugin.OpenRequest {
	mode := d.mode()
	return plugin.OpenRequest{
		Device: d.index, Name: d.name, File: d.file, Mode: mode,
		ReadOnly: d.key.readOnly, Generation: generation,
	}
}

// close closes d. It has no request in flight. Its index is free again when the
// process has closed it, or has ended. If the process is opening it again, it
// is closed afterwards (revive).
func (p *ioPlugin) close(d *device) {
	p.mu.Lock()
	delete(p.devices, d.index)
	was, in := d.now(), p.in
	d.move(devClosed)
	p.mu.Unlock()
	closed := in == nil
	if in != nil && was == devOpen {
		ctx, cancel := context.WithTimeout(in.Context(), callTimeout)
		defer cancel()
		err := in.CloseDisk(ctx, d.index)
		if closed = err == nil || in.Context().Err() != nil; !closed {
			p.log.Warn("closing a device failed", "device", d.name, "err", err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.indices.give(d.index)
	if !closed {
		p.indices.spoil(d.index, in.Generation)
	}
}

// closeDisk closes a device that no mapping uses any more in the process.
func (p *ioPlugin) closeDisk(in *supervise.Instance, d *device) error {
	ctx, cancel := context.WithTimeout(in.Context(), callTimeout)
	defer cancel()
	err := in.CloseDisk(ctx, d.index)
	if errors.Is(err, blk.ENODEV) {
		return nil
	}
	return err
}

// stop ends the process in order. Nothing is in flight any more. It takes at
// most a second longer than ctx.
func (p *ioPlugin) stop(ctx context.Context) error {
	p.endLife()
	err := p.sup.Stop(ctx)
	waitFor(ctx, &p.work)
	return err
}

// waitFor waits for a group until ctx ends.
func waitFor(ctx context.Context, group *sync.WaitGroup) {
	done := make(chan struct{})
	go func() { group.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
	}
}
