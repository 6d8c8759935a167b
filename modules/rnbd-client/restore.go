package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// The begin and the end of a daemon with a state file: restore takes over the
// disks of the last one, leaveDisks leaves those in use to the next one.

// restoreDisks serves the disks of the last daemon again. If a server is away, its
// disks are tried until they work or are unmapped.
func (c *Client) restoreDisks() {
	if c.cfg.StateFile == "" {
		return
	}
	saved, err := loadState(c.cfg.StateFile)
	if err != nil {
		bad := c.cfg.StateFile + ".bad"
		c.log.Error("disks of the last daemon are not served again: its state is not readable", "file", bad, "err", errors.Join(err, os.Rename(c.cfg.StateFile, bad)))
		return
	}
	c.mapMu.Lock()
	defer c.mapDone()
	c.removeLeftovers(saved.Leftovers)
	for _, s := range saved.Devices {
		if _, err := s.mapRequest(); err != nil {
			c.log.Error("a disk of the last daemon is not served again", "file", c.cfg.StateFile, "err", err)
			continue
		}
		c.setWaiting(append(c.waiting, s))
		c.restoring.Go(func() { c.mapUntilDone(s) })
	}
}

const (
	restorePause    = 200 * time.Millisecond
	maxRestorePause = 5 * time.Second
)

// mapUntilDone tries to map a waiting device until it succeeds.
func (c *Client) mapUntilDone(s savedDevice) {
	log := c.log.With("device", s.Name, "path", s.Path, "node", s.Location)
	log.Info("device " + s.waitReason())
	for pause, last := restorePause, ""; ; pause = min(2*pause, maxRestorePause) {
		r, waits := c.waitingRequest(s.Identity)
		if !waits {
			return
		}
		_, err := c.Map(c.life, r)
		switch {
		case err == nil, c.life.Err() != nil:
			return
		case err.Error() != last:
			last = err.Error()
			c.noteFailure(s.Identity, last)
			log.Warn("waiting device cannot be served yet", "err", err)
		}
		select {
		case <-c.life.Done():
			return
		case <-time.After(pause):
		}
	}
}

// removeLeftovers makes front ends remove the disks that the last daemon could not
// remove. The caller holds mapMu.
func (c *Client) removeLeftovers(all []savedLeftover) {
	for _, l := range all {
		if err := c.removeLeftover(l); err != nil {
			c.foreign = append(c.foreign, l)
			c.log.Error("a disk of the last daemon is not taken away", "device", l.Name, "node", l.Location, "err", err)
		}
	}
}

func (c *Client) removeLeftover(l savedLeftover) error {
	i := slices.IndexFunc(c.frontends, func(f *frontend) bool { return f.cfg.Name == l.Frontend })
	if i < 0 {
		return fmt.Errorf("there is no front end %q: %w", l.Frontend, syscall.ENOENT)
	}
	if l.Identity == "" || l.Slots < 1 || l.SlotSize < 1 {
		return fmt.Errorf("entry %+v is incomplete: %w", l, syscall.EINVAL)
	}
	index, ok := c.lastFreeIndex()
	if !ok {
		return fmt.Errorf("there is no index: %w", syscall.ENOSPC)
	}
	f := c.frontends[i]
	a := f.makeAttachment(plugin.DeviceSpec{
		Index: index, ArenaID: index, Name: l.Name, Limits: l.Limits, Slots: l.Slots, SlotSize: l.SlotSize,
		Config: l.Settings, Identity: l.Identity, Location: l.Location,
	})
	a.want = wantGone
	a.log.Warn("disk of the last daemon was not mapped completely, or unmapped: it is taken away", "location", l.Location)
	return f.addAttachment(a)
}

// lastFreeIndex returns the last free index. Mappings take the first ones. The
// caller holds mapMu.
func (c *Client) lastFreeIndex() (uint32, bool) {
	for i := uint32(MaxDevices); i > 0; i-- {
		if c.isFree(i - 1) {
			return i - 1, true
		}
	}
	return 0, false
}

// endRestoring stops the tries. Waiting disks stay in the state file.
func (c *Client) endRestoring() {
	c.endLife()
	c.saving.Lock() // its holder may begin a try
	//lint:ignore SA2001 the wait for the holder is all that is needed
	c.saving.Unlock()
	c.restoring.Wait()
}

// leaveDisks unmaps the disks without users. The others are recorded, and their
// front ends end as in a crash, before their requests do, so that users see no
// error.
func (c *Client) leaveDisks(ctx context.Context) {
	if c.cfg.StateFile == "" || c.leaveNothing.Load() {
		return
	}
	for f := range c.unmapDisks(ctx) {
		f.killForGood()
	}
}

// unmapDisks unmaps the disks that their front ends remove, and returns the
// front ends of the others. A disk that is not removed for any reason may have
// users, so it stays: leaving an unused disk is better than removing a used
// one.
func (c *Client) unmapDisks(ctx context.Context) (used map[*frontend]bool) {
	var disks []*Device
	var places []*reservation
	for _, d := range c.nodeDevices() {
		if _, p, err := c.claimUnmap(ctx, d.name, false); err == nil {
			disks, places = append(disks, d), append(places, p)
		}
	}
	kept := removeAll(ctx, disks, func(d *Device) error { return d.fe.Load().removeDevice(ctx, d, false) })
	var unmapped sync.WaitGroup
	for i, p := range places {
		if kept[i] == nil {
			unmapped.Go(func() { c.finishUnmap(ctx, p) })
		}
	}
	unmapped.Wait()
	c.mapMu.Lock()
	defer c.mapDone()
	for i, p := range places {
		if kept[i] != nil {
			p.endWork()
		}
	}
	used = map[*frontend]bool{}
	for i, d := range disks {
		if kept[i] == nil {
			continue
		}
		used[d.fe.Load()] = true
		c.setWaiting(append(c.waiting, d.savedState()))
		c.log.Warn("disk stays, and its users, if there are any, wait for the next daemon", "device", d.name, "node", d.Location(), "cause", kept[i])
	}
	return used
}

// removesAtOnce bounds the disks that are removed at a time when the daemon
// ends.
const removesAtOnce = 256

// removeAll calls remove for all disks, removesAtOnce at a time, since a front
// end takes a second to refuse one that is in use. Disks without a call when
// ctx ends get its error.
func removeAll(ctx context.Context, disks []*Device, remove func(*Device) error) []error {
	errs := make([]error, len(disks))
	places := make(chan struct{}, removesAtOnce)
	var wg sync.WaitGroup
	for i, d := range disks {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			errs[i] = context.Cause(ctx)
			continue
		}
		wg.Go(func() {
			defer func() { <-places }()
			errs[i] = remove(d)
		})
	}
	wg.Wait()
	return errs
}
