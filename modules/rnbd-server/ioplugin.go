package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// startPlugins starts all plugins at the same time.
func (s *Server) startPlugins(ctx context.Context) error {
	for i, p := range s.cfg.Plugins {
		if err := s.addPlugin(i, p); err != nil {
			return err
		}
	}
	errs := make([]error, len(s.plugins))
	var starting sync.WaitGroup
	for i, p := range s.plugins {
		starting.Go(func() { errs[i] = p.sup.Start(ctx) })
	}
	starting.Wait()
	return errors.Join(errs...)
}

func (s *Server) addPlugin(i int, cfg PluginConfig) error {
	p := &ioPlugin{
		server: s, cfg: cfg, log: s.log.With("plugin", cfg.Name),
		devices: map[uint32]*device{}, shown: map[*session]*arenaShow{}, mappings: map[*session]int{},
		leaving: map[*session]chan struct{}{}, opens: make(chan struct{}, opensAtOnce),
	}
	profile, err := s.cfg.pluginProfile(cfg.Name)
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
			Configure: cfg.Configure, Logger: s.cfg.subsystemLogger("plugins"),
			Confine: profile, Launcher: s.cfg.Confine.Launcher, SocketDir: s.cfg.SocketDir,
		},
		Launch: s.cfg.Launch, NewRing: s.cfg.NewRing, Entries: s.cfg.RingEntries,
		Crash:    supervise.Limit{Count: s.cfg.CrashLimit, Window: s.cfg.CrashWindow},
		Patience: s.cfg.PluginPatience,
		Logger:   s.log, Journal: s.cfg.Journal, Joined: p.onProcess, Left: p.onProcessLeft, GaveUp: p.gaveUp,
	})
	s.plugins = append(s.plugins, p)
	return nil
}

// pluginProfile returns what the plugin keeps of the daemon's rights; nil: all of them.
// It may open what the jail can resolve to.
func (c *Config) pluginProfile(plugin string) (*confine.Profile, error) {
	p, err := c.Confine.Storage(plugin, commonFolder(c.SearchPath), c.SearchPathLater)
	if p == nil || err != nil {
		return p, err
	}
	for _, pool := range c.Pools {
		p.Files = append(p.Files, confine.Rule{Path: pool.Path, Access: confine.Write})
	}
	return p, nil
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

// stopProcess ends the process in order. Nothing is in flight any more. It takes at
// most a second longer than ctx.
func (p *ioPlugin) stopProcess(ctx context.Context) error {
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
