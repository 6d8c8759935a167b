package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// Map opens the device on the server and gives it to the front end. The
// errors are those of the kernel's map_device: EEXIST, ENXIO, and the
// server's errno.
func (c *Client) Map(ctx context.Context, r MapRequest) (*Device, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.MapTimeout)
	defer cancel()
	d, err := c.mapAt(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("map %q: %w", r.Path, err)
	}
	d.log.Info("device mapped", "path", d.path, "session", d.session.name, "size", d.Limits().Size, "mode", d.mode.String())
	return d, nil
}

func (c *Client) mapAt(ctx context.Context, r MapRequest) (*Device, error) {
	d, err := c.prepareMap(ctx, r)
	if err != nil {
		return nil, err
	}
	session := r.Session
	if session == "" {
		if session, err = c.sessionName(r.Paths); err != nil {
			return nil, err
		}
	}
	ctx, p, err := c.reserve(ctx, d, session, &r)
	if err != nil {
		return nil, err
	}
	d.log = c.log.With("device", d.name)
	fresh, err := c.joinSession(ctx, d, session, r)
	if err != nil {
		c.releaseReservation(p)
		return nil, err
	}
	if err := c.mapOn(ctx, d, r); err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errForced) {
			err = cause
		}
		c.leaveSession(context.WithoutCancel(ctx), d)
		c.releaseReservation(p)
		if fresh {
			d.log.Info("session closed again", "session", session)
		}
		return nil, err
	}
	c.finishMap(p)
	return d, nil
}

// IsReservedName reports whether the commands of users have another meaning for
// name, so that no device or session may have it: "rnbd unmap all" unmaps every device.
func IsReservedName(name string) bool { return name == "all" || name == "help" }

// prepareMap makes the checks that need no server.
func (c *Client) prepareMap(ctx context.Context, r MapRequest) (*Device, error) {
	d := &Device{client: c, log: c.log, name: r.Name, path: r.Path, mode: r.Mode, loss: r.Loss, options: r.Options, ioMode: r.IOMode, pollQueues: r.PollQueues,
		identity: r.identity, location: r.location, known: r.known,
		shares: newShares(len(c.pumps)), latency: make([]pumpLatencies, len(c.pumps)), asksExtents: make(chan struct{}, 1)}
	if d.identity == "" {
		d.identity = rand.Text()
	}
	d.inheritLosses(&r)
	c.mapMu.Lock()
	err := c.checkWaiting(&r)
	c.mapMu.Unlock()
	if err != nil {
		return nil, err
	}
	if r.Path == "" || len(r.Path) > 254 {
		return nil, fmt.Errorf("a device path has 1 to 254 characters: %w", syscall.EINVAL)
	}
	if _, err := c.pathAddresses(ctx, r.Paths); err != nil { // even if the session exists
		return nil, err
	}
	if strings.Contains(d.name, "/") || names.Line(d.name) != d.name {
		return nil, fmt.Errorf("device name %q: use at most 256 bytes of printable characters without a slash: %w", d.name, syscall.EINVAL)
	}
	if IsReservedName(d.name) && r.identity == "" { // the last daemon may have been older
		return nil, fmt.Errorf("device name %q: commands take the word for another thing: %w", d.name, syscall.EINVAL)
	}
	if IsReservedName(r.Session) && r.identity == "" {
		return nil, fmt.Errorf("session name %q: commands take the word for another thing: %w", r.Session, syscall.EINVAL)
	}
	d.choices, err = c.listChoices(r.Frontend)
	return d, err
}

// mapOn opens d on its session and shows it to the front end.
func (c *Client) mapOn(ctx context.Context, d *Device, r MapRequest) (err error) {
	if !d.session.transport.Connected() {
		return fmt.Errorf("session %q has no path to the server: %w", d.session.name, syscall.ECONNABORTED)
	}
	defer d.session.awaitOpen(d)()
	if err = d.open(ctx); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			c.abandonMap(context.WithoutCancel(ctx), d)
		}
	}()
	slots := r.Slots
	if slots == 0 {
		slots = c.cfg.Slots
	}
	if err := d.makeArena(slots); err != nil {
		return err
	}
	d.mu.Lock()
	err = d.openGate()
	d.mu.Unlock()
	if err != nil {
		return fmt.Errorf("open %q: %w", d.path, err)
	}
	c.devices[d.index].Store(d)
	return d.showToUsers(ctx)
}

// abandonMap undoes mapOn. Its memory is kept while requests that a front end
// has sent are under way.
func (c *Client) abandonMap(ctx context.Context, d *Device) {
	epoch := d.endUse()
	err := d.awaitUnused(ctx, forcedClose)
	c.devices[d.index].Store(nil)
	d.sendClose(ctx, epoch, d.id.Load())
	if err != nil {
		c.retireUnmap(d, err)
		return
	}
	c.releaseMemory(d)
}
