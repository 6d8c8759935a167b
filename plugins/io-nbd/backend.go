package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const version = "0.1.0"

// backend is the plugin: all disks of one server.
type backend struct {
	settings
	exit func(code int) // ends the process

	mu      sync.Mutex
	hub     *hub              // nil: there is neither a queue nor a disk
	queues  int               // served
	disks   int               // open or being opened
	captive *captive          // nil: none runs
	names   map[string]string // of the devices that are open, by export
	opens   map[string]int    // of each export
	start   sync.Mutex        // held while the captive server is started or ended
}

func newBackend() *backend {
	return &backend{exit: os.Exit, settings: settings{crash: plugin.KeepsFlushed}, names: map[string]string{}, opens: map[string]int{}}
}

// Describe tells the crash class that follows from the settings.
func (b *backend) Describe() plugin.Info {
	return plugin.Info{Name: "nbd", Version: version, Crash: b.crash, Names: plugin.NamesOpaque}
}

// Configure reads the settings.
func (b *backend) Configure(in map[string]string) (err error) {
	b.settings, err = parseSettings(in)
	return err
}

// Open connects to the export of a device.
func (b *backend) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	export := b.exportOf(r.Name)
	if err := b.claim(export, r.Name); err != nil {
		return nil, err
	}
	d, err := b.open(ctx, r, export)
	if err != nil {
		return nil, errors.Join(err, b.release(export))
	}
	return d, nil
}

func (b *backend) open(ctx context.Context, r plugin.OpenRequest, export string) (*disk, error) {
	h, err := b.theHub(0)
	if err != nil {
		return nil, err
	}
	d := &disk{b: b, hub: h, name: r.Name, export: export, readOnly: r.ReadOnly, want: 1}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	if err := b.startCaptive(ctx); err != nil {
		return nil, err
	}
	first, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	if d.limits, err = limitsOf(&first.export, r.ReadOnly); err != nil {
		first.abandon()
		return nil, fmt.Errorf("export %q of %s: %w", export, b.where(), err)
	}
	if d.flags = first.export.Flags; d.flags&nbdwire.CanMultiConn != 0 {
		d.want = b.connections
	}
	all := []*conn{first}
	for len(all) < d.want {
		c, err := d.dial(ctx)
		if err != nil {
			slog.Warn("the server refuses a further connection", "device", r.Name, "connections", len(all), "err", err)
			break
		}
		all = append(all, c)
	}
	d.want = len(all)
	h.pump.Call(func() {
		for _, c := range all {
			err = errors.Join(err, d.use(c))
		}
	})
	return d, err
}

// claim counts a device that uses an export. Two devices with one export would not know of
// each other's writers.
func (b *backend) claim(export, name string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if other, ok := b.names[export]; ok && other != name {
		return fmt.Errorf("device %q has the same export, %q, of %s, and is in use: %w", other, export, b.where(), blk.EBUSY)
	}
	b.names[export] = name
	b.opens[export]++
	b.disks++
	return nil
}

// release is the reverse of claim. It ends the captive server with the last device.
func (b *backend) release(export string) error {
	b.start.Lock()
	defer b.start.Unlock()
	b.mu.Lock()
	if b.opens[export]--; b.opens[export] == 0 {
		delete(b.opens, export)
		delete(b.names, export)
	}
	b.disks--
	var c *captive
	if b.disks == 0 {
		c, b.captive = b.captive, nil
	}
	b.dropHub()
	b.mu.Unlock()
	if c != nil {
		return c.end()
	}
	return nil
}

// closed is called by a disk that is closed.
func (b *backend) closed(d *disk) error { return b.release(d.export) }

// theHub returns the hub, which is started if need be, for so many more queues.
func (b *backend) theHub(queues int) (_ *hub, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.hub == nil {
		if b.hub, err = newHub(); err != nil {
			return nil, err
		}
	}
	b.queues += queues
	return b.hub, nil
}

// dropHub ends the hub after the last queue and disk. The caller has mu.
func (b *backend) dropHub() {
	if b.hub != nil && b.queues == 0 && b.disks == 0 {
		b.hub.stop()
		b.hub = nil
	}
}

// Serve answers a queue by the hub, which serves all of them.
func (b *backend) Serve(q *plugin.Queue) error {
	h, err := b.theHub(1)
	if err != nil {
		return err
	}
	err = h.serve(q)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queues--
	b.dropHub()
	return err
}

// address is that of the server.
func (b *backend) address() nbdwire.Address {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.captive != nil {
		return nbdwire.Address{Network: "unix", Address: b.captive.socket}
	}
	return b.server
}

// startCaptive starts the captive server unless it runs. It waits until a server of an
// earlier process has ended.
func (b *backend) startCaptive(ctx context.Context) error {
	if b.run == "" {
		return nil
	}
	b.start.Lock()
	defer b.start.Unlock()
	b.mu.Lock()
	running := b.captive != nil
	b.mu.Unlock()
	if running {
		return nil
	}
	c, err := startCaptive(ctx, b.run, b.lock, b.captiveEnded)
	if err != nil {
		return fmt.Errorf("start %q: %w", b.run, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.captive = c
	return nil
}

// captiveEnded is called when the captive server has ended by itself. The process ends with
// it: the host starts the next one, and treats the requests in flight as the crash class says.
func (b *backend) captiveEnded(err error) {
	slog.Error("the NBD server has ended, and the plugin ends with it", "server", b.run, "err", err)
	b.exit(1)
}

// connectionLost is called when a connection was lost. A captive server that closes one
// may still have requests of it. Its end is the only proof that it has none.
func (b *backend) connectionLost() {
	b.mu.Lock()
	c := b.captive
	b.mu.Unlock()
	if c != nil {
		c.kill()
	}
}
