package client

import (
	"slices"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// A daemon may end while the kernel has, or is about to get, a disk that
// belongs to no mapping: before its map has succeeded, or after its unmap by
// force. Such a disk is recorded from before it is made until it is gone, so
// that the next daemon removes it.

// leftoverDisk returns the disk that the next daemon must remove if this one ends
// now. made reports that the device is to be shown. Then the record is needed
// only until its map has ended.
func (a *attachment) leftoverDisk() (l savedLeftover, made, ok bool) {
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

// leftoverRecords returns the records for the state file. The caller holds mapMu.
func (c *Client) leftoverRecords() []savedLeftover {
	all := slices.Clone(c.foreign)
	for _, f := range c.frontends {
		f.mu.Lock()
		all = append(all, f.undone...)
		f.mu.Unlock()
		for _, a := range f.allAttachments() {
			p := c.places[a.index]
			if l, made, ok := a.leftoverDisk(); ok && (!made || p != nil && p.work == mapping) {
				all = append(all, l)
			}
		}
	}
	return slices.DeleteFunc(all, func(l savedLeftover) bool { // it waits for its server, or is in use
		return slices.ContainsFunc(c.waiting, func(s savedDevice) bool { return s.Identity == l.Identity })
	})
}
