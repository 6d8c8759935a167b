package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
)

// An upgrade, from the side of the next process. The other side is in
// daemon_upgrade.go.

// withPredecessor runs a daemon, and tells the process that hands over to it why it
// ends, if there is one.
func withPredecessor(run func(*handover.Predecessor) error) error {
	pre, err := handover.Inherited()
	if err == nil {
		err = run(pre)
	}
	if err != nil {
		pre.Failed(err)
	}
	return err
}

// inheritControl takes the control socket over, nil if there is none.
func (r *daemonRun) inheritControl() (net.Listener, error) {
	if f := r.pre.Take(socketOwn); f != nil {
		return control.Inherit(f, r.socket)
	}
	if f := r.pre.Take(socketKept); f != nil {
		return control.ListenFile(f, r.socket, r.readers)
	}
	return nil, nil
}

// backTime bounds the wait for the clients of the last process. It is shorter than
// serverServeTime.
const backTime = 3 * time.Second

// takeOver waits for the last process to leave, calls serve, and returns when the
// last process has ended. devices returns the number that clients have open: those
// of the last process come back before this one says that it serves, unless that
// takes too long.
func (r *daemonRun) takeOver(serve func() error, devices func() int) error {
	if r.pre == nil {
		return nil
	}
	ctx := r.cmd.Context()
	if err := r.pre.Ready(versionString()); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	had, err := r.pre.AwaitGo(ctx)
	if err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	if err := serve(); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	r.pre.Drop()
	awaitBack(ctx, had, devices)
	if err := r.pre.Serving(); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	r.log.Info("this process serves in place of the last one", "devices", devices(), "before", had)
	return r.pre.AwaitEnd(ctx)
}

// awaitBack waits for so many devices.
func awaitBack(ctx context.Context, want int, devices func() int) {
	ctx, cancel := context.WithTimeout(ctx, backTime)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for devices() < want {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
