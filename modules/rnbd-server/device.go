package server

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
)

// choosePlugin returns the plugin for name: that of the first rule that
// matches, else the one that the client asks for. If it returns nil, the kind
// of node decides. EINVAL: the plugin asked for is not offered. EPERM: a rule
// demands another one.
func (s *Server) choosePlugin(ctx context.Context, name, wish string) (*ioPlugin, error) {
	ruled := s.pluginByRule(name)
	if wish == "" {
		return ruled, nil
	}
	p := s.pluginByName(wish)
	if p == nil {
		return nil, notOffered(name, wish)
	}
	switch info, err := p.described(ctx); {
	case err != nil:
		return nil, fmt.Errorf("open %q: %w", name, err)
	case info.Names != plugin.NamesPath: // the operator alone chooses a plugin that makes devices of names
		return nil, notOffered(name, wish)
	}
	if ruled != nil && ruled != p {
		return nil, fmt.Errorf("open %q: the server's rules say io mode %s, not %s: %w", name, ruled.cfg.Name, wish, syscall.EPERM)
	}
	return p, nil
}

func notOffered(name, wish string) error {
	return fmt.Errorf("open %q: io mode %q is not offered to clients: %w", name, wish, syscall.EINVAL)
}

// pluginByRule returns the plugin of the first rule that matches name, nil if none does.
func (s *Server) pluginByRule(name string) *ioPlugin {
	clean := path.Clean("/" + name)[1:]
	for _, r := range s.cfg.Rules {
		if r.matches(clean) {
			return s.pluginByName(r.Plugin)
		}
	}
	return nil
}

// matches reports whether the rule is for the clean name. In a pattern with a slash a
// "*" stands for no slash, as in path.Match; one without is for whole names.
func (r *Rule) matches(name string) bool {
	if !strings.Contains(r.Glob, "/") {
		name = strings.ReplaceAll(name, "/", "\x00")
	}
	ok, _ := path.Match(r.Glob, name)
	return ok
}

// pluginForNode returns the plugin for a node if no rule matches, nil if there is none.
// It waits for a plugin that does not run yet if no other one serves the node.
func (s *Server) pluginForNode(ctx context.Context, n *node) (*ioPlugin, error) {
	want := plugin.RegularFiles
	if n.block {
		want = plugin.BlockDevices
	}
	for _, p := range s.plugins {
		if info := p.info(); info.Names == plugin.NamesPath && info.Matches&want != 0 {
			return p, nil
		}
	}
	for _, p := range s.plugins {
		switch info, err := p.described(ctx); {
		case err != nil:
			return nil, err
		case info.Names == plugin.NamesPath && info.Matches&want != 0:
			return p, nil
		}
	}
	return nil, nil
}

func (s *Server) pluginByName(name string) *ioPlugin {
	for _, p := range s.plugins {
		if p.cfg.Name == name {
			return p
		}
	}
	return nil
}

// acquireDevice returns the device of a node and opens it in the plugin if it is not
// open. It takes over the node's descriptor. The caller holds the nodeLock, so
// that a node is not opened twice at once. wished reports whether the client
// asked for p.
func (s *Server) acquireDevice(ctx context.Context, n *node, p *ioPlugin, wished bool, name string, mode blk.AccessMode) (*device, error) {
	key := deviceKey{n.id, mode == blk.ReadOnly}
	if d := s.shareDevice(key); d != nil {
		n.close()
		if err := d.checkShareable(p, wished); err != nil {
			s.releaseDevice(d)
			return nil, fmt.Errorf("open %q: %w", name, err)
		}
		return d, nil
	}
	g, err := s.guardNode(ctx, key, n, p)
	if err != nil {
		n.close()
		return nil, fmt.Errorf("open %q: %w", name, err)
	}
	d := &device{key: key, name: name, path: n.path, file: n.file, plugin: p, guard: g, users: 1,
		latency: make([]pumpLatencies, len(s.pumps)), failures: make([]watchdog.Failures, len(s.pumps)), loads: make([]pumpLoad, len(s.pumps)),
		extentsToken: make(chan struct{}, 1)}
	d.volume, d.diskSeq = n.volume, n.diskSeq
	d.nodeSize = n.size // before the plugin looks, so that no change goes unseen
	if err := p.openDevice(ctx, d); err != nil {
		if errors.Is(err, syscall.EIO) && !key.readOnly { // it may be one of write-back, and the kernel reports it once
			s.historyOf(key.id).flushes.add(blk.EIO)
		}
		s.giveGuard(key, g)
		n.close()
		return nil, err
	}
	s.mu.Lock()
	s.devices[key] = d
	s.mu.Unlock()
	if s.leaving.Load() && p.info().Crash == plugin.LosesAll { // after it is in the table, see HandOver
		s.releaseDevice(d)
		return nil, fmt.Errorf("open %q: the server hands over to its next process: %w", name, syscall.EBUSY)
	}
	s.noteNode(d)
	return d, nil
}

// shareDevice returns the device of key for one more user. It returns nil if there is
// none, or if it has failed for good.
func (s *Server) shareDevice(key deviceKey) *device {
	s.mu.Lock()
	d := s.devices[key]
	s.mu.Unlock()
	if d == nil || d.isLost() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.devices[key] != d { // closed meanwhile
		return nil
	}
	d.users++
	return d
}

// checkShareable returns the error of an OPEN that would share d.
func (d *device) checkShareable(p *ioPlugin, wished bool) error {
	switch now := d.currentState(); {
	case wished && d.plugin != p:
		return fmt.Errorf("it is open with io mode %s: %w", d.plugin.cfg.Name, syscall.EBUSY)
	case now == devStuck:
		return fmt.Errorf("the device waits for the I/O of a dead plugin: %w", syscall.EBUSY)
	case d.isFailing():
		return fmt.Errorf("%s: %w", d.stateText(), syscall.EIO)
	}
	return nil
}

// checkIdle returns EBUSY while requests of lost paths have not ended: they could
// overwrite the client's next writes.
func (d *device) checkIdle() error {
	if n := d.retired.Load(); n > 0 {
		return fmt.Errorf("%d requests of lost paths do not end: %w", n, syscall.EBUSY)
	}
	return nil
}

// nodeBusy returns EBUSY if busy does for any opening of the node.
func (s *Server) nodeBusy(id nodeID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, d := range s.devices {
		if key.id != id {
			continue
		}
		if err := d.checkIdle(); err != nil {
			return err
		}
	}
	return nil
}

// releaseDevice ends one use of d. The last one closes d.
func (s *Server) releaseDevice(d *device) {
	s.mu.Lock()
	d.users--
	last := d.users == 0
	if last && s.devices[d.key] == d {
		delete(s.devices, d.key)
	}
	s.mu.Unlock()
	if last {
		d.plugin.close(d)
		s.giveGuard(d.key, d.guard)
		if d.file != nil {
			d.file.Close()
		}
	}
}

func (n *node) close() {
	if n.file != nil {
		n.file.Close()
	}
}
