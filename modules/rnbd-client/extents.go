package client

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// What of a device holds data: docs/extend/protocol/rnbd.md, "Extents".

// extentsTime bounds the time of a question. A server gives up after 5 s.
const extentsTime = 10 * time.Second

// Extents asks the server what of n bytes from off on holds data. The list begins
// at off, has at least one extent and at most extents.Max, and may end before
// off+n. Both are multiples of 512. The list has what was written, and answered,
// before the call. The error is EOPNOTSUPP if the server or its storage knows
// nothing of holes; after any error, all of the range has to be taken for data.
func (d *Device) Extents(ctx context.Context, off, n uint64) ([]extents.Extent, error) {
	if errno := d.checkRange(off, n); errno != blk.OK {
		return nil, fmt.Errorf("extents of %d bytes at %d: %w", n, off, errno)
	}
	if s := d.session; s.features.Load()&rnbdwire.FeatureExtents == 0 || s.maxIO() < rnbdwire.ExtentsRspSize {
		return nil, fmt.Errorf("extents: server %s does not tell them: it is a Linux kernel, or older: %w", s.serverAddress(), syscall.EOPNOTSUPP)
	}
	select {
	case d.asksExtents <- struct{}{}:
		defer func() { <-d.asksExtents }()
	case <-ctx.Done():
		return nil, fmt.Errorf("extents: another question about the device is not answered: %w", context.Cause(ctx))
	}
	return d.askExtents(ctx, off, n)
}

// checkRange returns the errno for a question about a range.
func (d *Device) checkRange(off, n uint64) blk.Errno {
	size := d.limits.Load().Size
	switch {
	case n == 0 || (off|n)%blk.SectorSize != 0:
		return blk.EINVAL
	case n > size || off > size-n:
		return blk.EIO
	}
	return blk.OK
}

// errReopened is the error of an answer that may be about another device.
var errReopened = fmt.Errorf("the device was opened again meanwhile: %w", syscall.EAGAIN)

func (d *Device) askExtents(ctx context.Context, off, n uint64) ([]extents.Extent, error) {
	before, err := d.currentOpen()
	if err != nil {
		return nil, err
	}
	msg, rsp := make([]byte, rnbdwire.ExtentsSize), make(rnbdwire.ExtentsRsp, rnbdwire.ExtentsRspSize)
	rnbdwire.ExtentsFields{DeviceID: before.id, Sector: off / blk.SectorSize, Sectors: n / blk.SectorSize}.Put(msg)
	if err := d.session.transport.AdminRead(ctx, msg, rsp); err != nil {
		return nil, err
	}
	list, err := rsp.Extents(n)
	if err != nil {
		return nil, fmt.Errorf("server %s: %w: %w", d.session.serverAddress(), err, syscall.EPROTO)
	}
	switch after, err := d.currentOpen(); {
	case err != nil:
		return nil, err
	case after != before:
		return nil, errReopened
	}
	return list, nil
}

// deviceOpen identifies an OPEN of a device.
type deviceOpen struct {
	epoch uint64 // of the session
	id    uint32
}

// currentOpen returns the OPEN by which d is open now.
func (d *Device) currentOpen() (deviceOpen, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Open {
		return deviceOpen{}, fmt.Errorf("device %s is %s: %w", d.name, d.state, syscall.ENOTCONN)
	}
	return deviceOpen{d.openedIn, d.id.Load()}, nil
}

// extentsOrData returns one extent of data if nothing is known about the range.
func (d *Device) extentsOrData(off, n uint64) []extents.Extent {
	ctx, cancel := context.WithTimeout(d.client.life, extentsTime)
	defer cancel()
	list, err := d.Extents(ctx, off, n)
	if err != nil {
		d.log.Debug("all of a range is taken for data", "offset", off, "size", n, "err", err)
		return []extents.Extent{{Len: n}}
	}
	return list
}
