package client

import (
	"slices"
	"time"
)

// Disks outlive a daemon that is killed, and disks in use outlive one that is
// stopped: their users wait. The state file has the facts needed to serve them
// again.

func (d *Device) savedState() savedDevice {
	s, frontend := d.session, FrontendNone
	if fe := d.fe.Load(); fe != nil {
		frontend = fe.cfg.Name
	}
	d.mu.Lock()
	known := d.known
	d.mu.Unlock()
	return savedDevice{
		Name: d.name, Path: savedName(d.path), Session: savedName(s.name), Paths: s.savedPaths(), Port: s.port, PollQueues: s.pollQueues,
		Access: d.mode.String(), IOMode: d.ioMode, Loss: d.loss.String(), Frontend: frontend, Settings: d.frontendSettings(),
		Slots: d.arena.Size() / d.slotSize(), Identity: d.identity, Location: d.Location(), Known: known, Unreported: d.unreported.Load(), sessionTuning: s.tuning.current(),
	}
}

// requestSave makes mapDone write the state file: mapped devices, and those that
// still wait to be mapped.
func (c *Client) requestSave() { c.unsaved.Store(true) }

// writeState writes the state file. If that fails, as on a full disk, the file stays
// as it was, and is written later. The caller holds saving.
func (c *Client) writeState() {
	state, ours := c.stateSnapshot()
	if c.cfg.StateFile == "" || !ours {
		return
	}
	err := writeState(c.cfg.StateFile, state)
	switch {
	case err != nil && c.life.Err() == nil:
		c.unsaved.Store(true)
		if c.unwritten == "" {
			c.restoring.Go(c.writeLater)
		}
		if c.unwritten != err.Error() {
			c.unwritten = err.Error()
			c.log.Error("a killed daemon's disks will not be served again: the state is not written, and is tried again", "file", c.cfg.StateFile, "err", err)
		}
	case err != nil:
		c.log.Error("a killed daemon's disks will not be served again: the state is not written", "file", c.cfg.StateFile, "err", err)
	case c.unwritten != "":
		c.unwritten = ""
		c.log.Info("the state is written", "file", c.cfg.StateFile)
	}
}

// writePause is between two attempts to write the state file.
const writePause = 2 * time.Second

// writeLater tries to write the state file until that has succeeded, or until
// the client ends.
func (c *Client) writeLater() {
	for {
		select {
		case <-c.life.Done():
			return
		case <-time.After(writePause):
		}
		c.flushState()
		c.saving.Lock()
		done := c.unwritten == ""
		c.saving.Unlock()
		if done {
			return
		}
	}
}

// stateSnapshot returns the contents of the state file. ours reports that no other process
// writes it.
func (c *Client) stateSnapshot() (_ *savedState, ours bool) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	c.followSessions()
	state := savedState{Version: stateVersion, Devices: slices.Clone(c.waiting), Leftovers: c.leftoverRecords()}
	state.Devices = slices.DeleteFunc(state.Devices, func(s savedDevice) bool { return !isNode(s.Location) })
	for _, d := range c.nodeDevices() {
		p := c.places[d.index]
		waits := slices.ContainsFunc(c.waiting, func(s savedDevice) bool { return s.Identity == d.identity || s.Name == d.name })
		if (p == nil || p.work != mapping) && !waits {
			state.Devices = append(state.Devices, d.savedState())
		}
	}
	for i := range state.Devices {
		state.Devices[i].Clean = false
	}
	return &state, !c.away && !c.returning
}

// followSessions updates the records of waiting disks with the changes that
// users have made to their sessions. The caller holds mapMu.
func (c *Client) followSessions() {
	waiting := slices.Clone(c.waiting)
	for i := range waiting {
		c.mu.Lock()
		s := c.sessions[string(waiting[i].Session)]
		c.mu.Unlock()
		if s != nil {
			waiting[i].Paths, waiting[i].sessionTuning = s.savedPaths(), s.tuning.current()
		}
	}
	c.setWaiting(waiting)
}

// setWaiting changes the list of disks of the last daemon. The caller holds
// mapMu.
func (c *Client) setWaiting(list []savedDevice) {
	c.waitMu.Lock()
	defer c.waitMu.Unlock()
	c.waiting = list
}

// mapDone unlocks mapMu and then saves the state if it has changed.
func (c *Client) mapDone() {
	c.mapMu.Unlock()
	c.flushState()
}

// sessionChanged saves the state after a change of a session.
func (c *Client) sessionChanged() {
	c.unsaved.Store(true)
	c.flushState()
}

// saveLeftovers saves the leftovers.
func (c *Client) saveLeftovers() {
	c.requestSave()
	c.flushState()
}

// flushState writes the state file if something has changed since it was written. It
// returns when the caller's changes are in the file.
func (c *Client) flushState() {
	if !c.unsaved.Load() {
		return
	}
	c.saving.Lock()
	defer c.saving.Unlock()
	if c.unsaved.Swap(false) {
		c.writeState()
	}
}

// savedPaths returns the paths for the next daemon.
func (s *session) savedPaths() []string { return s.spelling.spellingsOf(s.transport.Paths()) }

// nodeDevices returns the devices with a device node.
func (c *Client) nodeDevices() (out []*Device) {
	for _, d := range c.Devices() {
		if d.fe.Load() != nil && isNode(d.Location()) {
			out = append(out, d)
		}
	}
	return out
}
