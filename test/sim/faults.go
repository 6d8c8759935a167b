package sim

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// faults holds a function for each kind: it begins the fault and returns a
// function that ends it.
var faults = map[string]func(w *world, f Fault) (end func()){
	// The network.
	"cut": func(w *world, f Fault) func() {
		w.net.Cut(w.client.addrs[f.Path], w.servers[f.Server].addrs[f.Path])
		return nil
	},
	"cut-connection": func(w *world, f Fault) func() {
		if all := w.net.Conns(); len(all) > 0 {
			c := all[f.N%len(all)]
			w.net.CutConn(c[0], c[1])
		}
		return nil
	},
	"black-hole": func(w *world, f Fault) func() { // of one connection
		all := w.net.Conns()
		if len(all) == 0 {
			return nil
		}
		c := all[f.N%len(all)]
		w.net.StallConn(c[0], c[1], true)
		return func() { w.net.StallConn(c[0], c[1], false) }
	},
	"jitter": func(w *world, f Fault) func() { // of one connection: others overtake it
		all := w.net.Conns()
		if len(all) == 0 {
			return nil
		}
		c, stop := all[f.N%len(all)], make(chan struct{})
		w.zombies.Go(func() { w.jitter(c[0], c[1], time.Duration(1+f.N)*time.Millisecond, stop) })
		return func() { close(stop) }
	},
	"stall": func(w *world, f Fault) func() {
		a, b := w.client.addrs[f.Path], w.servers[f.Server].addrs[f.Path]
		w.net.Stall(a, b)
		return func() { w.net.Resume(a, b) }
	},
	"stall-requests": func(w *world, f Fault) func() {
		a, b := w.client.addrs[f.Path], w.servers[f.Server].addrs[f.Path]
		w.net.StallOneWay(a, b)
		return func() { w.net.Resume(a, b) }
	},
	"stall-answers": func(w *world, f Fault) func() {
		a, b := w.client.addrs[f.Path], w.servers[f.Server].addrs[f.Path]
		w.net.StallOneWay(b, a)
		return func() { w.net.Resume(a, b) }
	},
	"delay": func(w *world, f Fault) func() {
		a, b := w.client.addrs[f.Path], w.servers[f.Server].addrs[f.Path]
		w.net.Delay(a, b, time.Duration(1+f.N)*time.Millisecond)
		return func() { w.net.Delay(a, b, 0) }
	},
	// Servers.
	"kill-server": func(w *world, f Fault) func() {
		w.servers[f.Server].kill(false)
		return func() { w.servers[f.Server].restart() }
	},
	"power-cut": func(w *world, f Fault) func() {
		w.servers[f.Server].kill(true)
		return func() { w.servers[f.Server].restart() }
	},
	"stop-server": func(w *world, f Fault) func() {
		w.servers[f.Server].stop()
		return func() { w.servers[f.Server].restart() }
	},
	"reboot-server": func(w *world, f Fault) func() { // in order: nothing is lost, and clients cannot know
		w.servers[f.Server].reboot()
		return func() { w.servers[f.Server].restart() }
	},
	"other-sizes": func(w *world, f Fault) func() { return w.servers[f.Server].change(f, otherSizes) },
	"other-cache": func(w *world, f Fault) func() { return w.servers[f.Server].change(f, otherCache) },
	"swap-cache":  func(w *world, f Fault) func() { return w.servers[f.Server].swapCache() },
	// The client.
	"kill-client": func(w *world, f Fault) func() {
		w.client.killClient()
		return w.client.restartClient
	},
	// Processes of plugins.
	"kill-storage": func(w *world, f Fault) func() { killProcess(w.servers[f.Server]); return nil },
	"kill-front":   func(w *world, f Fault) func() { killProcess(w.client); return nil },
	"freeze-storage": func(w *world, f Fault) func() {
		return withhold(w.servers[f.Server], func(p *process) *atomic.Bool { return &p.frozen })
	},
	"freeze-front": func(w *world, f Fault) func() {
		return withhold(w.client, func(p *process) *atomic.Bool { return &p.frozen })
	},
	"deaf-storage": func(w *world, f Fault) func() {
		return withhold(w.servers[f.Server], func(p *process) *atomic.Bool { return &p.deaf })
	},
	"deaf-front": func(w *world, f Fault) func() {
		return withhold(w.client, func(p *process) *atomic.Bool { return &p.deaf })
	},
	"late-storage": func(w *world, f Fault) func() { return killLate(w.servers[f.Server], f) },
	"late-front":   func(w *world, f Fault) func() { return killLate(w.client, f) },
	"refuse-opens": func(w *world, f Fault) func() { // for lack of something that comes back
		h := w.servers[f.Server]
		h.refuses.Store(true)
		return func() { h.refuses.Store(false) }
	},
	"slow-start-storage": func(w *world, f Fault) func() { return crashSlowly(w.servers[f.Server], f) },
	"slow-start-front":   func(w *world, f Fault) func() { return crashSlowly(w.client, f) },
	// Disks.
	"hang-disk": func(w *world, f Fault) func() {
		d := w.loads[f.Device].disk
		d.setHung(true)
		return func() { d.setHung(false) }
	},
	"slow-disk": func(w *world, f Fault) func() {
		d := w.loads[f.Device].disk
		d.setPace(time.Duration(f.N)*time.Millisecond, time.Duration(10*f.N+1)*time.Millisecond)
		return func() { d.setPace(50*time.Microsecond, 500*time.Microsecond) }
	},
	"fail-disk": func(w *world, f Fault) func() {
		d := w.loads[f.Device].disk
		d.setFailing(true)
		return func() { d.setFailing(false) }
	},
	"fail-write-back": func(w *world, f Fault) func() {
		if l := w.loads[f.Device]; l.disk.told().WriteCache {
			l.powerCut(l.disk.failWriteBack())
		}
		return nil
	},
	// Commands.
	"remap": func(w *world, f Fault) func() { return w.remap(f, 10*time.Second) },
	"hasty-remap": func(w *world, f Fault) func() { // the unmap is given up soon
		return w.remap(f, time.Duration(1+f.N)*20*time.Millisecond)
	},
	"disconnect-path": func(w *world, f Fault) func() {
		ref := &controlpb.PathRequest{Session: w.servers[f.Server].name, Id: w.pathID(f)}
		w.command(func(ctx context.Context, api controlpb.ClientDaemonServer) error {
			_, err := api.DisconnectPath(ctx, ref)
			return err
		})
		return func() {
			w.insist(func(ctx context.Context, api controlpb.ClientDaemonServer) error {
				_, err := api.ReconnectPath(ctx, ref)
				return err
			})
		}
	},
	"reconnect-path": func(w *world, f Fault) func() {
		ref := &controlpb.PathRequest{Session: w.servers[f.Server].name, Id: w.pathID(f)}
		w.command(func(ctx context.Context, api controlpb.ClientDaemonServer) error {
			_, err := api.ReconnectPath(ctx, ref)
			return err
		})
		return nil
	},
	"remove-path": func(w *world, f Fault) func() {
		if w.plan.Paths < 2 {
			return nil // the last one is not removed
		}
		s := w.servers[f.Server]
		ref := &controlpb.PathRequest{Session: s.name, Id: w.pathID(f)}
		dst := w.destination(ref)
		w.command(func(ctx context.Context, api controlpb.ClientDaemonServer) error {
			_, err := api.RemovePath(ctx, ref)
			return err
		})
		return func() {
			for i, a := range s.addrs {
				if dst.IsValid() && a == dst {
					add := &controlpb.AddPathRequest{Session: s.name, Path: w.path(s, i)}
					w.insist(func(ctx context.Context, api controlpb.ClientDaemonServer) error {
						_, err := api.AddPath(ctx, add)
						return err
					})
				}
			}
		}
	},
}

