package server

import (
	"context"
	"fmt"
	"syscall"
	"time"
)

// A device is paused while its file is copied in one step: the requests that the plugin
// has end, and further ones are parked. Requests that wait for their data to be written
// behind a flush are parked after the flush.

// pause makes d's requests wait, and returns when the plugin has none. resume must
// follow. EBUSY: d is not open, or its plugin ended meanwhile. ETIMEDOUT: its requests do
// not end before ctx does.
func (p *ioPlugin) pause(ctx context.Context, d *device) error {
	p.mu.Lock()
	ok := d.currentState() == devOpen && d.setState(devPaused)
	p.mu.Unlock()
	if !ok {
		return fmt.Errorf("%s is %s: %w", d.path, d.stateText(), syscall.EBUSY)
	}
	for pause := 200 * time.Microsecond; p.sent(d) > 0; pause = min(2*pause, 10*time.Millisecond) {
		if !sleepFor(ctx, pause) {
			_ = p.resume(d) // the error of a plugin that ended is not the reason
			return fmt.Errorf("requests of %s do not end: %w", d.path, syscall.ETIMEDOUT)
		}
	}
	if d.currentState() != devPaused { // what a dead plugin had is not counted
		return p.resume(d)
	}
	return nil
}

// sent returns the number of d's requests in the plugin.
func (p *ioPlugin) sent(d *device) (n int32) {
	for i, q := range p.queues {
		p.server.pumps[q.pump].pump.Call(func() { n += d.loads[i].sent })
	}
	return n
}

// resume ends a pause. EBUSY: the pause has ended before, with the plugin.
func (p *ioPlugin) resume(d *device) error {
	p.mu.Lock()
	paused := d.currentState() == devPaused && d.setState(devOpen)
	p.mu.Unlock()
	if !paused {
		return fmt.Errorf("%s is %s: its plugin ended while it was copied: %w", d.path, d.stateText(), syscall.EBUSY)
	}
	p.unpark(d)
	return nil
}
