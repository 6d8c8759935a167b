package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// frontend is one front-end plugin: its sockets and its devices. sup keeps a
// process of it running.
type frontend struct {
	client *Client
	cfg    FrontendConfig
	log    *slog.Logger
	sup    *supervise.Supervisor
	// sockets belong to the daemon, so that users of a dead plugin wait in
	// the backlog and are not refused.
	sockets []socket

	giving sync.Mutex // held while a process is given the sockets; before mu
	hold   bool       // no process gets the sockets yet; guarded by giving

	// mu is taken before attachment.mu. No call is made with it held.
	mu          sync.Mutex
	attachments map[uint32]*attachment // by index of the device
	host        *host                  // the process to use; nil: none
	over        bool                   // no process is started any more
	undone      []savedLeftover        // disks that no process has removed

	life    context.Context // ends with stop
	endLife context.CancelFunc
	workers sync.WaitGroup // workers of attachments; Add only with mu held and over false, or by one of them
	orphans sync.WaitGroup // requests of earlier processes
}

const (
	// apart is the shortest time between two restarts of a process.
	apart = time.Second
	// socketsWait bounds the time for which a new process gets no sockets:
	// until it has taken over its devices, users wait in the backlog.
	socketsWait = 2 * time.Second
	// takeAwayTime is the time for a front end to remove the remaining devices
	// when it ends. They have no requests in flight then.
	takeAwayTime = 5 * time.Second
)

func (c *Client) startFrontend(ctx context.Context, cfg FrontendConfig) error {
	f := &frontend{client: c, cfg: cfg, log: c.log.With("frontend", cfg.Name), attachments: map[uint32]*attachment{}, hold: c.cfg.HoldUsers}
	profile, err := c.cfg.profile(cfg.Name)
	if err != nil {
		return fmt.Errorf("front end %s: %w", cfg.Name, err)
	}
	f.life, f.endLife = context.WithCancel(context.Background())
	f.sup = supervise.New(supervise.Config{
		Plugin: plugin.Config{
			Path: cfg.Path, Kind: plugin.KindFrontend, Name: cfg.Name, Pumps: len(c.pumps), SHA256: cfg.SHA256,
			Configure: cfg.Configure, Logger: c.cfg.logger("plugins"),
			Confine: profile, Launcher: c.cfg.Confine.Launcher,
		},
		Launch: c.cfg.Launch, NewRing: c.cfg.NewRing, Entries: c.cfg.RingEntries,
		Apart: apart, Logger: f.log, Journal: c.cfg.Journal, Joined: f.joined, Left: f.left,
	})
	c.frontends = append(c.frontends, f)
	if err := f.listen(); err != nil {
		return fmt.Errorf("front end %s: %w", cfg.Name, err)
	}
	return f.sup.Start(ctx)
}

// profile returns what the front end keeps of the daemon's rights; nil: all of
// them. Only root's front ends ublk and nbd can show disks.
func (c *Config) profile(frontend string) (*confine.Profile, error) {
	disks := os.Geteuid() == 0 && (frontend == "ublk" || frontend == "nbd")
	return c.Confine.Frontend(frontend, disks)
}

// joined gives a process its devices and, last, the sockets: users waiting in
// the backlog must find their device.
func (f *frontend) joined(ctx context.Context, in *supervise.Instance) error {
	h := newHost(f, in)
	f.setHost(h)
	if err := h.addSources(); err != nil {
		return err
	}
	f.awaitSettled(ctx, h)
	return f.giveSockets(ctx, h)
}

// left records that the process has died.
func (f *frontend) left(*supervise.Instance, error) {
	f.mu.Lock()
	h := f.host
	f.host = nil
	f.mu.Unlock()
	h.orphan()
	f.pokeAll()
}

// setHost makes h the process that attachments use.
func (f *frontend) setHost(h *host) {
	f.mu.Lock()
	f.host = h
	f.mu.Unlock()
	f.pokeAll()
}

// awaitSettled waits until h serves the devices of the process before, except
// for those that fail. A device that hangs delays the sockets only briefly.
func (f *frontend) awaitSettled(ctx context.Context, h *host) {
	if len(f.sockets) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, socketsWait)
	defer cancel()
	defer context.AfterFunc(h.Context(), cancel)()
	for _, a := range f.all() {
		a.await(ctx, func() bool { return a.settled(h) })
	}
}

// all returns the attachments.
func (f *frontend) all() []*attachment {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Values(f.attachments))
}

func (f *frontend) pokeAll() {
	for _, a := range f.all() {
		a.poke()
	}
}

// now returns the process to use, or nil. over reports that no further process
// will be started.
func (f *frontend) now() (h *host, over bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host.alive() {
		h = f.host
	}
	return h, f.over
}

// alive reports whether a process can be used.
func (f *frontend) alive() bool {
	h, _ := f.now()
	return h != nil
}

// current returns the process to use. The error wraps EBUSY if it is being
// restarted.
func (f *frontend) current() (*host, error) {
	h, _ := f.now()
	if h == nil {
		return nil, fmt.Errorf("front end %s is being restarted: %w", f.cfg.Name, syscall.EBUSY)
	}
	return h, nil
}

