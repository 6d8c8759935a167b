package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// Disks outlive a daemon that is killed, and disks in use outlive one that is
// stopped: their users wait. The state file has the facts needed to serve them
// again.

const stateVersion = 1

// savedState is the contents of the state file.
type savedState struct {
	Version int           `json:"version"`
	Devices []savedDevice `json:"devices"`
	// Leftovers are disks to be removed.
	Leftovers []savedLeftover `json:"leftovers,omitempty"`
}

// savedDevice is a mapping with a device node for its users.
type savedDevice struct {
	Name       string            `json:"name"`
	Path       string            `json:"path"`
	Session    string            `json:"session"`
	Paths      []string          `json:"paths"`
	Port       uint16            `json:"port,omitempty"`
	PollQueues int               `json:"poll_queues,omitempty"`
	Access     string            `json:"access"`
	IOMode     string            `json:"io_mode,omitempty"`
	Loss       string            `json:"loss"`
	Frontend   string            `json:"frontend"`
	Settings   map[string]string `json:"settings,omitempty"`
	Slots      int               `json:"slots"`
	Identity   string            `json:"identity"`
	Location   string            `json:"location"`
	Known      *known            `json:"known,omitempty"`
	tuning                       // of the session
}

func (d *Device) saved() savedDevice {
	s := d.session
	d.mu.Lock()
	known := d.known
	d.mu.Unlock()
	return savedDevice{
		Name: d.name, Path: d.path, Session: s.name, Paths: s.savedPaths(), Port: s.port, PollQueues: s.pollQueues,
		Access: d.mode.String(), IOMode: d.ioMode, Loss: d.loss.String(), Frontend: d.fe.Load().cfg.Name, Settings: d.settings(),
		Slots: d.arena.Size() / d.slotSize(), Identity: d.identity, Location: d.Location(), Known: known, tuning: s.tuning.get(),
	}
}

// request returns the request for the mapping.
func (s *savedDevice) request() (MapRequest, error) {
	mode, ok := blk.ParseAccessMode(s.Access)
	loss, err := ParseLoss(s.Loss)
	switch {
	case err != nil:
		return MapRequest{}, err
	case !ok || s.Name == "" || s.Identity == "" || !isNode(s.Location) || s.Slots < 1:
		return MapRequest{}, fmt.Errorf("entry %+v is incomplete", *s)
	}
	return MapRequest{
		Path: s.Path, Session: s.Session, Paths: s.Paths, Mode: mode, IOMode: s.IOMode, Frontend: s.Frontend, Loss: loss, Name: s.Name,
		Slots: s.Slots, Options: s.Settings, Port: s.Port, PollQueues: s.PollQueues, identity: s.Identity, location: s.Location, known: s.Known, tuning: s.tuning,
	}, nil
}

// save makes mapDone write the state file: mapped devices, and those that
// still wait to be mapped.
func (c *Client) save() { c.unsaved.Store(true) }

// write writes the state file. The caller holds saving.
func (c *Client) write() {
	if c.cfg.StateFile == "" {
		return
	}
	if err := writeState(c.cfg.StateFile, c.snapshot()); err != nil {
		c.log.Error("a killed daemon's disks will not be served again: the state is not written", "file", c.cfg.StateFile, "err", err)
	}
}

func (c *Client) snapshot() *savedState {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	c.followSessions()
	state := savedState{Version: stateVersion, Devices: slices.Clone(c.waiting), Leftovers: c.leftovers()}
	for _, d := range c.disks() {
		p := c.places[d.index]
		waits := slices.ContainsFunc(c.waiting, func(s savedDevice) bool { return s.Identity == d.identity })
		if (p == nil || p.work != mapping) && !waits {
			state.Devices = append(state.Devices, d.saved())
		}
	}
	return &state
}

// followSessions updates the records of waiting disks with the changes that
// users have made to their sessions. The caller holds mapMu.
func (c *Client) followSessions() {
	waiting := slices.Clone(c.waiting)
	for i := range waiting {
		c.mu.Lock()
		s := c.sessions[waiting[i].Session]
		c.mu.Unlock()
		if s != nil {
			waiting[i].Paths, waiting[i].tuning = s.savedPaths(), s.tuning.get()
		}
	}
	c.setWaiting(waiting)
}

