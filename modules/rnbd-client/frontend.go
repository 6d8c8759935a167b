package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// frontend is one front-end plugin and the process that runs it now.
type frontend struct {
	client *Client
	cfg    FrontendConfig
	log    *slog.Logger
	// sockets are the daemon's, so that users of a dead plugin wait in the
	// backlog instead of being refused.
	sockets []socket

	mu         sync.Mutex
	proc       *plugin.Process
	generation uint32
	sources    []*source // of proc, by pump
	rings      []*shm.Ring
	devices    map[uint32]*Device
	lingering  map[uint32]bool    // by index: removed by force, and not gone yet
	showing    map[*Device]int    // that a new process is being shown, which uses their memory
	missing    map[*Device]uint32 // that the process of that generation has not taken over yet
	stopping   bool
	restarts   int
	lastStart  time.Time
	lastError  string
	wg         sync.WaitGroup // of starts; Add only with mu held and not stopping

	starts   context.Context // ends when no process is to be started any more
	noStarts context.CancelFunc
	life     context.Context // ends with stop
	endLife  context.CancelFunc
	orphans  sync.WaitGroup // requests of earlier processes
	leaving  sync.WaitGroup // of lingering; Add only with mu held and not stopping
}

const callTimeout = 10 * time.Second

func (c *Client) startFrontend(ctx context.Context, cfg FrontendConfig) error {
	f := &frontend{client: c, cfg: cfg, log: c.log.With("frontend", cfg.Name), devices: map[uint32]*Device{}, lingering: map[uint32]bool{}, showing: map[*Device]int{}, missing: map[*Device]uint32{}}
	f.life, f.endLife = context.WithCancel(context.Background())
	f.starts, f.noStarts = context.WithCancel(f.life)
	c.frontends = append(c.frontends, f)
	for _, l := range cfg.Listen {
		s, err := listen(l)
		if err != nil {
			return fmt.Errorf("front end %s: %w", cfg.Name, err)
		}
		f.sockets = append(f.sockets, s)
	}
	return f.start(ctx)
}

// start launches a process and gives it rings, the devices and, last, the
// sockets: whoever waits in their backlog must find the device.
func (f *frontend) start(ctx context.Context) error {
	f.mu.Lock()
	f.generation++
	gen := f.generation
	f.lastStart = time.Now()
	f.mu.Unlock()
	proc, err := plugin.Launch(ctx, plugin.Config{
		Path: f.cfg.Path, Kind: plugin.KindFrontend, Name: f.cfg.Name, Pumps: len(f.client.pumps), SHA256: f.cfg.SHA256,
		Configure: f.cfg.Configure, Logger: f.client.cfg.logger("plugins"),
		OnExit: func(err error) { f.onExit(gen, err) },
	})
	if err != nil {
		return err
	}
	if err := f.attach(ctx, proc, gen); err != nil {
		proc.Kill()
		f.detach()
		return err
	}
	f.mu.Lock()
	f.proc = proc
	devices := slices.Collect(maps.Values(f.devices))
	f.mu.Unlock()
	for _, d := range devices {
		f.retell(d)
	}
	select {
	case <-proc.Exited(): // before it was ours, so onExit did not count it
		f.onExit(gen, proc.ExitError())
	default:
	}
	return nil
}

// attach joins the process with every pump, and then with users.
func (f *frontend) attach(ctx context.Context, proc *plugin.Process, gen uint32) error {
	for _, p := range f.client.pumps {
		ring, err := shm.NewRing(f.client.cfg.RingEntries)
		if err != nil {
			return err
		}
		f.rings = append(f.rings, ring)
		if err := proc.AttachQueue(ctx, p.index, ring); err != nil {
			return fmt.Errorf("front end %s: ring %d: %w", f.cfg.Name, p.index, err)
		}
		s := newSource(p, f, ring.Completer(), ring.Entries())
		f.sources = append(f.sources, s)
		if err := p.add(s); err != nil {
			return err
		}
	}
	f.addAll(ctx, proc, gen)
	for _, s := range f.sockets {
		if err := proc.AddListener(ctx, s.name, s.file); err != nil {
			return fmt.Errorf("front end %s: socket %s: %w", f.cfg.Name, s.name, err)
		}
	}
	return nil
}

