package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// ioPlugin is one storage plugin and the process that runs it now.
type ioPlugin struct {
	server *Server
	cfg    PluginConfig
	log    *slog.Logger
	queues []*ioQueue  // by pump
	info   plugin.Info // of the first process

	life sync.Mutex // held while queues get or lose their rings; taken before mu

	mu         sync.Mutex // guards the rest; held over calls to the process only where said
	proc       *plugin.Process
	generation uint32
	stopping   bool
	gaveUp     bool
	crashes    []time.Time
	restarts   int
	indices    indices
	devices    map[uint32]*device
	// sessions are those whose arena every next process is shown, with the process
	// that has seen it; nil: none has yet.
	sessions map[*session]*plugin.Process
	wg       sync.WaitGroup // restarts under way
}

// callTimeout bounds control calls to a plugin that do no I/O.
const callTimeout = 10 * time.Second

func (s *Server) startPlugin(ctx context.Context, i int, cfg PluginConfig) error {
	p := &ioPlugin{
		server: s, cfg: cfg, log: s.log.With("plugin", cfg.Name),
		devices: map[uint32]*device{}, sessions: map[*session]*plugin.Process{},
	}
	for pump := range s.pumps {
		p.queues = append(p.queues, &ioQueue{server: s, plugin: p, pump: pump, index: pump*len(s.cfg.Plugins) + i})
	}
	s.plugins = append(s.plugins, p)
	return p.start(ctx)
}

// start launches a process and gives it its rings. Devices and arenas of an
// earlier process are not its business.
func (p *ioPlugin) start(ctx context.Context) error {
	p.mu.Lock()
	p.generation++
	gen := p.generation
	p.mu.Unlock()
	proc, err := p.server.cfg.launch(ctx, plugin.Config{
		Path: p.cfg.Path, Kind: plugin.KindIO, Name: p.cfg.Name, Pumps: len(p.queues), SHA256: p.cfg.SHA256,
		Configure: p.cfg.Configure, Logger: p.server.cfg.logger("plugins"),
		OnExit: func(err error) { p.onExit(gen, err) },
	})
	if err != nil {
		return err
	}
	rings, err := p.attachRings(ctx, proc)
	if err != nil {
		proc.Kill()
		return err
	}
	p.life.Lock()
	p.mu.Lock()
	p.proc = proc
	if gen == 1 {
		p.info = proc.Info()
	}
	p.mu.Unlock()
	for i, q := range p.queues {
		q.resume(rings[i])
	}
	p.life.Unlock()
	select {
	case <-proc.Exited(): // before it was ours, so onExit did not count it
		p.onExit(gen, proc.ExitError())
	default:
	}
	return nil
}

func (p *ioPlugin) attachRings(ctx context.Context, proc *plugin.Process) (rings []*shm.Ring, err error) {
	defer func() {
		if err != nil {
			for _, r := range rings {
				r.Close()
			}
		}
	}()
	for i := range p.queues {
		r, err := p.server.cfg.newRing(p.server.cfg.RingEntries)
		if err != nil {
			return rings, err
		}
		rings = append(rings, r)
		if err := proc.AttachQueue(ctx, i, r); err != nil {
			return rings, fmt.Errorf("plugin %s: ring %d: %w", p.cfg.Name, i, err)
		}
	}
	return rings, nil
}

// process returns the process that runs, or says that none does.
func (p *ioPlugin) process() (*plugin.Process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.gaveUp:
		return nil, fmt.Errorf("plugin %s crashes too often: %w", p.cfg.Name, syscall.EIO)
	case p.proc == nil:
		return nil, fmt.Errorf("plugin %s is being restarted: %w", p.cfg.Name, syscall.EBUSY)
	}
	return p.proc, nil
}

func (p *ioPlugin) failed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gaveUp
}

// state describes the plugin to people.
func (p *ioPlugin) state() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.gaveUp:
		return "failed: crashes too often"
	case p.proc == nil:
		return "restarting"
	}
	return "running"
}

