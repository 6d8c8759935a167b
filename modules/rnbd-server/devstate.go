package server

import "slices"

// devState is the state of a device.
//
//	           opened              its plugin dies
//	opening ----------> open ------------------------> recovering
//	                     ^  ^                            |    |
//	                     |  |        opened again        |    | FenceTimeout
//	                     |  '----------------------------'    v
//	                     '-------------------------------- stuck
//
//	open, recovering, stuck:  what it held is lost, its plugin is given up, or it
//	                          does not open again                    --> failing
//	failing:                  its fence has passed                   --> failed
//	failing, failed:          unless it is lost, it is opened again  --> open
//	                          or its plugin was reset                --> recovering
//	any:                      its last user has closed it            --> closed
//
// The fence has passed when no I/O of a dead process can reach the disk or the
// memory of requests any more. Until then no request that a dead process had is
// answered: the client would use its chunk for something else.
type devState uint32

const (
	devOpening    devState = iota // no mapping yet
	devOpen                       // requests are sent to the plugin
	devRecovering                 // requests wait
	devStuck                      // as recovering, for too long: no new user
	devFailing                    // requests fail, but for those that a dead process had: they wait
	devFailed                     // requests fail
	devClosed
)

var devMoves = [...][]devState{
	devOpening:    {devOpen, devClosed},
	devOpen:       {devRecovering, devFailing, devFailed, devClosed},
	devRecovering: {devOpen, devStuck, devFailing, devFailed, devClosed},
	devStuck:      {devOpen, devFailing, devFailed, devClosed},
	devFailing:    {devOpen, devRecovering, devFailed, devClosed},
	devFailed:     {devOpen, devRecovering, devClosed},
	devClosed:     {},
}

// failure is why a device is failing or failed.
type failure uint8

const (
	failedLost    failure = iota // the plugin does not keep what it acknowledged; for good
	failedShrunk                 // requests may lie beyond its end; for good
	failedChanged                // another volume, or limits that users were not told; for good
	failedPlugin                 // the plugin is given up; until that is reset
	failedOpen                   // it does not open again, which is tried on
)

// forGood reports whether only a new OPEN helps.
func (f failure) forGood() bool {
	return f == failedLost || f == failedShrunk || f == failedChanged
}

// now is the state. Any goroutine, any pump.
func (d *device) now() devState { return devState(d.word.Load()) }

// serves and fails are what pumps ask: if neither, requests wait.
func (d *device) serves() bool { return d.now() == devOpen }
func (d *device) fails() bool  { return d.now() >= devFailing }

// move changes the state, if the drawing has that move. Caller holds
// d.plugin.mu.
func (d *device) move(to devState) bool {
	if !slices.Contains(devMoves[d.now()], to) {
		return false
	}
	d.word.Store(uint32(to))
	return true
}

// moveToFailing is move, to failed if there is nothing to wait for. Caller
// holds d.plugin.mu.
func (d *device) moveToFailing(why failure) bool {
	to := devFailing
	if why == failedShrunk || why == failedChanged { // in the next process, after the fence
		to = devFailed
	}
	if !d.move(to) {
		return false
	}
	d.why = why
	return true
}

// lost reports whether d is failed for good.
func (d *device) lost() bool {
	d.plugin.mu.Lock()
	defer d.plugin.mu.Unlock()
	return d.fails() && d.now() != devClosed && d.why.forGood()
}

// state describes d to people.
func (d *device) state() string {
	d.plugin.mu.Lock()
	now, why, openErr := d.now(), d.why, d.openErr
	d.plugin.mu.Unlock()
	switch {
	case now == devFailing, now == devFailed:
		switch why {
		case failedPlugin:
			return "failed: plugin " + d.plugin.cfg.Name + " crashes too often"
		case failedOpen:
			return "failed: does not open again: " + openErr
		case failedShrunk:
			return "failed: smaller than before its plugin died"
		case failedChanged:
			return "failed: not what it was before its plugin died: " + openErr
		}
		return "failed: plugin state lost"
	case now == devStuck:
		return "stuck: waits for the I/O of a dead plugin"
	case d.retired.Load() > 0:
		return "stuck: waits for I/O that does not end"
	case now != devOpen:
		return "recovering"
	}
	return "open"
}
