package main

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

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/nbd"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// benchTarget is a device under measurement, with the facts that are known
// about the way to it. Empty: it has none of that.
type benchTarget struct {
	load.Target
	node   string   // the device that is opened here
	export string   // name of the device on its server
	via    string   // name of the session
	access string   // how this process makes requests
	plugin string   // front end here
	ioMode string   // io plugin of the server, as far as it is known
	fabric []string // of the paths
	tls    []string // protocol and cipher of the paths, or of the NBD connection
	paths  []string // names of the paths
}

// benchTargets are all of them; closers are called the last first.
type benchTargets struct {
	list    []*benchTarget
	closers []func() error
}

// closing bounds the time for a server to close the devices.
const closing = 5 * time.Second

// close gives them back. The measurement is over: errors have no effect on it
// now, and the kernel or the server cleans up.
func (b *benchTargets) close() {
	for _, f := range slices.Backward(b.closers) {
		_ = f()
	}
}

// open opens the devices of the command line.
func (o *benchOptions) open(c *call, ws []load.Workload) (b *benchTargets, err error) {
	ctx, cancel, err := deadline(c.cmd)
	if err != nil {
		return nil, err
	}
	defer cancel()
	b = &benchTargets{}
	switch {
	case len(o.servers) > 0:
		err = o.openServer(ctx, c, b, ws)
	case o.plugin != "":
		err = o.openPlugin(ctx, c, b)
	default:
		err = o.openHere(ctx, c, b)
	}
	if err != nil {
		b.close()
		return nil, err
	}
	b.askServer(ctx, c)
	return b, nil
}

// askServer asks a server on this host about its plugins for the devices. Of
// others that is not known.
func (b *benchTargets) askServer(ctx context.Context, c *call) {
	d, err := connect(ctx, c.cmd, onServer)
	if err != nil {
		return
	}
	defer d.close()
	inv, err := d.look(ctx, true)
	if err != nil {
		return
	}
	for _, t := range b.list {
		for _, e := range inv.devices {
			if t.via != "" && e.session == t.via && e.path == t.export {
				t.ioMode = e.plugin()
			}
		}
	}
}

// openHere opens devices that this host has.
func (o *benchOptions) openHere(ctx context.Context, c *call, b *benchTargets) error {
	ask := sync.OnceValues(func() (*inventory, error) {
		d, err := connect(ctx, c.cmd, onClient)
		if err != nil {
			return nil, err
		}
		defer d.close()
		return d.look(ctx, true)
	})
	for _, name := range c.args {
		t, err := o.openOne(ctx, b, ask, name)
		if err != nil {
			return fmt.Errorf("bench %s: %w", name, err)
		}
		b.list = append(b.list, t)
	}
	return nil
}

func isLocalPath(name string) bool {
	return strings.HasPrefix(name, "/") || strings.HasPrefix(name, ".")
}

// openOne opens a mapped device or a path. A path is never taken for the name
// of a mapped device on its server, because then writes could destroy the wrong
// device. For nodes it asks the daemon, since that knows more about its own
// nodes.
func (o *benchOptions) openOne(ctx context.Context, b *benchTargets, ask func() (*inventory, error), name string) (*benchTarget, error) {
	if nbd.IsURI(name) {
		t := &benchTarget{node: name}
		t.Name = name
		return t, t.openNBD(ctx, o.write)
	}
	if isLocalPath(name) && !strings.HasPrefix(name, "/dev/") {
		return o.openFile(ctx, b, name, &benchTarget{})
	}
	inv, err := ask()
	var d device
	if err == nil {
		d, err = inv.device(name, "")
	}
	switch {
	case err == nil && (d.node == name || !isLocalPath(name)):
		return o.openMapped(ctx, b, inv, d)
	case isLocalPath(name):
		return o.openFile(ctx, b, name, &benchTarget{})
	}
	if _, serr := os.Stat(name); serr == nil {
		err = hinted{err, "for the local file write ./" + name}
	}
	return nil, err
}

func (o *benchOptions) openMapped(ctx context.Context, b *benchTargets, inv *inventory, d device) (*benchTarget, error) {
	if err := o.mayUse(d); err != nil {
		return nil, err
	}
	t := &benchTarget{node: d.mapped.Endpoint, plugin: d.mapped.Frontend, export: d.path}
	t.Name = d.name
	if s, err := inv.session(d.session); err == nil {
		t.describePaths(s.Session)
	}
	if d.node != "" {
		return o.openFile(ctx, b, d.node, t)
	}
	return t, t.openNBD(ctx, o.write)
}

// openNBD opens the export of t's node.
func (t *benchTarget) openNBD(ctx context.Context, write bool) error {
	e, err := nbd.Open(ctx, t.node)
	if err != nil {
		return err
	}
	if write && e.Limits().ReadOnly {
		return fmt.Errorf("the export is read-only: %w", syscall.EROFS)
	}
	t.Device, t.access = e, "NBD"
	if c := e.TLS(); c != "" {
		t.tls = []string{c}
	}
	return nil
}

// mayUse returns an error if a mapped device cannot be measured.
func (o *benchOptions) mayUse(d device) error {
	switch {
	case d.state != "open":
		return fmt.Errorf("it is %s (%s): %w", d.state, d.mapped.LastError, syscall.ENOTCONN)
	case o.write && (d.mode == "ro" || d.limits.GetReadOnly()):
		return fmt.Errorf("it is mapped read-only: %w", syscall.EROFS)
	case o.write && d.mapped.Openers > 0:
		return inUse(fmt.Errorf("users that have it open: %d: %w", d.mapped.Openers, syscall.EBUSY))
	}
	return nil
}

func (o *benchOptions) openFile(ctx context.Context, b *benchTargets, path string, t *benchTarget) (*benchTarget, error) {
	f, err := load.OpenFile(ctx, path, o.write)
	if errors.Is(err, syscall.EBUSY) {
		err = inUse(err)
	}
	if err != nil {
		return nil, err
	}
	b.closers = append(b.closers, f.Close)
	if t.Name == "" {
		t.Name = path
	}
	t.node, t.Device, t.access = path, f, f.Access()
	return t, nil
}

// inUse explains that a target in use is not written to. There is no way to
// force it.
func inUse(err error) error {
	return hinted{err, "writes would destroy what its users have: stop them, or measure reads, without --write"}
}

// describePaths records the paths to the server.
func (t *benchTarget) describePaths(s *controlpb.Session) {
	t.via = s.Name
	for _, p := range s.Paths {
		t.paths = append(t.paths, p.Name)
		if !slices.Contains(t.fabric, p.Fabric) {
			t.fabric = append(t.fabric, p.Fabric)
		}
		if c := securityText(p.Security); c != "" && !slices.Contains(t.tls, c) {
			t.tls = append(t.tls, c)
		}
	}
}
