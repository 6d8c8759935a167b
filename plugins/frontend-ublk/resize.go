package main

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// resizeDisk changes the size of a disk in use, in bytes (feature UPDATE_SIZE, Linux
// 6.16). It fails with EOPNOTSUPP if the driver cannot, EINVAL for an impossible
// size, ENODEV while the disk is being removed.
func (d *ublkDevice) resizeDisk(size uint64) error {
	d.ending.Lock() // keeps the disk until resize returns
	defer d.ending.Unlock()
	if size == d.size {
		return nil
	}
	if err := checkSize(size, d.block); err != nil {
		return fmt.Errorf("%s stays at %d bytes: %w", d.diskPath(), d.size, err)
	}
	if !d.ctl.canResize() {
		return fmt.Errorf("%s stays at %d bytes, this kernel's ublk cannot resize a disk (Linux 6.16 can); unmap and map it to get %d: %w",
			d.diskPath(), d.size, size, blk.EOPNOTSUPP)
	}
	if err := d.checkNode(); err != nil {
		return fmt.Errorf("resize %s: %w", d.diskPath(), err)
	}
	if err := d.ctl.resizeDevice(d.info.id, size); err != nil {
		return fmt.Errorf("%s stays at %d bytes, the driver refuses %d: %w", d.diskPath(), d.size, size, err)
	}
	d.log.Info("disk resized", "device", d.name, "path", d.diskPath(), "from", d.size, "to", size)
	d.size = size
	return nil
}

// checkNode returns an error unless the disk exists. The caller holds d.ending.
func (d *ublkDevice) checkNode() error {
	if d.stopping {
		return fmt.Errorf("it is being removed: %w", blk.ENODEV)
	}
	info, err := d.ctl.deviceInfo(d.info.id)
	if err == nil && info.state != stateLive {
		err = fmt.Errorf("it is %s: %w", stateName(info.state), blk.ENODEV)
	}
	return err
}
