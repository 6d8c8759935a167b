package server

import (
	"context"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/fence"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Devices that fail: their requests end with EIO, those that a dead process had
// after the fence.

const (
	// opensAtOnce devices are opened again at a time. One that takes longer
	// than opensQuick continues without counting.
	opensAtOnce = 16
	opensQuick  = time.Second
	// reopenTimeout bounds one try to open a device.
	reopenTimeout = 30 * time.Second
	// Pauses between tries, to open a device or to find that its fence has passed.
	reopenFirst = 20 * time.Millisecond
	reopenMost  = 5 * time.Second
)

// failAll answers the requests of devices that begin to fail.
func (p *ioPlugin) failAll(devices []*device) {
	for _, d := range devices {
		p.log.Error("device failed", "device", d.name, "state", d.stateText())
		p.mu.Lock()
		d.told = true
		p.mu.Unlock()
		p.server.notifyUsers(d, rnbdwire.EventFailed)
		p.unpark(d)
		if d.currentState() == devFailing {
			p.work.Go(func() { p.passFence(d) })
		}
	}
}

// passFence waits until no I/O of a dead process of d can reach disk or memory
// any more, and answers the requests that the process had. If the server sees
// no locks of the plugin's, a process that opens the device again finds out. If
// there is no such process, the requests wait for the plugin's reset, or for
// the end of their path.
func (p *ioPlugin) passFence(d *device) {
	for pause := reopenFirst; d.currentState() == devFailing; pause = min(2*pause, reopenMost) {
		if p.fencePassed(d) {
			p.mu.Lock()
			moved := d.setState(devFailed)
			p.mu.Unlock()
			if moved {
				p.unpark(d)
			}
			return
		}
		if !sleepFor(p.life, pause) {
			return
		}
	}
}

// fencePassed reports whether the fence of a failing device has passed.
func (p *ioPlugin) fencePassed(d *device) bool {
	if d.guard.file != nil && !d.guard.unlocked {
		free, err := fence.Free(d.guard.file)
		return err == nil && free
	}
	p.mu.Lock()
	in, dead := p.in, p.dead
	p.mu.Unlock()
	if p.info().Crash == plugin.LosesAll { // its I/O ends with the process
		select {
		case <-dead.Reaped():
			return true
		default:
			return false
		}
	}
	if in == nil || !d.isLost() { // reopen opens devices that are not lost
		return false
	}
	if _, err := p.openAgain(in, d); err != nil {
		return false
	}
	return p.closeDisk(in, d) == nil
}

// openAgain asks in to open d. A few devices are opened at a time.
func (p *ioPlugin) openAgain(in *supervise.Instance, d *device) (plugin.OpenedDisk, error) {
	select {
	case p.opens <- struct{}{}:
	case <-in.Context().Done():
		return plugin.OpenedDisk{}, plugin.ErrExited
	}
	makeRoom := sync.OnceFunc(func() { <-p.opens })
	defer makeRoom()
	defer time.AfterFunc(opensQuick, makeRoom).Stop()
	ctx, cancel := context.WithTimeout(in.Context(), reopenTimeout)
	defer cancel()
	return in.OpenStorage(ctx, d.openRequest(in.Generation))
}
