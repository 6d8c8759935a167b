package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// fabricDevice returns the device of a fabric, nil if there is none.
func (c *Client) fabricDevice(name string) verbs.Device {
	if all := c.fabrics.Load(); all != nil {
		return (*all)[name]
	}
	return nil
}

// allFabrics returns the devices, sorted by the names of their fabrics.
func (c *Client) allFabrics() (out []verbs.Device) {
	all := *c.fabrics.Load()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[name])
	}
	return out
}

// closeFabrics closes the fabrics of Config.Reopen, for the next process to have their
// addresses. No session is left.
func (c *Client) closeFabrics(ctx context.Context) error {
	var errs []error
	for name := range c.cfg.Reopen {
		dev := c.fabricDevice(name)
		if dev == nil {
			continue
		}
		for _, p := range c.pumps {
			errs = append(errs, p.poller.Release(ctx, dev))
		}
		if err := dev.Close(); err != nil {
			errs = append(errs, fmt.Errorf("fabric %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// reopenFabrics is the reverse of closeFabrics, after it has failed, too.
func (c *Client) reopenFabrics() error {
	all := maps.Clone(*c.fabrics.Load())
	var errs []error
	for name, open := range c.cfg.Reopen {
		dev, err := open()
		if err != nil {
			errs = append(errs, fmt.Errorf("fabric %s: %w", name, err))
			continue
		}
		all[name] = dev
	}
	c.fabrics.Store(&all)
	return errors.Join(errs...)
}
