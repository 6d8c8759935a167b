package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// A device is opened and closed in the process that runs.

// callTimeout bounds control calls to a plugin that do no I/O.
const callTimeout = 10 * time.Second

// openDevice opens d in the running process. During a restart it waits for the next one.
func (p *ioPlugin) openDevice(ctx context.Context, d *device) error {
	in, err := p.sup.Await(ctx)
	if err != nil {
		return err
	}
	p.mu.Lock()
	d.index, err = p.indices.alloc(in.Generation)
	p.mu.Unlock()
	if err != nil {
		return fmt.Errorf("open %q in plugin %s: %w", d.name, p.cfg.Name, err)
	}
	opened, err := in.OpenStorage(ctx, d.openRequest(in.Generation))
	if err == nil {
		p.server.noteWriter(d, &opened)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.indices.free(d.index)
		if ctx.Err() != nil { // the process may open it later
			p.indices.reserveUntil(d.index, in.Generation)
		}
		return fmt.Errorf("open %q in plugin %s: %w", d.name, p.cfg.Name, err)
	}
	if p.in != in {
		p.indices.free(d.index)
		return fmt.Errorf("open %q: plugin %s died meanwhile: %w", d.name, p.cfg.Name, syscall.EBUSY)
	}
	d.limits.Store(&opened.Limits)
	d.verifier.Store(uint64(p.verifierOf(in.Generation, &opened)))
	p.devices[d.index] = d
	d.setState(devOpen)
	return nil
}

func (d *device) openRequest(generation uint32) plugin.OpenRequest {
	mode := d.widestAccess()
	return plugin.OpenRequest{
		Device: d.index, Name: d.name, File: d.file, Mode: mode,
		ReadOnly: d.key.readOnly, Generation: generation,
	}
}

// close closes d. It has no request in flight. Its index is free again when the
// process has closed it, or has ended. If the process is opening it again, it
// is closed afterwards (revive).
func (p *ioPlugin) close(d *device) {
	p.mu.Lock()
	delete(p.devices, d.index)
	was, in := d.currentState(), p.in
	d.setState(devClosed)
	p.mu.Unlock()
	closed := in == nil
	if in != nil && was == devOpen {
		err := p.closeIn(in, d)
		if closed = err == nil || in.Context().Err() != nil; !closed {
			p.log.Warn("closing a device failed", "device", d.name, "err", err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.indices.free(d.index)
	if !closed {
		p.indices.reserveUntil(d.index, in.Generation)
	}
}

// closeIn closes d in the process. If the process is at an Extents that does not end,
// it closes d when that has ended, and closeIn does not wait for it.
func (p *ioPlugin) closeIn(in *supervise.Instance, d *device) error {
	if !d.hangs.Load() {
		ctx, cancel := context.WithTimeout(in.Context(), callTimeout)
		defer cancel()
		return in.CloseDisk(ctx, d.index)
	}
	closed := make(chan error, 1)
	go func() { closed <- in.CloseDisk(in.Context(), d.index) }()
	select {
	case err := <-closed:
		return err
	case <-time.After(hangingTime):
		return fmt.Errorf("an Extents of it does not end: %w", syscall.EBUSY)
	}
}

// hangingTime is the time for a process to close a device that it may be asked for the
// extents of.
const hangingTime = 500 * time.Millisecond

// closeDisk closes a device that no mapping uses any more in the process.
func (p *ioPlugin) closeDisk(in *supervise.Instance, d *device) error {
	ctx, cancel := context.WithTimeout(in.Context(), callTimeout)
	defer cancel()
	err := in.CloseDisk(ctx, d.index)
	if errors.Is(err, blk.ENODEV) {
		return nil
	}
	return err
}

// isTransient reports whether an error of OpenDisk or ResizeDisk is temporary: the fence, a
// disk that does not answer, or a lack of resources.
func isTransient(err error) bool {
	for _, e := range []error{context.DeadlineExceeded, syscall.EBUSY, syscall.EAGAIN, syscall.EINTR, syscall.ENOMEM, syscall.ENFILE, syscall.EMFILE, syscall.ETIMEDOUT} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
