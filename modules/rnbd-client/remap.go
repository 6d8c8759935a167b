package client

import (
	"context"
	"fmt"
	"syscall"
)

// A device is opened again by hand.

// Remap opens a closed device again. It is the way back after requests have
// failed.
func (c *Client) Remap(ctx context.Context, name string) (*Device, error) {
	return c.remapAs(ctx, name, false)
}

// RemapNew does what Remap does and also accepts another volume. A device that
// waits to be mapped again accepts it at its next try; then RemapNew returns no
// device.
func (c *Client) RemapNew(ctx context.Context, name string) (*Device, error) {
	if c.acceptWaiting(name) {
		return nil, nil
	}
	return c.remapAs(ctx, name, true)
}

func (c *Client) remapAs(ctx context.Context, name string, accept bool) (*Device, error) {
	d, err := c.Device(name)
	if err != nil {
		return nil, err
	}
	switch d.State() {
	case Open:
		if why := d.failureText(); why != "" {
			return c.renewDevice(ctx, d, why)
		}
		return nil, fmt.Errorf("remap %s: it is open: %w", d.name, syscall.EALREADY)
	case Unmapped:
		return nil, fmt.Errorf("remap %s: it is being unmapped: %w", d.name, syscall.ENODEV)
	case Init:
		return nil, fmt.Errorf("remap %s: it is being mapped: %w", d.name, syscall.EBUSY)
	}
	if !d.session.transport.Connected() {
		return nil, fmt.Errorf("remap %s: session %q has no path to the server: %w", d.name, d.session.name, syscall.ECONNABORTED)
	}
	defer d.session.awaitOpen(d)()
	if err := d.openAccepting(ctx, accept); err != nil {
		d.setFailure(err)
		return nil, fmt.Errorf("remap %s: %w", d.name, err)
	}
	if err := d.finishRemap(); err != nil {
		return nil, fmt.Errorf("remap %s: %w", d.name, err)
	}
	return d, nil
}

// renewDevice opens a device again that has failed on the server. why is the reason.
// If it had failed for good and its plugin runs, the server gives it another
// id.
func (c *Client) renewDevice(ctx context.Context, d *Device, why string) (*Device, error) {
	defer d.session.awaitOpen(d)()
	old := d.id.Load()
	err := d.open(ctx)
	if err == nil && d.id.Load() == old {
		return nil, fmt.Errorf("remap %s: %s: %w", d.name, why, syscall.EIO)
	}
	if err != nil {
		return nil, fmt.Errorf("remap %s: %s; it does not open again: %v: %w", d.name, why, err, syscall.EIO)
	}
	d.mu.Lock()
	if d.state == Open {
		d.failing, d.lastError = false, ""
	}
	d.mu.Unlock()
	if err := d.finishRemap(); err != nil {
		return nil, fmt.Errorf("remap %s: %w", d.name, err)
	}
	return d, nil
}

// setFailure stores the reason why d is still closed.
func (d *Device) setFailure(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Closed {
		d.lastError = err.Error()
	}
}

// finishRemap ends a remap after the answer to its OPEN.
func (d *Device) finishRemap() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch d.state {
	case Closed:
		return d.openGate()
	case Unmapped: // the unmap has sent CLOSE
		return fmt.Errorf("it was unmapped meanwhile: %w", syscall.ENODEV)
	}
	return nil
}
