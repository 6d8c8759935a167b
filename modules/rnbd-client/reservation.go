package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
)

// A mapping takes its reservation before it does anything slow and keeps it to the
// end of its unmap: an index, a name, and a path in a session. No other work of
// the client waits for a server or a front end that is slow. A mapping that
// needs a reserved name or index is refused. It waits only if the reservation is being given
// back.

var errAway = fmt.Errorf("another process of the daemon takes the devices over: %w", syscall.EBUSY)

// beginWork starts work on p. The context ends with ctx, or when another caller
// cancels the work. The caller holds mapMu.
func (p *reservation) beginWork(ctx context.Context, w mappingWork) context.Context {
	ctx, give := context.WithCancelCause(ctx)
	p.work, p.cancel, p.ended = w, give, make(chan struct{})
	return ctx
}

// endWork ends the work on p. The caller holds mapMu.
func (p *reservation) endWork() {
	p.cancel(nil)
	p.work = 0
	close(p.ended)
}

// reserve makes the reservation of d. The error is EEXIST if another mapping has the name
// or the path. The context is that of the map.
func (c *Client) reserve(ctx context.Context, d *Device, session string, r *MapRequest) (context.Context, *reservation, error) {
	c.mapMu.Lock()
	defer c.mapDone()
	for {
		if c.life.Err() != nil {
			return ctx, nil, fmt.Errorf("the client ends: %w", syscall.ESHUTDOWN)
		}
		if c.away {
			return ctx, nil, errAway
		}
		if err := c.checkWaiting(r); err != nil {
			return ctx, nil, err
		}
		other, err := c.takenBy(d, session)
		if err != nil {
			return ctx, nil, err
		}
		if other == nil {
			break
		}
		ended := other.ended
		c.mapMu.Unlock()
		select {
		case <-ended:
		case <-ctx.Done():
		}
		c.mapMu.Lock()
		if err := ctx.Err(); err != nil {
			return ctx, nil, fmt.Errorf("%s is still being unmapped: %w", other.d.name, err)
		}
	}
	index, ok := c.freeIndex()
	if !ok {
		return ctx, nil, fmt.Errorf("%d devices are mapped already: %w", MaxDevices, syscall.ENOSPC)
	}
	d.index = index
	if d.name == "" {
		d.name = c.freeName(index)
	}
	p := &reservation{d: d, session: session}
	c.places[index] = p
	return p.beginWork(ctx, mapping), p, nil
}

// takenBy looks for a mapping with the name or the path of d. It returns an
// error if that one stays, or its reservation if it is being unmapped. The caller
// holds mapMu.
func (c *Client) takenBy(d *Device, session string) (*reservation, error) {
	for _, p := range c.places {
		sameName := d.name != "" && p.d.name == d.name
		samePath := p.session == session && p.d.path == d.path
		goes := p.work == unmapping || p.work == unmappingByForce
		switch {
		case !sameName && !samePath:
		case goes:
			return p, nil
		case sameName:
			return nil, fmt.Errorf("the name %q is taken: %w", d.name, syscall.EEXIST)
		case p.work == mapping:
			return nil, fmt.Errorf("it is being mapped as %s in session %q: %w", p.d.name, session, syscall.EEXIST)
		default:
			return nil, fmt.Errorf("it is mapped as %s in session %q: %w", p.d.name, session, syscall.EEXIST)
		}
	}
	return nil, nil
}

// freeIndex returns the first free index. The caller holds mapMu.
func (c *Client) freeIndex() (uint32, bool) {
	for i := range uint32(MaxDevices) {
		if c.isFree(i) {
			return i, true
		}
	}
	return 0, false
}

// isFree reports whether nothing uses the index. The caller holds mapMu.
func (c *Client) isFree(i uint32) bool {
	return c.places[i] == nil && c.retired[i] == nil && !c.keepsIndex(i)
}

// freeName makes a name from an index. Caller holds mapMu.
func (c *Client) freeName(index uint32) string {
	taken := map[string]bool{}
	for _, p := range c.places {
		taken[p.d.name] = true
	}
	for _, s := range c.waiting {
		taken[s.Name] = true
	}
	for _, name := range c.reserved {
		taken[name] = true
	}
	name := fmt.Sprint("rnbd", index)
	for i := MaxDevices; taken[name]; i++ {
		name = fmt.Sprint("rnbd", i)
	}
	return name
}

// Reserve replaces the names that Config.ReservedNames has said at first. Unmap frees the
// name of its device.
func (c *Client) Reserve(names []string) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	c.reserved = names
}

// unreserveName frees the name of a device that is given up, until the next Reserve.
func (c *Client) unreserveName(name string) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	c.reserved = slices.DeleteFunc(slices.Clone(c.reserved), func(n string) bool { return n == name })
}

// releaseReservation ends the work on p and frees the reservation.
func (c *Client) releaseReservation(p *reservation) {
	c.mapMu.Lock()
	defer c.mapDone()
	delete(c.places, p.d.index)
	p.endWork()
}

// finishMap ends the work of a map that has succeeded.
func (c *Client) finishMap(p *reservation) {
	c.mapMu.Lock()
	defer c.mapDone()
	p.endWork()
	c.removeWaiting(p.d.identity)
	c.requestSave()
}

// claimUnmap begins the unmap of the device with that name, node or path. An unmap
// by force cancels a map of the device and an unmap without force, and claim
// waits for their end. Errors: EBUSY while it is being mapped, EALREADY while
// another unmap is under way, ENOENT.
func (c *Client) claimUnmap(ctx context.Context, name string, force bool) (context.Context, *reservation, error) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	for {
		if c.away {
			return ctx, nil, errAway
		}
		p, err := c.findMapping(name)
		if err != nil {
			return ctx, nil, err
		}
		switch {
		case p.work == 0 && force:
			return p.beginWork(ctx, unmappingByForce), p, nil
		case p.work == 0:
			return p.beginWork(ctx, unmapping), p, nil
		case p.work == mapping && !force:
			return ctx, nil, fmt.Errorf("%s is being mapped; forced, that is given up: %w", p.d.name, syscall.EBUSY)
		case p.work == unmappingByForce || !force:
			return ctx, nil, fmt.Errorf("%s is being unmapped: %w", p.d.name, syscall.EALREADY)
		}
		p.cancel(errForced)
		mapped, ended := p.work == mapping, p.ended
		c.mapMu.Unlock()
		select {
		case <-ended:
		case <-ctx.Done():
		}
		c.mapMu.Lock()
		if err := ctx.Err(); err != nil {
			return ctx, nil, err
		}
		if mapped && c.places[p.d.index] != p { // the unmap is done
			return ctx, nil, errGivenUp
		}
	}
}

// errGivenUp means that a map was cancelled, so there is nothing to unmap.
var errGivenUp = errors.New("the map was given up")

// findMapping looks for a mapping as Device does, and also finds one that is being
// mapped. The caller holds mapMu.
func (c *Client) findMapping(name string) (*reservation, error) {
	for _, p := range c.places {
		if p.work == mapping && p.d.name == name {
			return p, nil
		}
	}
	d, err := c.Device(name)
	if err != nil {
		return nil, err
	}
	return c.places[d.index], nil // the reservation is released after the device is off the list
}
