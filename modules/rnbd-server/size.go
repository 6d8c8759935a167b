package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Devices change their size while they are open: files by truncate, block
// devices by who made them. The server looks once in a while at what the kernel
// says of the node, which needs no open description and no plugin. When that
// has changed, or on command, the plugin is asked for the device's limits, and
// clients are told. Names that are opaque have no node: there is the command
// alone.

// watchSizes looks every interval, until ctx ends. While no device has a node it
// sleeps.
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
			if !d.looking.Swap(true) { // else its file system or plugin does not answer
				go s.watch(ctx, d)
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

// noteNode tells watchSizes that d is open.
func (s *Server) noteNode(d *device) {
	if d.file == nil {
		return
	}
	select {
	case s.nodeOpened <- struct{}{}:
	default: // it has not heard of the last one yet
	}
}

// watch resizes d if its node has another size than when it was looked at last.
// It may take for ever, as nodeSize does.
func (s *Server) watch(ctx context.Context, d *device) {
	defer d.looking.Store(false)
	size, ok := nodeSize(d.file)
	d.sizeMu.Lock()
	defer d.sizeMu.Unlock()
	if !ok || size == d.nodeSize || !d.serves() {
		return
	}
	d.nodeSize = size
	if err := s.resize(ctx, d); err != nil && ctx.Err() == nil {
		d.plugin.log.Warn("device has another size, but its plugin does not take it", "device", d.name, "err", err)
	}
}

// nodeSize is the size in bytes of the file or block device behind an O_PATH
// descriptor. A block device without a size has lost its medium; that is no
// size to tell. It takes for ever where a network file system does not answer.
func nodeSize(f *os.File) (uint64, bool) {
	if f == nil {
		return 0, false
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, false
	}
	var st unix.Stat_t
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = unix.Fstat(int(fd), &st) }); err != nil || serr != nil {
		return 0, false
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return uint64(st.Size), true
	}
	text, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/size", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	if err != nil {
		return 0, false
	}
	sectors, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 54)
	return sectors * blk.SectorSize, err == nil && sectors > 0
}

// resize asks the plugin for d's limits and tells clients of a new size. Caller
// holds d.sizeMu.
func (s *Server) resize(ctx context.Context, d *device) error {
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
	if err := compatible(d.limits.Load(), &limits); err != nil {
		return fmt.Errorf("the limits of %s have changed: %w", d.name, err)
	}
	s.takeLimits(d, limits)
	return nil
}

// takeLimits makes l what requests of d are checked against, and tells clients
// if the size is another one.
func (s *Server) takeLimits(d *device, l blk.Limits) {
	old := d.limits.Swap(&l)
	if old.Size == l.Size {
		return
	}
	s.log.Info("device resized", "device", d.name, "from", old.Size, "to", l.Size)
	s.tellAll(d, rnbdwire.EventResize)
}

// tellAll is tell for all mappings of d.
func (s *Server) tellAll(d *device, kind rnbdwire.EventKind) {
	for i := range s.sessions {
		sess := s.sessions[i].Load()
		if sess == nil {
			continue
		}
		for _, m := range sess.mappings() {
			if m.dev == d {
				s.tell(m, kind)
			}
		}
	}
}

// Resize reads the sizes of the devices of that name or path again. A node that
// is open both for reading and for writing is two devices. The error is ENOENT
// if none is open.
func (s *Server) Resize(ctx context.Context, name string) error {
	found := false
	var errs []error
	for _, d := range s.openDevices() {
		if d.name != name && d.path != name {
			continue
		}
		found = true
		d.sizeMu.Lock()
		errs = append(errs, s.resize(ctx, d))
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