func (f *frontend) process() (*plugin.Process, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.proc == nil {
		return nil, fmt.Errorf("front end %s is being restarted: %w", f.cfg.Name, syscall.EBUSY)
	}
	return f.proc, nil
}

// onExit is told by the process's watcher that generation gen has ended.
func (f *frontend) onExit(gen uint32, cause error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if gen != f.generation || f.proc == nil || f.stopping {
		return
	}
	f.proc = nil
	f.restarts++
	f.log.Warn("front end died", "error", cause)
	f.wg.Add(1)
	go func() {
		defer f.wg.Done()
		f.restart()
	}()
}

// restart brings up a new process with the same devices. No mapping changes;
// one that keeps dying is started at most once a second.
func (f *frontend) restart() {
	f.detach()
	for pause := time.Duration(0); ; pause = time.Second {
		time.Sleep(pause)
		f.mu.Lock()
		stopping := f.stopping
		f.mu.Unlock()
		if stopping {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		err := f.start(ctx)
		cancel()
		if err == nil {
			return
		}
		f.log.Error("front end does not start again", "error", err)
	}
}

// add shows d to users.
func (f *frontend) add(ctx context.Context, d *Device) error {
	proc, err := f.process()
	if err != nil {
		return err
	}
	f.mu.Lock()
	gen := f.generation
	f.mu.Unlock()
	fresh := d.Location() == "" // else it is a disk of the last daemon, which may be in use
	if err := f.show(ctx, proc, d, gen); err != nil {
		if ctx.Err() != nil { // the process may be about to show it
			f.unsure(proc, d, fresh)
		}
		return err
	}
	f.mu.Lock()
	died := f.proc != proc
	if !died {
		f.devices[d.index] = d
	}
	f.mu.Unlock()
	if died {
		if fresh {
			f.linger(nil, d, true)
		}
		return fmt.Errorf("front end %s died meanwhile: %w", f.cfg.Name, syscall.EBUSY)
	}
	f.retell(d)
	return nil
}

// unsure sees to a device that proc may show although nobody waits for that any
// more. A new disk is taken away again. One of the last daemon must not be: a dead
// process leaves it as it was, for whoever maps it next.
func (f *frontend) unsure(proc *plugin.Process, d *Device, fresh bool) {
	if fresh {
		f.linger(proc, d, false)
		return
	}
	f.log.Error("front end has not taken over the disk of the last daemon in time, it is started again", "device", d.name, "node", d.Location())
	go proc.Kill()
}

func (f *frontend) show(ctx context.Context, proc *plugin.Process, d *Device, gen uint32) error {
	if err := proc.AttachArena(ctx, d.index, d.arena); err != nil {
		return fmt.Errorf("front end %s: memory of %s: %w", f.cfg.Name, d.name, err)
	}
	spec := d.spec(gen)
	if err := proc.AddDevice(ctx, spec); err != nil {
		return fmt.Errorf("front end %s: device %s: %w", f.cfg.Name, d.name, err)
	}
	st, err := proc.DeviceStatus(ctx, d.index)
	if err != nil {
		return fmt.Errorf("front end %s: device %s: %w", f.cfg.Name, d.name, err)
	}
	d.shown(st.Location, spec.Limits)
	return nil
}

// spec is d as a process of that generation is told.
func (d *Device) spec(gen uint32) plugin.DeviceSpec {
	slot := d.slotSize()
	return plugin.DeviceSpec{
		Index: d.index, Name: d.name, Limits: d.Limits(), ArenaID: d.index,
		SlotSize: slot, Slots: d.arena.Size() / slot, Generation: gen, Config: d.settings(),
		Identity: d.identity, Location: d.Location(),
	}
}

// remove takes d away from users: EBUSY while it is in use and not forced.
func (f *frontend) remove(ctx context.Context, d *Device, force bool) error {
	if !force {
		return f.dismiss(ctx, d)
	}
	f.evict(ctx, d)
	return nil
}

// dismiss takes d away if nobody uses it.
func (f *frontend) dismiss(ctx context.Context, d *Device) error {
	proc, err := f.process()
	if err == nil {
		err = f.missed(d)
	}
	if err != nil {
		return err
	}
	err = proc.RemoveDevice(ctx, d.index, false)
	if errors.Is(err, syscall.ENODEV) && !knows(ctx, proc, d) {
		err = nil // an earlier call was given up, and succeeded all the same
	}
	if err == nil {
		f.strike(d)
	}
	return err
}

// knows: proc has d, and ENODEV was a word about the disk behind it.
func knows(ctx context.Context, proc *plugin.Process, d *Device) bool {
	_, err := proc.DeviceStatus(ctx, d.index)
	return !errors.Is(err, syscall.ENODEV)
}

// forget ends d's place in the front end, after its last request.
func (f *frontend) forget(d *Device) {
	f.mu.Lock()
	delete(f.devices, d.index)
	delete(f.missing, d)
	proc, lingers := f.proc, f.lingering[d.index]
	f.mu.Unlock()
	if proc == nil || lingers {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	err := proc.DetachArena(ctx, d.index)
	if err != nil && !errors.Is(err, syscall.ENOENT) { // ENOENT: it is a later process
		f.log.Warn("releasing a device's memory failed", "device", d.name, "error", err)
	}
}

// resize tells users about limits that may have changed.
func (f *frontend) resize(d *Device) {
	d.telling.Lock()
	defer d.telling.Unlock()
	proc, err := f.process()
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	l := d.Limits()
	if err := proc.ResizeDevice(ctx, d.index, l); err != nil {
		f.log.Warn("telling the device's size failed", "device", d.name, "error", err)
		return
	}
	d.mu.Lock()
	d.told = l
	d.mu.Unlock()
}

// retell tells users about limits that have changed while d was shown to them:
// resize found no process then, or one that did not know d yet.
func (f *frontend) retell(d *Device) {
	d.mu.Lock()
	told := d.told
	d.mu.Unlock()
	if d.Limits() != told {
		f.resize(d)
	}
}

// status asks the process about d.
func (f *frontend) status(ctx context.Context, d *Device) plugin.DeviceStatus {
	proc, err := f.process()
	if err != nil || ctx.Err() != nil {
		return plugin.DeviceStatus{}
	}
	st, err := proc.DeviceStatus(ctx, d.index)
	if err != nil {
		f.log.Warn("asking for a device's users failed", "device", d.name, "error", err)
	}
	return st
}

// corrupt is told by a pump that the plugin broke its ring: it is as good as
// dead.
func (f *frontend) corrupt(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.proc != nil {
		f.log.Error("front end broke its ring, it is killed", "error", err)
		go f.proc.Kill()
	}
}

// endStarts lets no process be started any more.
func (f *frontend) endStarts() {
	f.mu.Lock()
	f.stopping = true
	f.mu.Unlock()
	f.noStarts()
	f.wg.Wait() // one may be starting
}

// end is endStarts and returns the last process, if it lives.
func (f *frontend) end() *plugin.Process {
	f.endStarts()
	f.mu.Lock()
	defer f.mu.Unlock()
	proc := f.proc
	f.proc = nil
	return proc
}

func (f *frontend) stop(ctx context.Context) error {
	f.endStarts()
	if _, err := f.process(); err == nil {
		await(&f.leaving, takeAwayTime)
	}
	var err error
	if proc := f.end(); proc != nil {
		err = proc.Stop(ctx)
	}
	f.detach()
	await(&f.orphans, forcedClose)
	f.endLife()
	f.orphans.Wait()
	f.leaving.Wait()
	for _, s := range f.sockets {
		s.close()
	}
	return err
}
