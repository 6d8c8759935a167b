package client

import (
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Resize changes the size of a device on this host, in sectors of 512 bytes,
// as the control file "resize" of the kernel's client does. The server does
// not learn of it and fails requests beyond its own end. The size holds until
// the server sends one. Errors: ENOENT unless the device is mapped and open,
// EINVAL if the size is not a whole number of blocks.
func (c *Client) Resize(device string, sectors uint64) error {
	d, err := c.Device(device)
	if err != nil {
		return fmt.Errorf("resize %q: %w", device, err)
	}
	if sectors > maxSectors {
		return fmt.Errorf("resize %s: %d sectors are more than a device can have: %w", d.name, sectors, syscall.EINVAL)
	}
	if err := d.setSize(sectors * blk.SectorSize); err != nil {
		return fmt.Errorf("resize %s: %w", d.name, err)
	}
	if fe := d.fe.Load(); fe != nil {
		fe.resizeNow(context.Background(), d)
	}
	return nil
}

// setSize changes the size of an open device.
func (d *Device) setSize(size uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Open {
		return fmt.Errorf("it is %s: %w", d.state, syscall.ENOENT)
	}
	l := *d.limits.Load()
	if size%uint64(l.LogicalBlockSize) != 0 {
		return fmt.Errorf("%d bytes are not a whole number of blocks of %d: %w", size, l.LogicalBlockSize, syscall.EINVAL)
	}
	old := l.Size
	l.Size = size
	d.limits.Store(&l)
	d.log.Info("device resized", "from", old, "to", size)
	return nil
}
