package server

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
)

// devState is the state of a device.
//
//	           opened              its plugin dies
//	opening ----------> open ------------------------> recovering
//	                     ^  ^                            |    |
//	                     |  |        opened again        |    | FenceTimeout
//	                     |  '----------------------------'    v
//	                     '-------------------------------- stuck
//
//	open, recovering, stuck:  its writes are lost, its plugin is given up, or it
//	                          does not open again                    --> failing
//	failing:                  its fence has passed                   --> failed
//	failing, failed:          unless it is lost, it is opened again  --> open
//	                          or its plugin was reset                --> recovering
//	open:                     it is copied                           --> paused
//	paused:                   the copy is made                       --> open
//	                          and everything that leaves open
//	any:                      its last user has closed it            --> closed
//
// The fence has passed when no I/O of a dead process can reach the disk or the
// memory of requests any more. Until then requests of the dead process are not
// answered: the client would use their chunks for something else.
type devState uint32

const (
	devOpening    devState = iota // no mapping yet
	devOpen                       // requests are sent to the plugin
	devPaused                     // requests wait while the device is copied
	devRecovering                 // requests wait
	devStuck                      // as recovering, for too long: no new user
	devFailing                    // requests fail, but for those that a dead process had: they wait
	devFailed                     // requests fail
	devClosed
)

var devStateNames = [...]string{"opening", "open", "paused", "recovering", "stuck", "failing", "failed", "closed"}

func (s devState) String() string { return devStateNames[s] }

var devMoves = [...][]devState{
	devOpening:    {devOpen, devClosed},
	devOpen:       {devPaused, devRecovering, devFailing, devFailed, devClosed},
	devPaused:     {devOpen, devRecovering, devFailing, devFailed, devClosed},
	devRecovering: {devOpen, devStuck, devFailing, devFailed, devClosed},
	devStuck:      {devOpen, devFailing, devFailed, devClosed},
	devFailing:    {devOpen, devRecovering, devFailed, devClosed},
	devFailed:     {devOpen, devRecovering, devClosed},
	devClosed:     {},
}

// forGood reports whether only a new OPEN ends the failure.
func (f failureReason) forGood() bool {
	return f == failedLost || f == failedShrunk || f == failedChanged
}

// currentState returns the state. Any goroutine or pump may call it.
func (d *device) currentState() devState { return devState(d.word.Load()) }

// isServing and fails are the questions of pumps. If neither is true, requests
// wait.
func (d *device) isServing() bool { return d.currentState() == devOpen }
func (d *device) isFailing() bool { return d.currentState() >= devFailing }

// setState changes the state if the diagram has that transition. The caller holds
// d.plugin.mu.
func (d *device) setState(to devState) bool {
	if !slices.Contains(devMoves[d.currentState()], to) {
		return false
	}
	d.recordMove(to)
	d.word.Store(uint32(to))
	return true
}

// recordMove records that d is about to move to another state. Its first OPEN
// and its last CLOSE are recorded as those of a session. The caller holds
// d.plugin.mu.
func (d *device) recordMove(to devState) {
	from := d.currentState()
	if from == devOpening || to == devClosed {
		return
	}
	e := journal.Event{Kind: journal.Device, Device: d.name, Plugin: d.plugin.cfg.Name, From: from.String(), To: to.String()}
	if to == devFailing || to == devFailed {
		e.Why = d.whyFailed()
	}
	d.plugin.server.cfg.Journal.Add(e)
}

// moveToFailing moves to devFailing, or to devFailed if there is nothing to
// wait for. text is the error of failedOpen and failedChanged. The caller holds
// d.plugin.mu.
func (d *device) moveToFailing(why failureReason, text string) bool {
	to := devFailing
	if why == failedShrunk || why == failedChanged { // in the next process, after the fence
		to = devFailed
	}
	if !slices.Contains(devMoves[d.currentState()], to) {
		return false
	}
	d.why, d.openErr = why, text
	return d.setState(to)
}

// isLost reports whether d is failed for good.
func (d *device) isLost() bool {
	d.plugin.mu.Lock()
	defer d.plugin.mu.Unlock()
	return d.isFailing() && d.currentState() != devClosed && d.why.forGood()
}

// whyFailed returns the reason of a failure in words. The caller holds d.plugin.mu.
func (d *device) whyFailed() string {
	switch d.why {
	case failedPlugin:
		return "plugin " + d.plugin.cfg.Name + " crashes too often"
	case failedOpen:
		return "does not open again: " + d.openErr
	case failedShrunk:
		return "smaller than before its plugin died"
	case failedChanged:
		return "not what it was before its plugin died: " + d.openErr
	}
	return "plugin state lost"
}

// stateText returns the state of d in words.
func (d *device) stateText() string {
	d.plugin.mu.Lock()
	now, why := d.currentState(), d.whyFailed()
	d.plugin.mu.Unlock()
	switch {
	case now == devFailing, now == devFailed:
		return "failed: " + why
	case now == devStuck:
		return "stuck: waits for the I/O of a dead plugin"
	case d.retired.Load() > 0:
		return "stuck: waits for I/O that does not end"
	case now == devPaused:
		return "paused: a snapshot is being made"
	case now != devOpen:
		return "recovering"
	}
	return "open"
}

// widestAccess returns the widest access that the plugin may be asked for.
func (d *device) widestAccess() blk.AccessMode {
	if d.key.readOnly {
		return blk.ReadOnly
	}
	return blk.ReadWrite
}

// sameVolume returns an error if d's node is a block device and now another
// disk than when it was opened. A file cannot change in this way.
func (d *device) sameVolume() error {
	if d.file == nil || d.key.id.ino != 0 {
		return nil
	}
	seq, volume := diskSeq(d.key.id.dev), volumeOfDisk("/sys", d.key.id.dev)
	known := d.volume != 0 || d.diskSeq != "" && seq != "" // else nothing tells disks apart
	if !known || d.diskSeq != "" && seq == d.diskSeq || d.volume != 0 && volume == d.volume {
		return nil
	}
	return fmt.Errorf("%s is another disk: %w", d.path, syscall.EIO)
}
