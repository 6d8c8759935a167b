package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Devices can change their size while they are open: files by truncate, block
// devices by their administrator. The server checks the kernel's size of the
// node at intervals. That needs no open description and no plugin. If the size
// has changed, or on command, it asks the plugin for the device's limits and
// tells clients. Opaque names have no node: only the command works for them.

// watchSizes checks sizes every interval, until ctx ends. It sleeps while no
// device has a node.
func (s *Server) watchSizes(ctx context.Context, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var devices []*device
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		devices = s.devicesWithNode(devices[:0])
		for _, d := range devices {
			if !d.watching.Swap(true) { // true: its file system or plugin has not answered the last check
				go s.watchSize(ctx, d)
			}
		}
		if len(devices) > 0 {
			continue
		}
		tick.Stop()
		select {
		case <-ctx.Done():
			return
		case <-s.nodeOpened:
			tick.Reset(interval)
		}
	}
}

// devicesWithNode adds to out the open devices that have a node.
func (s *Server) devicesWithNode(out []*device) []*device {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.devices {
		if d.file != nil {
			out = append(out, d)
		}
	}
	return out
}

// noteNode tells watchSizes that a device is open, if d has a node.
func (s *Server) noteNode(d *device) {
	if d.file == nil {
		return
	}
	select {
	case s.nodeOpened <- struct{}{}:
	default: // a token is there already
	}
}

// watchSize resizes d if its node has another size than at the last check. If the plugin
// cannot take it now, the next check tries again. watch may block for ever, as nodeSize
// does.
func (s *Server) watchSize(ctx context.Context, d *device) {
	defer d.watching.Store(false)
	size, ok := nodeSize(d.file)
	d.sizeMu.Lock()
	defer d.sizeMu.Unlock()
	if !ok || size == d.nodeSize || !d.isServing() {
		return
	}
	err := s.resizeDevice(ctx, d)
	if err == nil || !isTransient(err) && !errors.Is(err, plugin.ErrExited) {
		d.nodeSize = size
	}
	if err != nil && ctx.Err() == nil && d.untaken != size {
		d.untaken = size
		d.plugin.log.Warn("device has another size, but its plugin does not take it", "device", d.name, "err", err)
	}
}

// resizeDevice asks the plugin for d's limits and tells clients of a new size. The
// caller holds d.sizeMu.
func (s *Server) resizeDevice(ctx context.Context, d *device) error {
	proc, err := d.plugin.sup.Current()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	limits, err := proc.ResizeDisk(ctx, d.index)
	if err != nil {
		return err
	}
	if err := checkCompatible(d.limits.Load(), &limits); err != nil {
		return fmt.Errorf("the limits of %s have changed: %w", d.name, err)
	}
	s.takeLimits(d, limits)
	return nil
}

// takeLimits sets the limits for requests of d, and tells clients if the size
// has changed.
func (s *Server) takeLimits(d *device, l blk.Limits) {
	old := d.limits.Swap(&l)
	if old.Size == l.Size {
		return
	}
	s.log.Info("device resized", "device", d.name, "from", old.Size, "to", l.Size)
	s.cfg.Journal.Add(journal.Event{Kind: journal.Device, Device: d.name, From: fmt.Sprint(old.Size, " bytes"), To: fmt.Sprint(l.Size, " bytes")})
	s.notifyUsers(d, rnbdwire.EventResize)
}

// notifyUsers tells the clients of all mappings of d.
func (s *Server) notifyUsers(d *device, kind rnbdwire.EventKind) {
	for i := range s.sessions {
		sess := s.sessions[i].Load()
		if sess == nil {
			continue
		}
		for _, m := range sess.openMappings() {
			if m.dev == d {
				s.notify(m, kind)
			}
		}
	}
}

// Resize reads the sizes of the devices of that name or path again. A node that
// is open both read-only and for writing is two devices. The error is ENOENT if
// none is open.
func (s *Server) Resize(ctx context.Context, name string) error {
	found := false
	var errs []error
	for _, d := range s.openDevices() {
		if d.name != name && d.path != name {
			continue
		}
		found = true
		d.sizeMu.Lock()
		errs = append(errs, s.resizeDevice(ctx, d))
		d.sizeMu.Unlock()
	}
	if !found {
		return fmt.Errorf("resize %q: no session has it open: %w", name, syscall.ENOENT)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("resize %q: %w", name, err)
	}
	return nil
}
