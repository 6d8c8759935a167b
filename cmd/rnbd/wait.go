package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// waitGoals are the values of --for.
var waitGoals = []string{"open", "closed", "gone", "path-up", "all-paths-up"}

func waitVerb() *verb {
	return &verb{
		name: "wait", on: onClient, min: 1, max: 1, args: "DEVICE", args0: deviceNames, run: waitFor, interrupted: "nothing was changed",
		flags: func(f *pflag.FlagSet) {
			f.String("for", "open", "state to wait for: "+strings.Join(waitGoals, ", "))
		},
		short: "Wait for a state of a device",
		long: `Wait until a device of the client is open, closed or gone (unmapped), a path of its
session is connected, or all are. A device that is not mapped yet, and a daemon that
does not run yet, are waited for, too. After --timeout the exit code is 8.`,
		example: "  rnbd wait rnbd0\n  rnbd wait rnbd0 --for=gone --timeout 5m\n  rnbd wait rnbd0 --for all-paths-up",
	}
}

func waitFor(c *call) error {
	goal := c.text("for")
	if !slices.Contains(waitGoals, goal) {
		return usageError{fmt.Errorf("--for %q: use one of %s", goal, strings.Join(waitGoals, ", "))}
	}
	ctx, state := c.cmd.Context(), "the daemon does not answer"
	for {
		err := waitOnce(ctx, c, goal, &state)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil, errors.Is(err, syscall.ETIMEDOUT): // the daemon's clock may be first
			return fmt.Errorf("wait for %s --for=%s: %s: %w", c.args[0], goal, state, cmp.Or(ctx.Err(), context.DeadlineExceeded))
		case errors.Is(err, fs.ErrPermission):
			return err
		}
		state = err.Error()
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// waitOnce waits until the goal is reached or the daemon does not answer. state is
// set to what was seen last.
func waitOnce(ctx context.Context, c *call, goal string, state *string) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		events := d.eventSources()[0]
		if _, err := events.next(ctx, false); err != nil {
			return err
		}
		for { // an event after that look is in the next answer
			reached, now, err := d.reached(ctx, c.args[0], goal)
			if err != nil || reached {
				return err
			}
			*state = now
			if _, err := events.next(ctx, true); err != nil {
				return err
			}
		}
	})
}

// reached reports whether the device has reached the goal, and describes its state.
func (d *daemons) reached(ctx context.Context, name, goal string) (bool, string, error) {
	list, err := d.client.ListDevices(ctx, &controlpb.ListRequest{Brief: true})
	if err != nil {
		return false, "", err
	}
	i := slices.IndexFunc(list.Devices, func(dev *controlpb.ClientDevice) bool { return dev.Name == name })
	if i < 0 {
		return goal == "gone", "there is no device " + name, nil
	}
	dev := list.Devices[i]
	if goal == "open" || goal == "closed" || goal == "gone" {
		return dev.State == goal, fmt.Sprintf("it is %s", dev.State), nil
	}
	return d.pathsUp(ctx, dev.Session, goal == "all-paths-up")
}

// pathsUp reports whether one path of a session is connected, or all of them.
func (d *daemons) pathsUp(ctx context.Context, session string, all bool) (bool, string, error) {
	list, err := d.client.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return false, "", err
	}
	for _, s := range list.Sessions {
		if s.Name != session {
			continue
		}
		up := 0
		for _, p := range s.Paths {
			if p.State == "connected" {
				up++
			}
		}
		return up > 0 && (!all || up == len(s.Paths)), fmt.Sprintf("%d of %d paths are connected", up, len(s.Paths)), nil
	}
	return false, fmt.Sprintf("there is no session %q", session), nil
}
