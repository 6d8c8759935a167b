package server

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// twoPlugins gives a rig another plugin beside its own, that serves the names below
// "other/".
func twoPlugins(launch supervise.Launch) func(*Config) {
	return func(cfg *Config) {
		own := cfg.Launch
		cfg.Plugins = append(cfg.Plugins, PluginConfig{Name: "other", Path: "in process"})
		cfg.Rules = append([]Rule{{Glob: "other/*", Plugin: "other"}}, cfg.Rules...)
		cfg.Launch = func(ctx context.Context, c plugin.Config) (supervise.Process, error) {
			if c.Name == "other" {
				return launch(ctx, c)
			}
			return own(ctx, c)
		}
	}
}

// A plugin that is silent at its start does not keep the server from serving the devices
// of others. Its own devices wait for it.
func TestPluginIsSilentAtTheStart(t *testing.T) {
	mem, slow := newMemory(), newMemory()
	mem.add("vol", 1<<20)
	slow.add("other/vol", 1<<20)
	speak := make(chan struct{})
	r := newRig(t, mem, func(cfg *Config) { cfg.PluginPatience = 20 * time.Millisecond }, twoPlugins(func(ctx context.Context, c plugin.Config) (supervise.Process, error) {
		select {
		case <-speak:
			return plugin.LaunchInProcess(ctx, c, slow)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}))
	i := r.connect("s")
	if _, err := i.open("vol", blk.ReadWrite); err != nil {
		t.Errorf("open: %v", err)
	}
	list := r.server.listConditions(nil)
	for _, p := range r.server.plugins {
		if d := p.describe(); d.Name == "other" && d.State != "restarting" || d.Name == "memory" && d.State != "running" {
			t.Errorf("plugin %v, conditions %v", d, list)
		}
	}
	opened := make(chan error, 1)
	go func() { _, err := i.open("other/vol", blk.ReadWrite); opened <- err }()
	select {
	case err := <-opened:
		t.Errorf("open without a plugin: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	close(speak)
	if err := <-opened; err != nil {
		t.Errorf("open when the plugin runs: %v", err)
	}
}

// A plugin that hangs uses up the time of a stop. The others end in order all the same.
func TestServerCloses_OtherPluginsEndInOrder(t *testing.T) {
	mem, good := newMemory(), newMemory()
	mem.add("vol", 1<<20)
	var mu sync.Mutex
	var proc *plugin.Process
	r := newRig(t, mem, twoPlugins(func(ctx context.Context, c plugin.Config) (supervise.Process, error) {
		p, err := plugin.LaunchInProcess(ctx, c, good)
		mu.Lock()
		defer mu.Unlock()
		proc = p
		return p, err
	}))
	i := r.connect("s")
	dev, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	i.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
	eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })
	r.closed = true
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := r.server.Close(ctx); err == nil {
		t.Error("close is content, though a request had not ended")
	}
	mu.Lock()
	defer mu.Unlock()
	if err := proc.ExitError(); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("the plugin without requests has ended with %v", err)
	}
}
