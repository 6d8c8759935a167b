package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Unmap unmaps a device. Without force the error is EBUSY while a user has it
// open or it is being mapped. The error is EALREADY while another unmap is
// under way.
func (c *Client) Unmap(ctx context.Context, name string, force bool) error {
	ctx, p, err := c.claimUnmap(ctx, name, force)
	switch {
	case errors.Is(err, syscall.ENOENT), err == errGivenUp:
		if found, derr := c.dropWaiting(name, force); found || err == errGivenUp {
			err = derr
		}
	case err == nil:
		err = c.unmapAt(ctx, p, force)
	}
	if err != nil {
		return fmt.Errorf("unmap %q: %w", name, err)
	}
	c.unreserveName(name)
	return nil
}

// unmapAt unmaps the claimed device. If the front end does not give it up, it
// stays mapped.
func (c *Client) unmapAt(ctx context.Context, p *reservation, force bool) error {
	if force {
		p.d.failRequests() // the front end would wait for them
	}
	if fe := p.d.fe.Load(); fe != nil {
		if err := fe.removeDevice(ctx, p.d, force); err != nil {
			c.mapMu.Lock()
			defer c.mapDone()
			p.endWork()
			return err
		}
	}
	c.finishUnmap(ctx, p)
	return nil
}

// failRequests makes all requests of d fail from now on.
func (d *Device) failRequests() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopPatience()
	d.needsRemap = true
	d.setGate(gateFail)
}

// finishUnmap does the rest of an unmap after the front end has given up the device.
func (c *Client) finishUnmap(ctx context.Context, p *reservation) {
	d := p.d
	ctx = context.WithoutCancel(ctx)
	epoch := d.endUse()
	_ = d.awaitUnused(ctx, forcedClose)
	d.sendClose(ctx, epoch, d.id.Load())
	c.devices[d.index].Store(nil)
	c.forgetDisk()
	c.leaveSession(ctx, d) // if the session ends here its requests end, too
	if err := d.checkUnused(); err != nil {
		c.retireUnmap(d, err)
	} else {
		c.releaseMemory(d)
		d.log.Info("device unmapped")
	}
	c.releaseReservation(p)
}

// forgetDisk records that a device is gone, before its session ends.
func (c *Client) forgetDisk() {
	c.mapMu.Lock()
	defer c.mapDone()
	c.requestSave()
}

// releaseMemory frees the memory of a device without requests.
func (c *Client) releaseMemory(d *Device) {
	d.removeFromUsers()
	d.freeArena()
}

// retireUnmap leaves the rest of an unmap to the end of the device's requests: a
// server may write to its memory until it has answered or its path is lost.
// Until then the device's index is not used again. The caller releases its reservation
// afterwards.
func (c *Client) retireUnmap(d *Device, cause error) {
	d.log.Warn("device unmapped, its memory is kept until its requests have ended", "err", cause)
	c.mapMu.Lock()
	c.retired[d.index] = d
	c.retiring.Add(1)
	c.mapDone()
	go func() {
		defer c.retiring.Done()
		for d.awaitUnused(context.Background(), time.Minute) != nil {
		}
		if fe := d.fe.Load(); fe != nil {
			_ = fe.removeDevice(context.Background(), d, true) // its place at the front end has waited for the requests, too
		}
		c.releaseMemory(d)
		c.mapMu.Lock()
		delete(c.retired, d.index)
		c.mapDone()
		d.log.Info("requests of the unmapped device have ended")
	}()
}

// checkUnused returns an error while something may still use the memory of d.
func (d *Device) checkUnused() error {
	if n := d.inFlight(); n > 0 {
		return fmt.Errorf("%d requests have not ended: %w", n, syscall.ETIMEDOUT)
	}
	if fe := d.fe.Load(); fe != nil && fe.showsDevice(d) {
		return fmt.Errorf("a new process of front end %s is being shown it: %w", fe.cfg.Name, syscall.ETIMEDOUT)
	}
	return nil
}

// awaitUnused waits for at most limit until nothing uses the memory of d.
func (d *Device) awaitUnused(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := d.checkUnused()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(5 * time.Millisecond):
		}
	}
}
