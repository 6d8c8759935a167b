package sim

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// faults has what each kind does at its time, and what ends it.
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
	// Processes of plugins.
	"kill-storage": func(w *world, f Fault) func() { killProcess(w.servers[f.Server]); return nil },
	"kill-front":   func(w *world, f Fault) func() { killProcess(w.client); return nil },
	"freeze-storage": func(w *world, f Fault) func() {
		if p, _ := w.servers[f.Server].process().(*storage); p != nil {
			p.frozen.Store(true)
			return func() { p.frozen.Store(false) }
		}
		return nil
	},
	"freeze-front": func(w *world, f Fault) func() {
		if p, _ := w.client.process().(*front); p != nil {
			p.frozen.Store(true)
			return func() { p.frozen.Store(false) }
		}
		return nil
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
	// Commands.
	"disconnect-path": func(w *world, f Fault) func() {
		ref := &controlpb.PathRequest{Session: w.servers[f.Server].name, Id: w.pathID(f)}
		command(func(ctx context.Context) error { _, err := w.client.api.DisconnectPath(ctx, ref); return err })
		return func() {
			command(func(ctx context.Context) error { _, err := w.client.api.ReconnectPath(ctx, ref); return err })
		}
	},
	"reconnect-path": func(w *world, f Fault) func() {
		ref := &controlpb.PathRequest{Session: w.servers[f.Server].name, Id: w.pathID(f)}
		command(func(ctx context.Context) error { _, err := w.client.api.ReconnectPath(ctx, ref); return err })
		return nil
	},
	"remove-path": func(w *world, f Fault) func() {
		if w.plan.Paths < 2 {
			return nil // the last one is not removed
		}
		s := w.servers[f.Server]
		ref := &controlpb.PathRequest{Session: s.name, Id: w.pathID(f)}
		dst := w.destination(ref)
		command(func(ctx context.Context) error { _, err := w.client.api.RemovePath(ctx, ref); return err })
		return func() {
			for i, a := range s.addrs {
				if dst.IsValid() && a == dst {
					add := &controlpb.AddPathRequest{Session: s.name, Path: w.path(s, i)}
					command(func(ctx context.Context) error { _, err := w.client.api.AddPath(ctx, add); return err })
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

// crashSlowly kills a process, whose successors fail to start, or start slowly.
func crashSlowly(h *host, f Fault) func() {
	h.start.set(f.N%4, time.Duration(f.N)*20*time.Millisecond)
	killProcess(h)
	return func() { h.start.set(0, 0) }
}

// command gives a user's command some time. Whether it succeeds is not judged.
func command(f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = f(ctx)
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
