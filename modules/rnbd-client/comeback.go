package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// A process that is started in place of a dead one takes its devices over. One
// that fails may have a cause that passes, as a driver that is late, and users of
// the disk wait until somebody serves it: it is tried again while the process lives.

const (
	firstComebacks   = 10 * time.Second // that a start waits for, before it goes on to the sockets
	comebackPause    = time.Second      // after the first try; the next ones are longer
	maxComebackPause = 30 * time.Second
	comebacksAtOnce  = 16 // devices that a process is busy with
)

// addAll lets a new process take over the devices of earlier ones. It waits for the
// first try of each, but not for long: the rest goes on by itself.
func (f *frontend) addAll(ctx context.Context, proc *plugin.Process, gen uint32) {
	ctx, cancel := context.WithTimeout(ctx, firstComebacks)
	defer cancel()
	for _, tried := range f.beginComebacks(proc, gen) {
		select {
		case <-tried:
		case <-proc.Exited():
			return
		case <-ctx.Done():
			return
		}
	}
}

// beginComebacks starts one for each device and returns what tells of their first
// tries.
func (f *frontend) beginComebacks(proc *plugin.Process, gen uint32) (all []<-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopping {
		return nil
	}
	turns := make(chan struct{}, comebacksAtOnce)
	clear(f.missing)
	for _, d := range f.devices {
		tried := make(chan struct{})
		f.missing[d] = gen
		all = append(all, tried)
		f.wg.Go(func() {
			c := comeback{f: f, proc: proc, gen: gen, d: d, turns: turns}
			ctx, cancel := context.WithCancel(f.starts)
			defer cancel()
			err := c.try(ctx)
			close(tried)
			c.tryAgain(ctx, err)
		})
	}
	return all
}

// comeback is one device on its way to a new process.
type comeback struct {
	f     *frontend
	proc  *plugin.Process
	gen   uint32
	d     *Device
	turns chan struct{} // a token for each try under way
	tried bool
}

// tryAgain goes on after a try that ended with err, until the device is back, or
// the process has ended, or the front end ends.
func (c *comeback) tryAgain(ctx context.Context, err error) {
	for pause := comebackPause; err != nil; pause = min(2*pause, maxComebackPause) {
		if ctx.Err() != nil || errors.Is(err, plugin.ErrExited) || errors.Is(err, errStruck) {
			return
		}
		c.f.log.Error("device does not come back, it is tried again", "device", c.d.name, "pause", pause.String(), "error", err)
		select {
		case <-c.proc.Exited():
			return
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		if err = c.try(ctx); err == nil {
			c.f.log.Info("device is back", "device", c.d.name)
		}
	}
}

// try shows the device once. It ends when the process has answered: one that is
// given up may take the disk over all the same.
func (c *comeback) try(ctx context.Context) error {
	select {
	case c.turns <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-c.turns }()
	before := c.d.Location()
	if err := c.show(ctx); err != nil {
		return err
	}
	if c.d.Location() != before {
		c.f.client.moved(c.d)
	}
	c.f.retell(c.d)
	return nil
}

// errStruck: the device has been removed, so no process is to have it.
var errStruck = errors.New("the device has been removed")

// show shows the device, unless it is removed by now: errStruck. If that happens
// meanwhile, the process has to let go of it again.
func (c *comeback) show(ctx context.Context) (err error) {
	if !c.f.beginShow(c.d) {
		return errStruck
	}
	defer func() { c.f.endShow(c.proc, c.d, c.gen, err) }()
	if c.tried && c.adopt(ctx) == nil { // the answer to the last try was lost
		return nil
	}
	c.tried = true
	if err = c.f.show(ctx, c.proc, c.d, c.gen); err != nil {
		_ = c.proc.DetachArena(ctx, c.d.index) // which the next try attaches
	}
	return err
}

// adopt takes the device as shown if the process has it.
func (c *comeback) adopt(ctx context.Context) error {
	st, err := c.proc.DeviceStatus(ctx, c.d.index)
	if err == nil {
		c.d.shown(st.Location, blk.Limits{})
	}
	return err
}

func (f *frontend) beginShow(d *Device) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.devices[d.index] != d {
		return false
	}
	f.showing[d]++
	return true
}

func (f *frontend) endShow(proc *plugin.Process, d *Device, gen uint32, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.devices[d.index] != d { // before its memory and its index are given back
		f.lingerLocked(proc, d, true)
	}
	if err == nil && f.missing[d] == gen {
		delete(f.missing, d)
	}
	if f.showing[d]--; f.showing[d] == 0 {
		delete(f.showing, d)
	}
}

// shows: a new process is being shown d.
func (f *frontend) shows(d *Device) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.showing[d] > 0
}

// missed is the error of a removal without force while d is not back: whether it
// has users nobody knows then.
func (f *frontend) missed(d *Device) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, is := f.missing[d]; !is {
		return nil
	}
	return fmt.Errorf("front end %s has died, and its next process has not got %s back yet; wait for that, or force it: %w", f.cfg.Name, d.name, syscall.EBUSY)
}