// faultKinds are the names, in a fixed order.
var faultKinds = slices.Sorted(maps.Keys(faults))

func killProcess(h *host) {
	if p := h.process(); p != nil {
		p.Kill()
	}
}

// jitter stalls a connection for pause again and again until stop is closed.
func (w *world) jitter(a, b netip.AddrPort, pause time.Duration, stop <-chan struct{}) {
	for {
		w.net.StallConn(a, b, true)
		time.Sleep(pause)
		w.net.StallConn(a, b, false)
		select {
		case <-stop:
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// withhold sets one of a process's flags. Requests under that flag wait until
// the end of the fault.
func withhold(h *host, of func(*process) *atomic.Bool) (end func()) {
	p, _ := h.process().(interface{ proc() *process })
	if p == nil {
		return nil
	}
	flag := of(p.proc())
	flag.Store(true)
	return func() { flag.Store(false) }
}

// killLate kills a process that works on for a while, and answers into rings that
// nobody looks at any more.
func killLate(h *host, f Fault) func() {
	if p, _ := h.process().(interface{ proc() *process }); p != nil {
		p.proc().late.Store(int64(f.For))
	}
	killProcess(h)
	return nil
}

// crashSlowly kills a process. Its successors fail to start, or start slowly.
func crashSlowly(h *host, f Fault) func() {
	h.start.set(f.N%4, time.Duration(f.N)*20*time.Millisecond)
	killProcess(h)
	return func() { h.start.set(0, 0) }
}

// command gives a user's command some time. Whether it succeeds is not judged.
func (w *world) command(f func(context.Context, controlpb.ClientDaemonServer) error) {
	_ = w.commandFor(10*time.Second, f)
}

func (w *world) commandFor(patience time.Duration, f func(context.Context, controlpb.ClientDaemonServer) error) error {
	_, api := w.client.daemon()
	if api == nil {
		return errDown
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := f(ctx, api)
	if err != nil {
		w.log.Info("command failed", "error", err)
	}
	return err
}

// insist repeats a command that fails because its daemon or server is away. The
// object of the command may be gone for good, so its success is not judged.
func (w *world) insist(f func(context.Context, controlpb.ClientDaemonServer) error) {
	for end := w.operatorGivesUp(5 * time.Second); ; time.Sleep(time.Second) {
		err := w.commandFor(10*time.Second, f)
		if err == nil || errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EEXIST) || errors.Is(err, syscall.EINVAL) || time.Now().After(end) {
			return
		}
	}
}

// operatorGivesUp is when an operator stops repeating a command that fails: at least
// patience from now, and not before all faults have ended.
func (w *world) operatorGivesUp(patience time.Duration) time.Time {
	end := time.Now()
	if faults := w.start.Add(w.plan.end()); end.Before(faults) {
		end = faults
	}
	return end.Add(patience)
}

// remap unmaps a device by force, and maps it again at the end.
func (w *world) remap(f Fault, patience time.Duration) (end func()) {
	l := w.loads[f.Device]
	ends := l.excuse()
	w.unmap(l, patience)
	return func() {
		w.mapAgain(l)
		ends()
	}
}

// unmap unmaps a device by force.
func (w *world) unmap(l *load, patience time.Duration) {
	_ = w.commandFor(patience, func(ctx context.Context, api controlpb.ClientDaemonServer) error {
		_, err := api.Unmap(ctx, &controlpb.UnmapRequest{Device: l.name, Force: true})
		return err
	})
}

// mapAgain maps a device that was unmapped, as often as it takes. A disk of the
// previous client may be waiting for its server, and cannot serve users that
// are not told of its new properties: it is unmapped after a long wait.
func (w *world) mapAgain(l *load) {
	begin, waits := time.Now(), 0
	for end := w.operatorGivesUp(2 * time.Minute); time.Now().Before(end); {
		if c, _ := w.client.daemon(); c != nil {
			if d, err := c.Device(l.name); err == nil && (d.State() == client.Closed || l.user.isThere()) {
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			err := w.mapDevice(ctx, l)
			cancel()
			if err == nil {
				w.judgeMap(l, begin)
				return
			}
			w.log.Info("map failed", "device", l.name, "error", err)
			if errors.Is(err, syscall.EEXIST) {
				if waits++; waits%15 == 0 {
					w.unmap(l, 10*time.Second)
				}
			}
		}
		time.Sleep(time.Second)
	}
	w.violate("liveness: %s cannot be mapped", l.name)
}

// change starts a server anew with other properties, and with the old ones at the end.
// Its devices may stay closed, if users cannot be told.
func (h *host) change(f Fault, apply func(h *host, n int)) (end func()) {
	var ends []func()
	for _, l := range h.loads() {
		ends = append(ends, l.excuse())
	}
	h.kill(false)
	apply(h, f.N)
	h.restart()
	return func() {
		h.kill(false)
		apply(h, -1)
		h.restart()
		h.w.recover(h)
		for _, end := range ends {
			end()
		}
	}
}

// swapCache has a storage plugin start anew and find disks with the other cache policy,
// and at the end with the old one. Users are not told of a policy that the plugin of a
// server has found, so that the devices may fail until they are mapped again.
func (h *host) swapCache() (end func()) {
	var ends []func()
	for _, l := range h.loads() {
		ends = append(ends, l.excuse())
	}
	otherCache(h, 0)
	killProcess(h)
	return func() {
		otherCache(h, -1)
		h.kill(false) // a device that has failed stays so
		h.restart()
		h.w.recover(h)
		for _, end := range ends {
			end()
		}
	}
}

// loads are the devices of a server.
func (h *host) loads() (all []*load) {
	for _, l := range h.w.loads {
		if h.w.serverOf(l) == h {
			all = append(all, l)
		}
	}
	return all
}

// otherSizes sets chunk size and queue depth of a server, with n < 0 those of the plan.
func otherSizes(h *host, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sizes = h.w.plan.sizes()
	if n < 0 {
		return
	}
	h.sizes.chunk = []int{32768, 65536, 131072, 262144}[n%4]
	if n%3 == 0 {
		h.sizes.depth = []int{1, 8, 32}[n/3%3]
	}
}

// otherCache turns the cache policy of a server's disks round, with n < 0 back.
func otherCache(h *host, n int) {
	for _, l := range h.loads() {
		l.disk.setCache(h.w.plan.Cache == (n < 0))
	}
}

// recover does an operator's work: it maps devices that stay closed again, and
// connects paths that are no longer tried.
func (w *world) recover(h *host) {
	for _, l := range h.loads() {
		w.remapIfClosed(l)
	}
}

// reconnect connects the paths of a session by hand.
func (w *world) reconnect(session string) {
	for _, p := range w.paths(session) {
		if p.State != "connected" {
			ref := &controlpb.PathRequest{Session: session, Id: p.Id}
			w.command(func(ctx context.Context, api controlpb.ClientDaemonServer) error {
				_, err := api.ReconnectPath(ctx, ref)
				return err
			})
		}
	}
}

// remapIfClosed opens a device that stays closed, as often as it takes. The client may
// notice by its heartbeats only that the server has been restarted, so a device counts as
// open if it is at ten looks in a row.
func (w *world) remapIfClosed(l *load) {
	open, gone := 0, false
	for end := w.operatorGivesUp(time.Minute); time.Now().Before(end); {
		c, _ := w.client.daemon()
		if c != nil {
			d, err := c.Device(l.name)
			if gone = err != nil; gone {
				if l.user.isThere() { // it waits for its server since the last client ended
					w.mapAgain(l)
					return
				}
				// Another act unmapped it and maps it again. The server may restart just after.
				time.Sleep(time.Second)
				continue
			}
			if d.State() == client.Open {
				if open++; open == 10 {
					return
				}
				time.Sleep(time.Second)
				continue
			}
			open = 0
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			_, err = c.Remap(ctx, l.name)
			cancel()
			w.log.Info("remap", "device", l.name, "error", err)
			if errors.Is(err, syscall.ECONNABORTED) { // a path ends its attempts when the queue depth changes
				w.reconnect(l.session)
			}
			if errors.Is(err, syscall.ESTALE) { // it was mapped with the other properties
				w.unmap(l, 10*time.Second)
				w.mapAgain(l)
				return
			}
		}
		time.Sleep(time.Second)
	}
	if !gone {
		w.violate("liveness: %s cannot be opened again", l.name)
	}
}

// restart brings a server up, as often as it takes.
func (h *host) restart() {
	for range 100 {
		h.mu.Lock()
		runs := h.up
		h.mu.Unlock()
		if runs {
			return // another fault's end was there first
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		err := h.startServer(ctx)
		cancel()
		if err == nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	h.w.violate("liveness: %s does not start", h.name)
}
