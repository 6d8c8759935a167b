package client

import (
	"context"
	"crypto/rand"
	"fmt"
	"syscall"
	"time"
)

// forcedWait bounds the time for which RemapByForce waits for the device.
const forcedWait = 5 * time.Second

// RemapByForce takes a device from its users and maps it again with the same settings,
// whatever volume its name leads to by now. The mapping is kept: while it cannot be
// made, as with storage that hangs, the device waits, closed, and is tried again until
// it works or is unmapped. RemapByForce returns the device, or after a time ETIMEDOUT
// with the reason, and the tries go on then. The error is EALREADY if the device waits
// already, EBUSY if it is being mapped or unmapped.
func (c *Client) RemapByForce(ctx context.Context, name string) (*Device, error) {
	p, err := c.claimMapped(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("remap %q: %w", name, err)
	}
	s := p.d.savedState()
	s.Identity, s.Remapped = rand.Text(), true // the front end keeps no part of the old disk
	s.Known, s.Unreported = nil, false         // of users that are gone
	over, ok := c.remapLater(s, p)
	if !ok {
		return nil, fmt.Errorf("remap %q: the client ends: %w", name, syscall.ESHUTDOWN)
	}
	if err := c.unmapAt(context.WithoutCancel(ctx), p, true); err != nil {
		return nil, fmt.Errorf("remap %q: %w", name, err)
	}
	return c.awaitRemapped(ctx, s, over)
}

// claimMapped is claim by force, of a device that is mapped.
func (c *Client) claimMapped(ctx context.Context, name string) (*reservation, error) {
	c.mapMu.Lock()
	p, err := c.findMapping(name)
	switch {
	case err != nil:
		if i := c.waitingAt(name); i >= 0 {
			err = fmt.Errorf("it %s, and is tried again and again: %w", c.waiting[i].waitReason(), syscall.EALREADY)
		}
	case p.work != 0:
		err = fmt.Errorf("%s is being mapped or unmapped: %w", p.d.name, syscall.EBUSY)
	}
	c.mapMu.Unlock()
	if err != nil {
		return nil, err
	}
	_, p, err = c.claimUnmap(ctx, p.d.name, true)
	return p, err
}

// remapLater records that s is to be mapped, and has mapUntilDone try that: its reservation is that
// of p, so it waits for the end of the unmap. over is closed when the tries are over.
// ok is false if the client ends; p is as before then.
func (c *Client) remapLater(s savedDevice, p *reservation) (over <-chan struct{}, ok bool) {
	done := make(chan struct{})
	c.saving.Lock() // endRestoring waits for its holder
	c.mapMu.Lock()
	if c.life.Err() != nil {
		p.endWork()
		c.mapMu.Unlock()
		c.saving.Unlock()
		return nil, false
	}
	c.setWaiting(append(c.waiting, s))
	c.requestSave()
	c.restoring.Go(func() {
		defer close(done)
		c.mapUntilDone(s)
	})
	c.mapMu.Unlock()
	c.saving.Unlock()
	c.flushState()
	return done, true
}

// awaitRemapped waits for the end of the tries to map s.
func (c *Client) awaitRemapped(ctx context.Context, s savedDevice, over <-chan struct{}) (*Device, error) {
	ctx, cancel := context.WithTimeout(ctx, min(forcedWait, c.cfg.MapTimeout))
	defer cancel()
	select {
	case <-over:
	case <-ctx.Done():
		why := c.failureOf(s.Identity)
		if why == "" {
			why = "the server has not answered yet"
		}
		return nil, fmt.Errorf("remap %s: its users are gone, and it is tried again until it is mapped: %s: %w", s.Name, why, syscall.ETIMEDOUT)
	}
	for _, d := range c.Devices() {
		if d.identity == s.Identity {
			return d, nil
		}
	}
	return nil, fmt.Errorf("remap %s: it was unmapped meanwhile: %w", s.Name, syscall.ENODEV)
}
