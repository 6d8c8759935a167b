package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// onExtents handles EXTENTS. A mapping has one at a time.
func (s *Server) onExtents(ctx context.Context, op *rtrs.Op, sess *session, msg rnbdwire.Extents) error {
	if !msg.IsValid() || len(msg) != rnbdwire.ExtentsSize || op.ReplyLen() != rnbdwire.ExtentsRspSize {
		return fmt.Errorf("extents: message of %d bytes, reply of %d: %w", len(msg), op.ReplyLen(), syscall.EINVAL)
	}
	f := msg.Fields()
	m := sess.mappingByID(f.DeviceID)
	if m == nil {
		return fmt.Errorf("extents: no device %d: %w", f.DeviceID, syscall.ENOTCONN)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.extentsTimeout)
	defer cancel()
	list, err := m.askExtents(ctx, f.Sector, f.Sectors)
	if err != nil {
		return fmt.Errorf("extents of %q: %w", m.name, err)
	}
	rnbdwire.PutExtents(op.Data(), list)
	return nil
}

// askExtents asks for the extents of n sectors from sector first on.
func (m *mapping) askExtents(ctx context.Context, first, n uint64) ([]extents.Extent, error) {
	size := m.dev.limits.Load().Size / blk.SectorSize
	switch {
	case n == 0:
		return nil, fmt.Errorf("of no sectors: %w", syscall.EINVAL)
	case n > size || first > size-n:
		return nil, fmt.Errorf("%d sectors at %d of %d: %w", n, first, size, syscall.EIO)
	}
	ctx, cancel := context.WithCancel(ctx)
	a := &extentsCall{cancel: cancel, ended: make(chan struct{})}
	defer cancel()
	if !m.asking.CompareAndSwap(nil, a) {
		return nil, fmt.Errorf("another EXTENTS is under way: %w", syscall.EBUSY)
	}
	defer close(a.ended)
	defer m.asking.Store(nil)
	if m.closed.Load() { // endExtents may have come before
		return nil, fmt.Errorf("it is closed: %w", syscall.ENOTCONN)
	}
	list, err := m.dev.readExtents(ctx, first*blk.SectorSize, n*blk.SectorSize)
	switch {
	case m.closed.Load(): // its number in the plugin may be another device's
		return nil, fmt.Errorf("it is closed meanwhile: %w", syscall.ENOTCONN)
	case gaveUp(err):
		return nil, fmt.Errorf("%w: %w", err, syscall.ETIMEDOUT)
	}
	return list, err
}

// endExtents ends the EXTENTS of m that is under way, and waits for its end. The plugin
// may go on with it.
func (m *mapping) endExtents() {
	if a := m.asking.Load(); a != nil {
		a.cancel()
		<-a.ended
	}
}

// readExtents asks the plugin. Sessions wait for one another.
func (d *device) readExtents(ctx context.Context, off, n uint64) ([]extents.Extent, error) {
	select {
	case d.extentsToken <- struct{}{}:
		defer func() { <-d.extentsToken }()
	case <-ctx.Done():
		return nil, fmt.Errorf("another session's EXTENTS does not end: %w", ctx.Err())
	}
	in, index := d.currentProcess()
	if in == nil {
		return nil, fmt.Errorf("the plugin does not serve it: %w", syscall.EIO)
	}
	list, err := in.Extents(ctx, index, off, n)
	d.hangs.Store(gaveUp(err) || blk.ToErrno(err) == blk.EBUSY)
	if err != nil {
		return nil, err
	}
	if now, i := d.currentProcess(); now != in || i != index {
		return nil, fmt.Errorf("the plugin has ended meanwhile: %w", syscall.EIO)
	}
	return list, nil
}

// gaveUp reports whether a call has ended without an answer of the plugin. Either end
// may have noticed first that the time is over.
func gaveUp(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// currentProcess returns the process that has d open, and d's index there; nil if none has.
func (d *device) currentProcess() (*supervise.Instance, uint32) {
	p := d.plugin
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.in == nil || p.devices[d.index] != d || !d.isServing() {
		return nil, 0
	}
	return p.in, d.index
}
