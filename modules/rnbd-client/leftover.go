package client

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// A daemon may end while the kernel has, or is about to get, a disk that
// belongs to no mapping: before its map has succeeded, or after its unmap by
// force. Such a disk is recorded from before it is made until it is gone, so
// that the next daemon removes it.

// savedLeftover is the record of such a disk in the state file.
type savedLeftover struct {
	Name     string            `json:"name"`
	Frontend string            `json:"frontend"`
	Settings map[string]string `json:"settings,omitempty"`
	Slots    int               `json:"slots"`
	SlotSize int               `json:"slot_size"`
	Limits   blk.Limits        `json:"limits"`
	Identity string            `json:"identity"`
	Location string            `json:"location"` // "?": not known
}

// leftover returns the disk that the next daemon must remove if this one ends
// now. made reports that the device is to be shown. Then the record is needed
// only until its map has ended.
func (a *attachment) leftover() (l savedLeftover, made, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	l, ok = a.leftoverLocked()
	return l, a.want == wantShown, ok && a.state != gone && a.want != wantLeft
}

// leftoverLocked returns the record. It returns false if there is no disk. The
// caller holds mu.
func (a *attachment) leftoverLocked() (savedLeftover, bool) {
	s := &a.spec
	l := savedLeftover{
		Name: s.Name, Frontend: a.fe.cfg.Name, Settings: s.Config, Slots: s.Slots, SlotSize: s.SlotSize,
		Limits: s.Limits, Identity: s.Identity, Location: s.Location,
	}
	if l.Location == "" {
		l.Location = plugin.LocationUnknown
	}
	return l, a.node && (l.Location == plugin.LocationUnknown || isNode(l.Location))
}

// leftovers returns the records for the state file. The caller holds mapMu.
func (c *Client) leftovers() []savedLeftover {
	all := slices.Clone(c.foreign)
	for _, f := range c.frontends {
		f.mu.Lock()
		all = append(all, f.undone...)
		f.mu.Unlock()
		for _, a := range f.all() {
			p := c.places[a.index]
			if l, made, ok := a.leftover(); ok && (!made || p != nil && p.work == mapping) {
				all = append(all, l)
			}
		}
	}
	return slices.DeleteFunc(all, func(l savedLeftover) bool { // it waits for its server, or is in use
		return slices.ContainsFunc(c.waiting, func(s savedDevice) bool { return s.Identity == l.Identity })
	})
}

// note saves the leftovers.
func (c *Client) note() {
	c.save()
	c.flush()
}

// takeBack makes front ends remove the disks that the last daemon could not
// remove. The caller holds mapMu.
func (c *Client) takeBack(all []savedLeftover) {
	for _, l := range all {
		if err := c.takeBackOne(l); err != nil {
			c.foreign = append(c.foreign, l)
			c.log.Error("a disk of the last daemon is not taken away", "device", l.Name, "node", l.Location, "err", err)
		}
	}
}

func (c *Client) takeBackOne(l savedLeftover) error {
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
