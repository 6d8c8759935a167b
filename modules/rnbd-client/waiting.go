package client

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Devices that are to be mapped again wait in Client.waiting until their server answers:
// disks of the last daemon, and devices after a remap by force. They keep their names, and
// users may give them up.

// mapRequest returns the request for the mapping of a disk.
func (s *savedDevice) mapRequest() (MapRequest, error) {
	if !isNode(s.Location) {
		return MapRequest{}, fmt.Errorf("entry %+v is incomplete", *s)
	}
	return s.requestAny()
}

// requestAny is request for a device that may be no disk.
func (s *savedDevice) requestAny() (MapRequest, error) {
	mode, ok := blk.ParseAccessMode(s.Access)
	loss, err := ParseLoss(s.Loss)
	switch {
	case err != nil:
		return MapRequest{}, err
	case !ok || s.Name == "" || s.Identity == "" || s.Slots < 1:
		return MapRequest{}, fmt.Errorf("entry %+v is incomplete", *s)
	}
	location := ""
	if s.hasUsers() {
		location = s.Location
	}
	return MapRequest{
		Path: string(s.Path), Session: string(s.Session), Paths: s.Paths, Mode: mode, IOMode: s.IOMode, Frontend: s.Frontend, Loss: loss, Name: s.Name,
		Slots: s.Slots, Options: s.Settings, Port: s.Port, PollQueues: s.PollQueues, identity: s.Identity, location: location, known: s.Known, clean: s.Clean, unreported: s.Unreported, tuning: s.sessionTuning,
	}, nil
}

// hasUsers reports whether a disk is left for the front end to take over, with users that
// may wait.
func (s *savedDevice) hasUsers() bool { return isNode(s.Location) && !s.Remapped }

// waitReason says in words what a waiting device waits for.
func (s *savedDevice) waitReason() string {
	if s.Remapped {
		return "waits to be mapped again since it was remapped by force"
	}
	return "waits for its server since the last daemon ended"
}

// checkWaiting refuses a name that a waiting device will have. The
// caller holds mapMu.
func (c *Client) checkWaiting(r *MapRequest) error {
	for _, s := range c.waiting {
		if s.Name == r.Name && s.Identity != r.identity {
			return fmt.Errorf("the name %q belongs to a device (%s) that %s: %w", s.Name, s.Location, s.waitReason(), syscall.EEXIST)
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

// removeWaiting removes the mapping of that identity from the waiting ones. The
// caller holds mapMu.
func (c *Client) removeWaiting(identity string) {
	c.setWaiting(slices.DeleteFunc(slices.Clone(c.waiting), func(s savedDevice) bool { return s.Identity == identity }))
}

// waitingRequest returns the request for a waiting device. It returns false if
// the device does not wait any more.
func (c *Client) waitingRequest(identity string) (MapRequest, bool) {
	c.waitMu.Lock()
	defer c.waitMu.Unlock()
	i := slices.IndexFunc(c.waiting, func(s savedDevice) bool { return s.Identity == identity })
	if i < 0 {
		return MapRequest{}, false
	}
	r, err := c.waiting[i].requestAny()
	return r, err == nil
}

// noteFailure records why a waiting device cannot be mapped yet.
func (c *Client) noteFailure(identity, failure string) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	waiting := slices.Clone(c.waiting)
	for i := range waiting {
		if waiting[i].Identity == identity {
			waiting[i].failure = failure
		}
	}
	c.setWaiting(waiting)
}

// failureOf returns what noteFailure has recorded last.
func (c *Client) failureOf(identity string) string {
	c.waitMu.Lock()
	defer c.waitMu.Unlock()
	for _, s := range c.waiting {
		if s.Identity == identity {
			return s.failure
		}
	}
	return ""
}

// describeWaiting lists the devices that wait to be mapped again.
func (c *Client) describeWaiting() (all []*controlpb.ClientDevice) {
	c.waitMu.Lock()
	waiting := c.waiting
	c.waitMu.Unlock()
	for _, s := range waiting {
		d := &controlpb.ClientDevice{
			Name: s.Name, Path: string(s.Path), Session: string(s.Session), AccessMode: s.Access, State: Closed.String(), Loss: s.Loss,
			Frontend: frontendAsAsked(s.Frontend, s.Location), LastError: s.waitReason(),
		}
		if s.hasUsers() {
			d.Endpoint = s.Location
		}
		if s.failure != "" {
			d.LastError += ": " + s.failure
		}
		all = append(all, d)
	}
	return all
}

// waitingAt returns the index of the waiting device with that name or node, or -1. The
// caller holds mapMu.
func (c *Client) waitingAt(name string) int {
	return slices.IndexFunc(c.waiting, func(s savedDevice) bool { return s.Name == name || s.Location == name || s.Location == "/dev/"+name })
}

// acceptWaiting allows another volume for a waiting device. It returns false if
// there is none of that name.
func (c *Client) acceptWaiting(name string) bool {
	c.mapMu.Lock()
	defer c.mapDone()
	i := c.waitingAt(name)
	if i < 0 || c.waiting[i].Known == nil {
		return false
	}
	waiting := slices.Clone(c.waiting)
	accepted := *waiting[i].Known
	accepted.Volume = 0
	waiting[i].Known = &accepted
	c.setWaiting(waiting)
	c.requestSave()
	return true
}

func (c *Client) dropWaiting(name string, force bool) (found bool, err error) {
	c.mapMu.Lock()
	defer c.mapDone()
	return c.dropSaved(name, force)
}

// dropSaved gives up a waiting device. found reports that there was one of that name.
// The caller holds mapMu.
func (c *Client) dropSaved(name string, force bool) (found bool, err error) {
	i := c.waitingAt(name)
	if i < 0 {
		return false, nil
	}
	s := c.waiting[i]
	if s.hasUsers() && !force {
		return true, fmt.Errorf("%s %s, and its users with it; forced, it is given up: %w", s.Location, s.waitReason(), syscall.EBUSY)
	}
	c.removeWaiting(s.Identity)
	c.endKept(s.Identity)
	c.requestSave()
	if s.hasUsers() {
		c.log.Warn("disk of the last daemon is given up; it stays until its driver's own tool deletes it", "device", s.Name, "node", s.Location)
	} else {
		c.log.Info("waiting device is given up", "device", s.Name)
	}
	return true, nil
}