// open opens d in the running process and makes it ready.
func (p *ioPlugin) open(ctx context.Context, d *device) error {
	proc, err := p.process()
	if err != nil {
		return err
	}
	p.mu.Lock()
	gen := p.generation
	d.index, err = p.indices.take(gen)
	p.mu.Unlock()
	if err != nil {
		return fmt.Errorf("open %q in plugin %s: %w", d.name, p.cfg.Name, err)
	}
	limits, err := proc.OpenDisk(ctx, d.request(gen))
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.indices.give(d.index)
		if ctx.Err() != nil { // it may be opened yet
			p.indices.spoil(d.index, p.generation)
		}
		return fmt.Errorf("open %q in plugin %s: %w", d.name, p.cfg.Name, err)
	}
	d.limits.Store(&limits)
	if p.generation != gen || p.proc == nil {
		p.indices.give(d.index)
		return fmt.Errorf("open %q: plugin %s died meanwhile: %w", d.name, p.cfg.Name, syscall.EBUSY)
	}
	p.devices[d.index] = d
	d.ready.Store(true)
	return nil
}

func (d *device) request(generation uint32) plugin.OpenRequest {
	mode := d.mode()
	return plugin.OpenRequest{
		Device: d.index, Name: d.name, File: d.file, Mode: mode,
		ReadOnly: d.key.readOnly, Generation: generation,
	}
}

// close closes d, which has no request in flight. Its index is free again when the
// process has closed it, or has ended.
func (p *ioPlugin) close(d *device) {
	p.mu.Lock()
	delete(p.devices, d.index)
	gen, proc := p.generation, p.proc
	p.mu.Unlock()
	closed := proc == nil
	if proc != nil && d.ready.Load() { // else it is being opened again: reopen1 closes it
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		err := proc.CloseDisk(ctx, d.index)
		if closed = err == nil; !closed {
			p.log.Warn("closing a device failed", "device", d.name, "error", err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.indices.give(d.index)
	if !closed {
		p.indices.spoil(d.index, gen)
	}
}

// attachSession shows the session's chunks to the process, once.
func (p *ioPlugin) attachSession(ctx context.Context, s *session) error {
	s.arenaMu.Lock()
	defer s.arenaMu.Unlock()
	if err := s.gone(); err != nil {
		return err
	}
	proc, err := p.process()
	if err != nil {
		return err
	}
	if err := p.attach(ctx, proc, s); err != nil {
		return fmt.Errorf("plugin %s: memory of session %q: %w", p.cfg.Name, s.name, err)
	}
	return nil
}

// attachAgain is attachSession for a process that follows another one. The session may
// have ended since it was listed: then its arena may be gone, and nothing that is sent
// from now on is in it.
func (p *ioPlugin) attachAgain(ctx context.Context, proc *plugin.Process, s *session) error {
	s.arenaMu.Lock()
	defer s.arenaMu.Unlock()
	p.mu.Lock()
	_, listed := p.sessions[s]
	p.mu.Unlock()
	if !listed || s.ended.Load() {
		return nil
	}
	return p.attach(ctx, proc, s)
}

// attach shows s's arena to proc, if that has not seen it. Caller holds s.arenaMu.
func (p *ioPlugin) attach(ctx context.Context, proc *plugin.Process, s *session) error {
	p.mu.Lock()
	last, listed := p.sessions[s]
	p.sessions[s] = last // a process that follows this one is shown it, whenever this one dies
	p.mu.Unlock()
	if last == proc {
		return nil
	}
	err := proc.AttachArena(ctx, s.index, s.arena)
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil:
		p.sessions[s] = proc
	case !listed:
		delete(p.sessions, s)
	}
	return err
}

// detachSession takes s's arena away from the process, if it has it.
func (p *ioPlugin) detachSession(s *session) {
	s.arenaMu.Lock()
	defer s.arenaMu.Unlock()
	p.mu.Lock()
	last, proc := p.sessions[s], p.proc
	delete(p.sessions, s)
	p.mu.Unlock()
	if last == nil || last != proc {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	if err := proc.DetachArena(ctx, s.index); err != nil {
		p.log.Warn("releasing a session's memory failed", "session", s.name, "error", err)
	}
}

// stop ends the process in order: nothing is in flight any more. A restart that is
// under way may wait for the process that runs, or bring up another one.
func (p *ioPlugin) stop(ctx context.Context) error {
	p.mu.Lock()
	p.stopping = true
	p.mu.Unlock()
	err := p.stopProcess(ctx)
	p.wg.Wait()
	err = errors.Join(err, p.stopProcess(ctx))
	for _, q := range p.queues {
		q.suspend()
	}
	return err
}

// stopProcess stops the process that runs, if there is one.
func (p *ioPlugin) stopProcess(ctx context.Context) error {
	p.mu.Lock()
	proc := p.proc
	p.proc = nil
	p.mu.Unlock()
	if proc == nil {
		return nil
	}
	return proc.Stop(ctx)
}
