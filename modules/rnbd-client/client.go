package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// New starts the pumps and the front ends. On an error it undoes all of it.
func New(ctx context.Context, cfg Config) (_ *Client, err error) {
	if err := cfg.checkValues(); err != nil {
		return nil, fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	if err := checkState(cfg.StateFile); err != nil {
		return nil, err
	}
	cfg.nameLoggers()
	c := &Client{cfg: cfg, log: cfg.subsystemLogger("client"), sessions: map[string]*session{}, changing: map[string]chan struct{}{}, places: map[uint32]*reservation{}, retired: map[uint32]*Device{}, reserved: cfg.ReservedNames, token: clientToken(cfg.StateFile), started: time.Now()}
	c.life, c.endLife = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			c.Close(context.WithoutCancel(ctx))
		}
	}()
	c.returning = cfg.Standby
	c.fabrics.Store(&cfg.Fabrics)
	if !cfg.Standby {
		c.sweepLinks()
	}
	for i := range cfg.Pumps {
		if err := c.startPump(i); err != nil {
			return nil, fmt.Errorf("pump %d: %w", i, err)
		}
	}
	if err := c.startFrontends(ctx); err != nil {
		return nil, err
	}
	if f := cfg.Frontend; f != "" && f != FrontendAuto { // an error now, not at the first mapping
		if _, err := c.listChoices(f); err != nil {
			return nil, err
		}
	}
	c.startWatchdog()
	if !cfg.Standby {
		c.restoreDisks()
	}
	return c, nil
}

func (c *Client) startPump(i int) error {
	poller, err := rtrs.NewPoller(i)
	if err != nil {
		return err
	}
	p, err := pump.New(pump.Config{Name: "clt" + strconv.Itoa(i), Spin: c.cfg.Spin, CPU: -1, Logger: c.log, Virtual: c.cfg.Virtual})
	if err != nil {
		poller.Close()
		return err
	}
	poller.UseClock(p.Now)
	share := &pumpShare{client: c, index: i, pump: p, poller: poller, number: rand.Uint64()}
	c.pumps = append(c.pumps, share)
	p.Start()
	return p.Add(poller)
}

// Alive reports whether the client's pumps make turns and its table of sessions
// is free. The error is that of ctx: it hangs.
func (c *Client) Alive(ctx context.Context) error {
	for _, p := range c.pumps {
		if err := p.pump.Ping(ctx); err != nil {
			return err
		}
	}
	free := make(chan struct{})
	go func() {
		c.mu.Lock()
		c.mu.Unlock() //lint:ignore SA2001 it waits for others
		close(free)
	}()
	select {
	case <-free:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the table of sessions is locked: %w", ctx.Err())
	}
}

// LeaveNothing has Close take disks in use away, too: no client will come to
// serve them, because the host goes down.
func (c *Client) LeaveNothing() { c.leaveNothing.Store(true) }

// Close unmaps everything by force and stops front ends and pumps. With a
// state file, disks that are in use stay, and their users wait for the next
// client; so do users of sockets that another process keeps.
func (c *Client) Close(ctx context.Context) error {
	var errs []error
	for _, f := range c.frontends { // first, because ctx may end early
		for i := range f.sockets {
			f.sockets[i].removeName()
		}
	}
	c.endRestoring()
	for _, f := range c.frontends { // first: users of an export may wait for the next daemon though its disk has none
		f.leaveUsers()
	}
	c.leaveDisks(ctx)
	errs = append(errs, c.unmapAll(ctx))
	awaitGroup(&c.retiring, forcedClose) // their sessions are closed
	for _, f := range c.frontends {
		errs = append(errs, f.endProcess(ctx))
	}
	for id := range c.files.all() {
		errs = append(errs, c.endFile(c.files.take(id)))
	}
	awaitGroup(&c.retiring, forcedClose) // a process that was starting may have used their memory
	c.endLife()
	c.watchers.Wait()
	for _, p := range c.pumps {
		p.pump.Stop()
		errs = append(errs, p.poller.Close())
	}
	return errors.Join(errs...)
}

// unmapAll unmaps everything by force and cancels maps under way.
func (c *Client) unmapAll(ctx context.Context) error {
	c.mapMu.Lock()
	places := slices.Collect(maps.Values(c.places))
	c.mapMu.Unlock()
	errs := make([]error, len(places))
	var unmapping sync.WaitGroup
	for i, p := range places {
		unmapping.Go(func() { errs[i] = c.unmapLast(ctx, p) })
	}
	unmapping.Wait()
	return errors.Join(errs...)
}

// unmapLast unmaps the device of p. An unmap that is under way is waited for, since
// it needs the pumps; if it fails, the device is unmapped again.
func (c *Client) unmapLast(ctx context.Context, p *reservation) error {
	for {
		err := c.Unmap(ctx, p.d.name, true)
		c.mapMu.Lock()
		there, busy, ended := c.places[p.d.index] == p, p.work != 0, p.ended
		c.mapMu.Unlock()
		switch {
		case !there:
			return nil
		case !busy && !errors.Is(err, syscall.EALREADY):
			return err
		case !busy:
			continue
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return fmt.Errorf("unmap %q: %w", p.d.name, context.Cause(ctx))
		}
	}
}