// addAttachment adds a and starts its worker.
func (f *frontend) addAttachment(a *attachment) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.over:
		return fmt.Errorf("front end %s ends: %w", f.cfg.Name, syscall.ECANCELED)
	case f.attachments[a.index] != nil:
		return fmt.Errorf("front end %s still has device %d: %w", f.cfg.Name, a.index, syscall.EBUSY)
	}
	f.attachments[a.index] = a
	f.workers.Go(a.run)
	return nil
}

// removeAttachment removes a when its worker ends. undone reports that its disk is left.
func (f *frontend) removeAttachment(a *attachment, undone bool) {
	l, ok := a.leftoverLocked() // it does not change after the end of the worker
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.attachments, a.index)
	if undone && ok {
		f.undone = append(f.undone, l)
	}
}

// add shows d to users.
func (f *frontend) add(ctx context.Context, d *Device) error {
	a, first, err := f.newAttachment(ctx, d)
	if err != nil {
		return err
	}
	if err = a.isShown(first); err != nil && ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(ctx, forcedClose)
		defer cancel()
		a.awaitGone(ctx) // its index is free then
	}
	return err
}

// remove removes d. The error is EBUSY if it is in use and force is false.
func (f *frontend) remove(ctx context.Context, d *Device, force bool) error {
	a := f.attachmentOf(d)
	switch {
	case a == nil:
		return nil
	case force:
		a.evict(ctx)
		return nil
	}
	return a.dismiss(ctx)
}

// attachmentOf returns d's attachment at f, or nil if it has none any more.
func (f *frontend) attachmentOf(d *Device) *attachment {
	if a := d.att.Load(); a != nil && a.fe == f && !a.isGone() {
		return a
	}
	return nil
}

// release ends d's attachment, after its last request.
func (f *frontend) release(d *Device) {
	if a := f.attachmentOf(d); a != nil {
		a.release()
	}
}

// resize tells the process limits that may have changed, without waiting.
func (f *frontend) resize(d *Device) {
	if a := f.attachmentOf(d); a != nil {
		a.poke()
	}
}

// resizeNow does the same as resize and waits until the process has been
// told, if one serves d.
func (f *frontend) resizeNow(ctx context.Context, d *Device) {
	a := f.attachmentOf(d)
	if a == nil {
		return
	}
	a.poke()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	a.await(ctx, func() bool { return a.state != shown || a.told == d.Limits() })
}

// shows reports whether a process is being shown d and so uses its memory.
func (f *frontend) shows(d *Device) bool {
	a := f.attachmentOf(d)
	return a != nil && a.shows()
}

// lingers reports whether an attachment has the index.
func (f *frontend) lingers(index uint32) bool {
	f.mu.Lock()
	a := f.attachments[index]
	f.mu.Unlock()
	return a != nil && a.lingers()
}

// lingers reports whether an attachment of any front end has the index.
func (c *Client) lingers(index uint32) bool {
	return slices.ContainsFunc(c.frontends, func(f *frontend) bool { return f.lingers(index) })
}

// status asks the process for the status of d.
func (f *frontend) status(ctx context.Context, d *Device) plugin.DeviceStatus {
	h, err := f.current()
	if err != nil || ctx.Err() != nil {
		return plugin.DeviceStatus{}
	}
	st, err := h.DeviceStatus(ctx, d.index)
	if err != nil && !errors.Is(err, syscall.ENODEV) {
		f.log.Warn("asking for a device's users failed", "device", d.name, "err", err)
	}
	return st
}

// stats asks the process for the latencies of requests, by device.
func (f *frontend) stats(ctx context.Context) map[uint32]*latency.Snapshots {
	return f.sup.Stats(ctx)
}

// endStarts prevents further starts of a process and releases callers that wait
// for one.
func (f *frontend) endStarts() {
	f.mu.Lock()
	f.over = true
	f.mu.Unlock()
	f.sup.NoRestart()
	f.pokeAll()
}

// abandon kills the process, as in a crash, and starts no other.
func (f *frontend) abandon() {
	f.endStarts()
	in, err := f.sup.Current()
	if err != nil {
		return
	}
	in.Process.Kill()
	select {
	case <-in.Exited():
	case <-time.After(takeAwayTime): // its I/O keeps it; it serves no user
	}
}

// stop ends the process and its attachments.
func (f *frontend) stop(ctx context.Context) error {
	for i := range f.sockets {
		f.sockets[i].close()
	}
	f.endStarts()
	f.awaitTakenAway()
	err := f.sup.Stop(ctx)
	await(&f.orphans, forcedClose)
	f.endLife()
	f.workers.Wait()
	f.orphans.Wait()
	return err
}

// awaitTakenAway waits until the running process has removed all lingering
// disks.
func (f *frontend) awaitTakenAway() {
	ctx, cancel := context.WithTimeout(f.life, takeAwayTime)
	defer cancel()
	for _, a := range f.all() {
		if a.lingers() {
			a.awaitGone(ctx)
		}
	}
}

// await waits for a group, at most for limit.
func await(group *sync.WaitGroup, limit time.Duration) {
	done := make(chan struct{})
	go func() {
		group.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}
