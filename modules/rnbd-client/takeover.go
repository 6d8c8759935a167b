package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// A client hands over to the next process of the daemon. The part of the one that goes
// on; the other one is in client_handover.go. A client that has left takes its own devices back
// in the same way.

// againPause is between two attempts to map a device of a hand-over.
const againPause = 20 * time.Millisecond

// TakeOver maps the devices of h, and gives front ends the connections of their users.
// It returns when all of that is done, or with an error when ctx ends. No user is served
// before ServeUsers: until then the client that has left can take all back. A client
// that takes its own devices back goes on to try for those that fail.
func (c *Client) TakeOver(ctx context.Context, h *Handover) error {
	own := h.from == c
	var reopened error
	if own {
		c.resumeFrontends()
		if !h.early {
			reopened = c.reopenFabrics()
		}
	}
	if !own {
		for id, m := range h.files {
			c.files.keep(id, m)
		}
		h.files = nil
	}
	c.expectMappings(h, own)
	errs := make([]error, len(h.state.Devices))
	var mapping sync.WaitGroup
	for i, s := range h.state.Devices {
		mapping.Go(func() { errs[i] = c.mapAgain(ctx, s) })
	}
	mapping.Wait()
	for i, s := range h.state.Devices {
		if errs[i] != nil && own {
			c.restoring.Go(func() { c.mapUntilDone(s) })
		}
	}
	if err := errors.Join(errs...); err != nil && !own {
		return err // the client that has left takes all back
	}
	adopting, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	return errors.Join(append(errs, reopened, c.adoptUsers(adopting, h))...)
}

// resumeFrontends makes the front ends take devices again.
func (c *Client) resumeFrontends() {
	for _, f := range c.frontends {
		f.parting.Store(false)
	}
}

// expectMappings makes the mappings of h those that wait to be mapped. own: they are the
// client's own, and those that waited before still do.
func (c *Client) expectMappings(h *Handover, own bool) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	c.setWaiting(append(c.waiting, h.state.Devices...))
	for _, s := range h.state.Waiting {
		if _, waits := c.waitingRequest(s.Identity); !waits {
			c.setWaiting(append(c.waiting, s))
			c.restoring.Go(func() { c.mapUntilDone(s) })
		}
	}
	if !own {
		c.removeLeftovers(h.state.Leftovers)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range h.state.Devices {
		c.ended.noteEnd(string(s.Session))
	}
	c.away, c.returning = false, true
}

// mapAgain maps a device, trying until ctx ends.
func (c *Client) mapAgain(ctx context.Context, s savedDevice) error {
	if c.hasIdentity(s.Identity) { // it stayed
		return nil
	}
	r, err := s.requestAny()
	if err != nil {
		return err
	}
	for {
		_, err := c.Map(ctx, r)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if !pauseFor(ctx, againPause) {
			return err
		}
	}
}

// hasIdentity reports whether the mapping is there, and takes it off those that wait
// then.
func (c *Client) hasIdentity(identity string) bool {
	for _, d := range c.Devices() {
		if d.identity == identity {
			c.mapMu.Lock()
			defer c.mapMu.Unlock()
			c.removeWaiting(identity)
			return true
		}
	}
	return false
}

// adoptUsers gives the connections of h to the front ends of their devices.
func (c *Client) adoptUsers(ctx context.Context, h *Handover) error {
	all := map[*frontend][]plugin.Connection{}
	var errs []error
	for _, conn := range h.conns {
		d, err := c.Device(conn.Device)
		if err != nil {
			errs = append(errs, fmt.Errorf("a connection of a user: %w", err))
			continue
		}
		f := d.fe.Load()
		all[f] = append(all[f], conn)
	}
	for f, conns := range all {
		errs = append(errs, f.adoptUsers(ctx, conns))
	}
	return errors.Join(errs...)
}

func (f *frontend) adoptUsers(ctx context.Context, conns []plugin.Connection) error {
	f.giving.Lock()
	defer f.giving.Unlock()
	h, err := f.requireProcess()
	if err == nil {
		err = h.AdoptConnections(ctx, conns)
	}
	if err != nil {
		return fmt.Errorf("front end %s: %w", f.cfg.Name, err)
	}
	h.adopted = true
	return nil
}

// ServeUsers gives the front ends the sockets that Config.HoldUsers has kept
// from them. After TakeOver it also has them serve the connections of users.
func (c *Client) ServeUsers(ctx context.Context) {
	for _, f := range c.frontends {
		if h, _ := f.currentProcess(); h != nil { // first, because their users know no pause
			f.giving.Lock()
			err := f.serveAdopted(ctx, h)
			f.giving.Unlock()
			if err != nil {
				h.Kill(err)
			}
		}
	}
	c.endReturn()
	for _, f := range c.frontends {
		f.giving.Lock()
		f.hold = false
		f.giving.Unlock()
		h, _ := f.currentProcess()
		if h == nil || len(f.sockets) == 0 {
			continue // its next process gets them
		}
		if err := f.passSockets(ctx, h); err != nil {
			h.Kill(err)
			continue
		}
		for _, d := range c.Devices() {
			if d.fe.Load() == f {
				d.setLocation(f.deviceStatus(ctx, d).Location)
			}
		}
	}
}

// serveAdopted has h serve the connections that it was given. The caller holds giving.
func (f *frontend) serveAdopted(ctx context.Context, h *frontendProcess) error {
	if !h.adopted {
		return nil
	}
	h.adopted = false
	if err := h.ServeConnections(ctx); err != nil {
		return fmt.Errorf("front end %s: connections of users: %w", f.cfg.Name, err)
	}
	return nil
}

// endReturn makes the state file that of this client.
func (c *Client) endReturn() {
	c.mapMu.Lock()
	defer c.mapDone()
	if c.returning {
		c.returning = false
		c.sweepLinks()
		c.requestSave()
		for id := range c.files.all() {
			if _, waits := c.waitingRequest(id); !waits {
				c.endKept(id)
			}
		}
	}
}
