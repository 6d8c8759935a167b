package client

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Disks of the last daemon wait here until their server answers: Client.waiting.
// They keep their names, and users may give them up.

// request returns the request for the mapping of a disk.
func (s *savedDevice) request() (MapRequest, error) {
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
	if isNode(s.Location) { // else there is nothing to take over
		location = s.Location
	}
	return MapRequest{
		Path: string(s.Path), Session: string(s.Session), Paths: s.Paths, Mode: mode, IOMode: s.IOMode, Frontend: s.Frontend, Loss: loss, Name: s.Name,
		Slots: s.Slots, Options: s.Settings, Port: s.Port, PollQueues: s.PollQueues, identity: s.Identity, location: location, known: s.Known, clean: s.Clean, unreported: s.Unreported, tuning: s.tuning,
	}, nil
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

// removeWaiting removes the mapping of that identity from the waiting ones. The
// caller holds mapMu.
func (c *Client) removeWaiting(identity string) {
	c.setWaiting(slices.DeleteFunc(slices.Clone(c.waiting), func(s savedDevice) bool { return s.Identity == identity }))
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
	r, err := c.waiting[i].requestAny()
	return r, err == nil
}

// describeWaiting lists the disks of the last daemon that are not served yet.
func (c *Client) describeWaiting() (all []*controlpb.ClientDevice) {
	c.waitMu.Lock()
	waiting := c.waiting
	c.waitMu.Unlock()
	for _, s := range waiting {
		all = append(all, &controlpb.ClientDevice{
			Name: s.Name, Path: string(s.Path), Session: string(s.Session), AccessMode: s.Access, State: Closed.String(), Loss: s.Loss,
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

func (c *Client) dropWaiting(name string, force bool) (found bool, err error) {
	c.mapMu.Lock()
	defer c.mapDone()
	return c.drop(name, force)
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