// writeState replaces the file as a whole. If there is nothing to record it
// removes the file.
func writeState(name string, state *savedState) error {
	if len(state.Devices)+len(state.Leftovers) == 0 {
		return private.Remove(name)
	}
	b, err := json.MarshalIndent(state, "", "\t")
	if err != nil {
		return err
	}
	return private.Replace(name, append(b, '\n'))
}

func loadState(name string) (state savedState, err error) {
	b, err := private.Read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return state, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &state)
	}
	switch {
	case err == nil && state.Version > stateVersion:
		err = fmt.Errorf("state file %s has version %d, this program knows %d: %w", name, state.Version, stateVersion, errNewerState)
	case err == nil && state.Version != stateVersion:
		err = fmt.Errorf("it has version %d, this daemon knows %d", state.Version, stateVersion)
	}
	return state, err
}

// errNewerState is the error of a state file of a newer rnbd. The disks of the
// last daemon are left as they are, since this daemon may not understand the
// file.
var errNewerState = fmt.Errorf("it is of a newer rnbd, whose disks may be in use: run that one, or unmap them with it first: %w", syscall.EINVAL)

// checkState refuses the state of a newer rnbd, before anything is started that
// could change a disk.
func checkState(name string) error {
	if name == "" {
		return nil
	}
	if _, err := loadState(name); errors.Is(err, errNewerState) {
		return err
	}
	return nil
}

// restore serves the disks of the last daemon again. If a server is away, its
// disks are tried until they work or are unmapped.
func (c *Client) restore() {
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
	c.takeBack(saved.Leftovers)
	for _, s := range saved.Devices {
		if _, err := s.request(); err != nil {
			c.log.Error("a disk of the last daemon is not served again", "file", c.cfg.StateFile, "err", err)
			continue
		}
		c.setWaiting(append(c.waiting, s))
		c.restoring.Go(func() { c.remap(s) })
	}
}

const (
	restorePause    = 200 * time.Millisecond
	maxRestorePause = 5 * time.Second
)

// remap tries to map a waiting disk until it succeeds.
func (c *Client) remap(s savedDevice) {
	log := c.log.With("device", s.Name, "path", s.Path, "node", s.Location)
	log.Info("disk of the last daemon waits to be served again")
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
			log.Warn("disk of the last daemon cannot be served yet", "err", err)
		}
		select {
		case <-c.life.Done():
			return
		case <-time.After(pause):
		}
	}
}

// waitingRequest returns the request for a waiting disk. It returns false if
// the disk does not wait any more.
func (c *Client) waitingRequest(identity string) (MapRequest, bool) {
	c.waitMu.Lock()
	defer c.waitMu.Unlock()
	i := slices.IndexFunc(c.waiting, func(s savedDevice) bool { return s.Identity == identity })
	if i < 0 {
		return MapRequest{}, false
	}
	r, err := c.waiting[i].request()
	return r, err == nil
}

// setWaiting changes the list of disks of the last daemon. The caller holds
// mapMu.
func (c *Client) setWaiting(list []savedDevice) {
	c.waitMu.Lock()
	defer c.waitMu.Unlock()
	c.waiting = list
}

// describeWaiting lists the disks of the last daemon that are not served yet.
func (c *Client) describeWaiting() (all []*controlpb.ClientDevice) {
	c.waitMu.Lock()
	waiting := c.waiting
	c.waitMu.Unlock()
	for _, s := range waiting {
		all = append(all, &controlpb.ClientDevice{
			Name: s.Name, Path: s.Path, Session: s.Session, AccessMode: s.Access, State: Closed.String(), Loss: s.Loss,
			Frontend: s.Frontend, Endpoint: s.Location, LastError: "waits for its server since the last daemon ended",
		})
	}
	return all
}

