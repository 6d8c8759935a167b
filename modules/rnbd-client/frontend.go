package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

const (
	// apart is the shortest time between two restarts of a process.
	apart = time.Second
	// socketsWait bounds the time for which a new process gets no sockets:
	// until it has taken over its devices, users wait in the backlog.
	socketsWait = 2 * time.Second
	// removeTime is the time for a front end to remove the remaining devices
	// when it ends. They have no requests in flight then.
	removeTime = 5 * time.Second
)

// startFrontends starts all front ends at the same time.
func (c *Client) startFrontends(ctx context.Context) error {
	for _, f := range c.cfg.Frontends {
		if err := c.addFrontend(f); err != nil {
			return err
		}
	}
	errs := make([]error, len(c.frontends))
	var starting sync.WaitGroup
	for i, f := range c.frontends {
		starting.Go(func() { errs[i] = f.sup.Start(ctx) })
	}
	starting.Wait()
	return errors.Join(errs...)
}

func (c *Client) addFrontend(cfg FrontendConfig) error {
	f := &frontend{client: c, cfg: cfg, log: c.log.With("frontend", cfg.Name), attachments: map[uint32]*attachment{}, hold: c.cfg.HoldUsers || c.cfg.Standby}
	profile, err := c.cfg.frontendProfile(cfg.Name)
	if err != nil {
		return fmt.Errorf("front end %s: %w", cfg.Name, err)
	}
	f.life, f.endLife = context.WithCancel(context.Background())
	f.sup = supervise.New(supervise.Config{
		Plugin: plugin.Config{
			Path: cfg.Path, Kind: plugin.KindFrontend, Name: cfg.Name, Pumps: len(c.pumps), SHA256: cfg.SHA256,
			Configure: cfg.Configure, Logger: c.cfg.subsystemLogger("plugins"),
			Confine: profile, Launcher: c.cfg.Confine.Launcher, SocketDir: c.cfg.SocketDir,
		},
		Launch: c.cfg.Launch, NewRing: c.cfg.NewRing, Entries: c.cfg.RingEntries,
		Apart: apart, Patience: c.cfg.PluginPatience, Logger: f.log, Journal: c.cfg.Journal, Joined: f.onProcess, Left: f.onProcessLeft,
	})
	c.frontends = append(c.frontends, f)
	if err := f.clearMounts(); err != nil {
		return fmt.Errorf("front end %s: %w", cfg.Name, err)
	}
	if err := f.openSockets(); err != nil {
		return fmt.Errorf("front end %s: %w", cfg.Name, err)
	}
	if cfg.TLS != nil {
		f.workers.Go(f.watchTLS)
	}
	return nil
}

// frontendProfile returns what the front end keeps of the daemon's rights; nil: all of
// them. Only root's front ends ublk and nbd can show disks.
func (c *Config) frontendProfile(frontend string) (*confine.Profile, error) {
	disks := os.Geteuid() == 0 && (frontend == "ublk" || frontend == "nbd")
	return c.Confine.Frontend(frontend, disks)
}

// onProcess gives a process its devices and, last, the sockets: users waiting in
// the backlog must find their device.
func (f *frontend) onProcess(ctx context.Context, in *supervise.Instance) error {
	h := newHost(f, in)
	f.setProcess(h)
	if err := h.addSources(); err != nil {
		return err
	}
	f.awaitSettled(ctx, h)
	return f.passSockets(ctx, h)
}

// onProcessLeft records that the process has died.
func (f *frontend) onProcessLeft(*supervise.Instance, error) {
	f.mu.Lock()
	h := f.current
	f.current = nil
	f.mu.Unlock()
	h.endRings()
	if f.parting.Load() { // before the next process is there
		for _, a := range f.allAttachments() {
			a.setWant(wantLeft)
		}
	}
	f.pokeAll()
	close(h.parted)
}

// setProcess makes h the process that attachments use.
func (f *frontend) setProcess(h *frontendProcess) {
	f.mu.Lock()
	f.current = h
	f.mu.Unlock()
	f.pokeAll()
}

// awaitSettled waits until h serves the devices of the process before, except
// for those that fail. A device that hangs delays the sockets only briefly.
func (f *frontend) awaitSettled(ctx context.Context, h *frontendProcess) {
	if len(f.sockets) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, socketsWait)
	defer cancel()
	defer context.AfterFunc(h.Context(), cancel)()
	for _, a := range f.allAttachments() {
		a.awaitState(ctx, func() bool { return a.settledWith(h) })
	}
}

// addDevice shows d to users.
func (f *frontend) addDevice(ctx context.Context, d *Device) error {
	a, first, err := f.newAttachment(ctx, d)
	if err != nil {
		return err
	}
	if err = a.isShown(first); err != nil {
		a.awaitEnd(ctx, first)
	}
	return err
}

// removeDevice removes d. The error is EBUSY if it is in use and force is false.
func (f *frontend) removeDevice(ctx context.Context, d *Device, force bool) error {
	a := f.attachmentOf(d)
	switch {
	case a == nil:
		return nil
	case force:
		a.forceRemove(ctx)
		return nil
	}
	return a.removeUnused(ctx)
}

// attachmentOf returns d's attachment at f, or nil if it has none any more.
func (f *frontend) attachmentOf(d *Device) *attachment {
	if a := d.att.Load(); a != nil && a.fe == f && !a.isGone() {
		return a
	}
	return nil
}

// releaseDevice ends d's attachment, after its last request.
func (f *frontend) releaseDevice(d *Device) {
	if a := f.attachmentOf(d); a != nil {
		a.endAfterRequests()
	}
}

