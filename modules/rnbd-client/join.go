package client

import (
	"context"
	"fmt"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// joinSession adds d to the session of that name, or opens the session. fresh reports
// that it was opened. Maps wait while their session is being opened, or while
// the last one of that name is being closed.
func (c *Client) joinSession(ctx context.Context, d *Device, name string, r MapRequest) (fresh bool, err error) {
	changed, err := c.joinOpen(d, name, r)
	for ; changed != nil; changed, err = c.joinOpen(d, name, r) {
		select {
		case <-changed:
		case <-ctx.Done():
			return false, fmt.Errorf("session %q is being opened or closed: %w", name, context.Cause(ctx))
		}
	}
	if err != nil || d.session != nil {
		return false, err
	}
	s, err := c.openSession(ctx, name, r)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		d.session, s.devices = s, []*Device{d}
		s.dividePermits()
		c.sessions[name] = s
	}
	c.endChange(name)
	return err == nil, err
}

// joinOpen adds d to the session of that name. If there is none it marks the
// name: the caller opens the session and ends the mark by endChange. If the
// name is marked already, joinOpen returns a channel that is closed at the end
// of the mark.
func (c *Client) joinOpen(d *Device, name string, r MapRequest) (changed <-chan struct{}, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, changing := c.sessions[name], c.changing[name]
	switch {
	case changing != nil:
		return changing, nil
	case s == nil && len(r.Paths) == 0:
		return nil, fmt.Errorf("there is no session %q, and no path to open it: %w", name, syscall.ENXIO)
	case s == nil:
		c.changing[name] = make(chan struct{})
		return nil, nil
	case r.PollQueues > 0 || s.pollQueues > 0:
		return nil, fmt.Errorf("session %q is there, and one with poll queues has no other device: %w", name, syscall.EINVAL)
	}
	d.session, s.devices = s, append(s.devices, d)
	s.dividePermits()
	return nil, nil
}

// endChange ends the mark of a name that joinOpen or leave has set. Caller holds mu.
func (c *Client) endChange(name string) {
	close(c.changing[name])
	delete(c.changing, name)
}

// sessionName makes a session name from this host, this client and the first
// path. It has no "/" and no ".", since servers refuse them. Two clients of
// one host get different names, because a server would refuse the second of
// two equal ones.
func (c *Client) sessionName(paths []string) (string, error) {
	if len(paths) == 0 {
		return "", fmt.Errorf("neither a session nor a path is named: %w", syscall.EINVAL)
	}
	p, err := mapline.ParsePath(paths[0])
	if err != nil {
		return "", err
	}
	clean := strings.NewReplacer("/", "-", ".", "-")
	return clean.Replace(c.cfg.Hostname + "-" + c.token + "@" + verbs.AddrPortString(p.Dst)), nil
}

// leaveSession removes d from its session and closes the session with its last device.
func (c *Client) leaveSession(ctx context.Context, d *Device) {
	c.mu.Lock()
	s := d.session
	for i, other := range s.devices {
		if other == d {
			s.devices = append(s.devices[:i], s.devices[i+1:]...)
			break
		}
	}
	s.dividePermits()
	last := len(s.devices) == 0
	if last {
		delete(c.sessions, s.name)
		c.changing[s.name] = make(chan struct{})
	}
	c.mu.Unlock()
	if !last {
		return
	}
	if err := s.close(ctx); err != nil {
		s.log.Warn("closing the session failed", "err", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended.noteEnd(s.name)
	c.endChange(s.name)
}