// acceptWaiting allows another volume for a waiting disk. It returns false if
// there is none of that name.
func (c *Client) acceptWaiting(name string) bool {
	c.mapMu.Lock()
	defer c.mapDone()
	i := slices.IndexFunc(c.waiting, func(s savedDevice) bool { return s.Name == name || s.Location == name || s.Location == "/dev/"+name })
	if i < 0 || c.waiting[i].Known == nil {
		return false
	}
	waiting := slices.Clone(c.waiting)
	accepted := *waiting[i].Known
	accepted.Volume = 0
	waiting[i].Known = &accepted
	c.setWaiting(waiting)
	c.save()
	return true
}

// removeWaiting removes the mapping of that identity from the waiting ones. The
// caller holds mapMu.
func (c *Client) removeWaiting(identity string) {
	c.setWaiting(slices.DeleteFunc(slices.Clone(c.waiting), func(s savedDevice) bool { return s.Identity == identity }))
}

// checkWaiting refuses a name that a disk of the last daemon will have. The
// caller holds mapMu.
func (c *Client) checkWaiting(r *MapRequest) error {
	for _, s := range c.waiting {
		if s.Name == r.Name && s.Identity != r.identity {
			return fmt.Errorf("the name %q belongs to a disk (%s) that waits for its server since the last daemon ended: %w", s.Name, s.Location, syscall.EEXIST)
		}
		if r.identity != "" && s.Identity == r.identity {
			return nil
		}
	}
	if r.identity != "" {
		return fmt.Errorf("it is not to be mapped any more: %w", syscall.ECANCELED)
	}
	return nil
}

// drop gives up a waiting disk of the last daemon. found reports that there
// was one of that name. The caller holds mapMu.
func (c *Client) drop(name string, force bool) (found bool, err error) {
	i := slices.IndexFunc(c.waiting, func(s savedDevice) bool { return s.Name == name || s.Location == name || s.Location == "/dev/"+name })
	if i < 0 {
		return false, nil
	}
	s := c.waiting[i]
	if !force {
		return true, fmt.Errorf("%s waits for its server, and its users with it, since the last daemon ended; forced, it is given up: %w", s.Location, syscall.EBUSY)
	}
	c.removeWaiting(s.Identity)
	c.save()
	c.log.Warn("disk of the last daemon is given up; it stays until its driver's own tool deletes it", "device", s.Name, "node", s.Location)
	return true, nil
}

// endRestoring stops the tries. Waiting disks stay in the state file.
func (c *Client) endRestoring() {
	c.endLife()
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
		f.abandon()
	}
}

// unmapDisks unmaps the disks that their front ends remove, and returns the
// front ends of the others. A disk that is not removed for any reason may have
// users, so it stays: leaving an unused disk is better than removing a used
// one.
func (c *Client) unmapDisks(ctx context.Context) (used map[*frontend]bool) {
	var disks []*Device
	var places []*place
	for _, d := range c.disks() {
		if _, p, err := c.claim(ctx, d.name, false); err == nil {
			disks, places = append(disks, d), append(places, p)
		}
	}
	kept := removeAll(ctx, disks, func(d *Device) error { return d.fe.Load().remove(ctx, d, false) })
	var unmapped sync.WaitGroup
	for i, p := range places {
		if kept[i] == nil {
			unmapped.Go(func() { c.unmap(ctx, p) })
		}
	}
	unmapped.Wait()
	c.mapMu.Lock()
	defer c.mapDone()
	for i, p := range places {
		if kept[i] != nil {
			p.end()
		}
	}
	used = map[*frontend]bool{}
	for i, d := range disks {
		if kept[i] == nil {
			continue
		}
		used[d.fe.Load()] = true
		c.setWaiting(append(c.waiting, d.saved()))
		c.log.Warn("disk stays, and its users, if there are any, wait for the next daemon", "device", d.name, "node", d.Location(), "cause", kept[i])
	}
	return used
}

// disks returns the devices with a device node.
func (c *Client) disks() (out []*Device) {
	for _, d := range c.Devices() {
		if d.fe.Load() != nil && isNode(d.Location()) {
			out = append(out, d)
		}
	}
	return out
}

// removesAtOnce bounds the disks that are removed at a time when the daemon
// ends.
const removesAtOnce = 256

// removeAll calls remove for all disks, removesAtOnce at a time, since a front
// end takes a second to refuse one that is in use. Disks without a turn when
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