// resizeDevice tells the process limits that may have changed, without waiting.
func (f *frontend) resizeDevice(d *Device) {
	if a := f.attachmentOf(d); a != nil {
		a.wakeWorker()
	}
}

// resizeNow does the same as resize and waits until the process has been
// told, if one serves d.
func (f *frontend) resizeNow(ctx context.Context, d *Device) {
	a := f.attachmentOf(d)
	if a == nil {
		return
	}
	a.wakeWorker()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	a.awaitState(ctx, func() bool { return a.state != shown || a.told == d.Limits() })
}

// showsDevice reports whether a process is being shown d and so uses its memory.
func (f *frontend) showsDevice(d *Device) bool {
	a := f.attachmentOf(d)
	return a != nil && a.isShowing()
}

// keepsIndex reports whether an attachment has the index.
func (f *frontend) keepsIndex(index uint32) bool {
	f.mu.Lock()
	a := f.attachments[index]
	f.mu.Unlock()
	return a != nil && a.keepsIndex()
}

// keepsIndex reports whether an attachment of any front end has the index.
func (c *Client) keepsIndex(index uint32) bool {
	return slices.ContainsFunc(c.frontends, func(f *frontend) bool { return f.keepsIndex(index) })
}

// deviceStatus asks the process for the status of d.
func (f *frontend) deviceStatus(ctx context.Context, d *Device) plugin.DeviceStatus {
	h, err := f.requireProcess()
	if err != nil || ctx.Err() != nil {
		return plugin.DeviceStatus{}
	}
	st, err := h.DeviceStatus(ctx, d.index)
	if err != nil && !errors.Is(err, syscall.ENODEV) {
		f.log.Warn("asking for a device's users failed", "device", d.name, "err", err)
	}
	return d.statusOfLoop(st)
}

// deviceStats asks the process for the latencies of requests, by device.
func (f *frontend) deviceStats(ctx context.Context) map[uint32]*latency.Snapshots {
	return f.sup.Stats(ctx)
}

// openSockets opens the sockets of the front end. Those that another process made
// are taken first.
func (f *frontend) openSockets() error {
	for i, file := range slices.Concat(f.cfg.Sockets, f.cfg.TrustedSockets) {
		s, err := inheritSocket(file)
		if err != nil {
			return err
		}
		s.trusted = i >= len(f.cfg.Sockets)
		if err := f.addSocket(s); err != nil {
			return err
		}
	}
	for _, l := range f.cfg.Listen {
		name, said := strings.CutSuffix(l, trusted)
		if slices.ContainsFunc(f.sockets, func(s listenSocket) bool { return s.name == name }) {
			continue
		}
		s, err := openListen(name, f.cfg.Inherited[name])
		if err != nil {
			return err
		}
		if len(s.path) > private.MaxSocketPath {
			f.log.Warn("most NBD clients cannot connect: the path of the socket is too long; choose another with --nbd-listen unix:PATH",
				"listener", s.name, "bytes", len(s.path))
		}
		s.trusted = said
		if err := f.addSocket(s); err != nil {
			return err
		}
	}
	return nil
}

func (f *frontend) addSocket(s listenSocket) error {
	if err := f.checkReach(&s); err != nil {
		s.close()
		return err
	}
	f.sockets = append(f.sockets, s)
	return nil
}

// passSockets gives the process the sockets, once, and not before users are
// served. During Close a process gets none: its devices are being unmapped, and it would
// refuse users that can wait for the next daemon.
func (f *frontend) passSockets(ctx context.Context, h *frontendProcess) error {
	f.giving.Lock()
	defer f.giving.Unlock()
	if f.hold || h.given || f.client.life.Err() != nil {
		return nil
	}
	if err := f.sendTLS(ctx, h); err != nil {
		return err
	}
	h.given = true
	for _, s := range f.sockets {
		if err := h.AddListener(ctx, s.name, s.file); err != nil {
			return fmt.Errorf("front end %s: socket %s: %w", f.cfg.Name, s.name, err)
		}
	}
	return nil
}

// leaveUsers kills the process if users of a socket may wait for the next
// daemon: it would accept users that are cut off and connect again, and tell
// them that their device is gone. Its disks stay, too, for the next daemon.
func (f *frontend) leaveUsers() {
	if f.client.leaveNothing.Load() {
		return
	}
	if slices.ContainsFunc(f.sockets, func(s listenSocket) bool { return s.kept }) {
		f.killForGood()
	}
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

// killForGood kills the process, as in a crash, and starts no other.
func (f *frontend) killForGood() {
	f.endStarts()
	in, err := f.sup.Current()
	if err != nil {
		return
	}
	in.Process.Kill()
	select {
	case <-in.Exited():
	case <-time.After(removeTime): // its I/O keeps it; it serves no user
	}
}

// endProcess ends the process and its attachments.
func (f *frontend) endProcess(ctx context.Context) error {
	for i := range f.sockets {
		f.sockets[i].close()
	}
	f.endStarts()
	f.awaitTakenAway()
	f.fetchUsers(ctx)
	err := f.sup.Stop(ctx)
	awaitGroup(&f.orphans, forcedClose)
	f.endLife()
	f.workers.Wait()
	f.orphans.Wait()
	return err
}

// awaitTakenAway waits until the running process has removed all lingering
// disks.
func (f *frontend) awaitTakenAway() {
	ctx, cancel := context.WithTimeout(f.life, removeTime)
	defer cancel()
	for _, a := range f.allAttachments() {
		if a.keepsIndex() {
			a.awaitGone(ctx)
		}
	}
}

// awaitGroup waits for a group, at most for limit.
func awaitGroup(group *sync.WaitGroup, limit time.Duration) {
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
